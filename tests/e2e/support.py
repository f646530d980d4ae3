"""What end-to-end tests share: kubectl as a function, and waiting for a condition.

Import as `from e2e.support import Kubectl, KubectlError, eventually`; the fixtures are in conftest.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Observed = TypeVar("Observed")
Manifest = Mapping[str, Any]

POLL_SECONDS = 0.2


class KubectlError(AssertionError):
    """kubectl ended with an error; `stderr` is what it said, for example the API server's refusal."""

    def __init__(self, arguments: Sequence[str], returncode: int, stdout: str, stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)} ended with {returncode}: {stderr.strip() or stdout}")
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


class Kubectl:
    """`kubectl(...)` gives stdout as text, `kubectl.json(...)` the parsed object; errors are KubectlError.

    Where `namespace` is set, every call uses it unless the call names another one.
    """

    def __init__(self, *, binary: Path, kubeconfig: Path, namespace: str | None = None) -> None:
        self.binary = binary
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    def within(self, namespace: str) -> Kubectl:
        """The same, with a namespace of its own."""
        return Kubectl(binary=self.binary, kubeconfig=self.kubeconfig, namespace=namespace)

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        command = [str(self.binary), f"--kubeconfig={self.kubeconfig}"]
        if self.namespace is not None:
            command.append(f"--namespace={self.namespace}")
        done = subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode != 0:
            raise KubectlError(arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def json(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> Any:
        """The call's output as an object; adds `--output=json`."""
        return json.loads(self(*arguments, "--output=json", stdin=stdin, timeout=timeout))

    def apply(self, *manifests: Manifest, server_side: bool = True, options: Sequence[str] = ()) -> str:
        """Apply manifests given as objects. The field manager of server-side applies is kubectl's own."""
        flags = ["--server-side"] if server_side else []
        return self("apply", *flags, *options, "--filename=-", stdin=as_list(*manifests))

    def create(self, *manifests: Manifest, options: Sequence[str] = ()) -> str:
        """Create manifests given as objects."""
        return self("create", *options, "--filename=-", stdin=as_list(*manifests))


def as_list(*manifests: Manifest) -> str:
    """Manifests as what kubectl reads from its standard input."""
    if len(manifests) == 1:
        return json.dumps(manifests[0])
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})


def eventually(
    observe: Callable[[], Observed],
    timeout: float,
    describe: str,
    *,
    accept: Callable[[Observed], bool] = bool,
) -> Observed:
    """Observe every 0.2 s until `accept` agrees, and return what was observed.

    `timeout` is in seconds. An AssertionError raised by `observe` (KubectlError is one) counts as not yet.
    Fails with `describe` and the last thing observed.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            observed = observe()
            if accept(observed):
                return observed
            last: object = observed
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {describe}; last observed: {last!r}")
        time.sleep(POLL_SECONDS)


def remove_namespace(kubectl: Kubectl, name: str) -> None:
    """Its deletion would wait for half of the longest grace period of its pods (a router's): those go first."""
    inside = kubectl.within(name)
    inside("delete", "rolloutservers", "--all", "--wait=false")
    inside("delete", "pods", "--all", "--force", "--grace-period=0")
    kubectl("delete", "namespace", name, "--wait=false")

"""An engine outside the cluster: a process in a network namespace that hangs on the local cluster's bridge."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2e.support import eventually

ROOT = Path(__file__).parents[2]
ADDRESS = "10.89.0.200"
NAMESPACE = "rf-outside"
MAC = "02:00:0a:59:00:c8"
BRIDGE = "rfbr0"
PORT = 30000


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def routes_to_pods() -> list[tuple[str, str]]:
    """(range of pod addresses, node) as this machine knows them; it forwards nothing itself."""
    shown = subprocess.run(["ip", "-json", "route", "show", "dev", BRIDGE], capture_output=True, text=True, check=True)
    return [(route["dst"], route["gateway"]) for route in json.loads(shown.stdout) if "gateway" in route]


@contextmanager
def network_namespace() -> Iterator[str]:
    """A host of its own beside the cluster's nodes; gone afterwards."""
    if subprocess.run(["ip", "link", "show", BRIDGE], capture_output=True, check=False).returncode:
        pytest.fail(f"there is no bridge {BRIDGE}: this test needs the local cluster (make up)", pytrace=False)
    name = NAMESPACE
    remove_namespace()  # of a run that was killed
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        # The same for each run, or nodes that have talked to the last one send to its address for a while.
        run("ip", "-n", name, "link", "set", "eth0", "address", MAC)
        run("ip", "link", "set", name, "master", BRIDGE, "up")
        for device in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", device, "up")
        run("ip", "-n", name, "addr", "add", f"{ADDRESS}/24", "dev", "eth0")
        for pods, node in routes_to_pods():
            run("ip", "-n", name, "route", "add", pods, "via", node)
        yield name
    finally:
        remove_namespace()


def remove_namespace() -> None:
    """The namespace of these tests with all that runs in it; and with it goes the pair of devices."""
    if not Path("/run/netns", NAMESPACE).exists():
        return
    pids = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    run("ip", "netns", "delete", NAMESPACE)


class OutsideEngine:
    """SGLang as somebody would start it by hand; `start` again after `kill` is a new process."""

    url = f"http://{ADDRESS}:{PORT}"

    def __init__(self, namespace: str, model: str, log: Path) -> None:
        self._namespace = namespace
        self._model = model
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        (python,) = sorted(Path.home().glob(".cache/rolloutfleet/engine-*/bin/python"))[-1:]
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-")
        environment = {
            **os.environ,
            "TMPDIR": self._scratch.name,  # killed as it will be, it removes nothing itself
            "PYTHONPATH": str(ROOT / "images/engine-cpu/shim"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_HOST_IP": ADDRESS,
        }
        command = ["ip", "netns", "exec", self._namespace, str(python), "-m", "sglang.launch_server"]
        command += ["--model-path", self._model, "--host", "0.0.0.0", "--port", str(PORT), "--device", "cpu"]
        command += ["--load-format", "auto", "--skip-tokenizer-init", "--max-total-tokens", "8192", "--sleep-on-idle"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        """As a machine that loses its power: every process of it at once."""
        if self._process is None:
            return
        os.killpg(self._process.pid, 9)
        self._process.wait(timeout=30)
        self._process = None
        found = ["ip", "netns", "pids", self._namespace]
        eventually(
            lambda: subprocess.run(found, capture_output=True, text=True, check=True).stdout,
            30,
            "no process is left in the namespace",
            accept=lambda pids: not pids.strip(),
        )
        if self._scratch is not None:
            self._scratch.cleanup()

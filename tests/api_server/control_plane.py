"""etcd and kube-apiserver on loopback ports: the real API, and no controller, scheduler or kubelet that acts on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from rolloutfleet.kube.config import Credentials

CRDS = Path(__file__).parents[2] / "crds"
READY_SECONDS = 60.0
EXIT_SECONDS = 10.0


class ControlPlaneError(RuntimeError):
    pass


@dataclass(frozen=True)
class ControlPlane:
    credentials: Credentials
    """Of an administrator."""


def binaries() -> Path:
    """Where `tests/cluster/cluster tools` puts them; the version is that of tests/cluster/common.sh."""
    cache = Path(os.environ.get("ROLLOUTFLEET_CACHE") or Path.home() / ".cache/rolloutfleet")
    common = (Path(__file__).parents[1] / "cluster/common.sh").read_text()
    version = next(line for line in common.splitlines() if line.startswith("KUBERNETES=")).split()[0].split("=")[1]
    folder = cache / f"kubernetes-{version}"
    if not (folder / "kube-apiserver").exists():
        raise ControlPlaneError(f"{folder}: no kube-apiserver there; run `tests/cluster/cluster tools`")
    return folder


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Everything it writes goes below `folder`; its processes end with the context, and with this process at the
    latest."""
    client, peer, secure = _free_ports(3)
    token = secrets.token_hex(16)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "service-accounts.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    etcd = [
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]
    api_server = [
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{client}",
        f"--secure-port={secure}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'service-accounts.key'}",
        f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged",
        # No controller makes the default service accounts that this one asks for.
        "--disable-admission-plugins=ServiceAccount",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=0",
        "--max-mutating-requests-inflight=0",
        "--event-ttl=10m",
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (etcd, api_server):
            started.append(_start(command, folder / f"{command[0]}.log"))
        credentials = _ready(f"https://127.0.0.1:{secure}", token, folder, started)
        _install_crds(credentials)
        yield ControlPlane(credentials)
    finally:
        _end(reversed(started))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a group of its own, so that Ctrl-C is ours to handle; killed with us, however we end."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "--", str(binaries() / command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(processes: Iterator[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing of theirs is kept
        process.wait(timeout=EXIT_SECONDS)


def _ready(url: str, token: str, folder: Path, processes: list[subprocess.Popen[bytes]]) -> Credentials:
    deadline = time.monotonic() + READY_SECONDS
    authority = folder / "certificates/apiserver.crt"
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                raise ControlPlaneError(f"{process.args!r} ended: {_logs(folder)}")
        if authority.exists():
            tls = ssl.create_default_context(cafile=str(authority))
            with contextlib.suppress(httpx.HTTPError):
                headers = {"Authorization": f"Bearer {token}"}
                if httpx.get(f"{url}/readyz", headers=headers, verify=tls, trust_env=False).is_success:
                    return Credentials(server=url, tls=tls, token=lambda: token, namespace="default")
        time.sleep(0.1)
    raise ControlPlaneError(f"the API server is not ready after {READY_SECONDS:g} s: {_logs(folder)}")


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text(errors="replace")[-2000:] for log in sorted(folder.glob("*.log")))


def _install_crds(credentials: Credentials) -> None:
    headers = {"Authorization": f"Bearer {credentials.token()}"}
    with httpx.Client(
        base_url=credentials.server, headers=headers, verify=credentials.tls, trust_env=False, timeout=30.0
    ) as http:
        served = []
        for file in sorted(CRDS.glob("*s.yaml")):
            answer = http.post(
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                content=file.read_bytes(),
                headers={"Content-Type": "application/yaml"},
            )
            if not answer.is_success:
                raise ControlPlaneError(f"{file}: {answer.status_code} {answer.text}")
            spec = answer.json()["spec"]
            served.append(f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}")
        deadline = time.monotonic() + READY_SECONDS
        for path in served:
            while not http.get(path).is_success:
                if time.monotonic() > deadline:
                    raise ControlPlaneError(f"{path} is not served after {READY_SECONDS:g} s")
                time.sleep(0.05)

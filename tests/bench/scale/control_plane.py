"""A control plane with kwok's nodes, inside the namespaces that run.sh made. No kubelet and no kube-proxy.

We are PID 1: whatever is started here ends with us, so nothing keeps a list of processes to end.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
from collections.abc import Set
from pathlib import Path
from typing import Any

import httpx

from rolloutfleet.kube import client as kube
from rolloutfleet.kube.config import Credentials

REPOSITORY = Path(__file__).parents[3]
STATE = Path("/run/scale")
API = "10.88.0.10"
API_NAME = "kubernetes.default.svc"
POD_RANGE = "10.64.0.0/12"
NAMESPACE = "bench"
AUDIT_LOG = STATE / "logs/audit.log"
NODES = 5
START_SECONDS = 120.0

# One token a component: the API server knows them from a file, so no certificates are made for clients.
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kwok": ("kwok", "system:masters"),
}

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted", "Panic"],
    "rules": [
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "verbs": ["get", "list"]},
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}


class ControlPlane:
    """`limits`: "raised" lets controller manager and scheduler send 1000 requests a second, so that the operator is
    what is measured; "stock" leaves 20 a controller and 50."""

    def __init__(self, limits: str) -> None:
        self._limits = ["--kube-api-qps=1000", "--kube-api-burst=2000"] if limits == "raised" else []
        self.pids: dict[str, int] = {}

    async def start(self) -> kube.KubeApi:
        """The API server alone."""
        _namespaces()
        _keys()
        self._start_api_server()
        api = kube.KubeApi(credentials("admin"), max_connections=64)
        await _until_answering(api)
        return api

    async def complete(self, api: kube.KubeApi, kinds: Set[kube.Resource]) -> None:
        """The rest, once these kinds are known: the garbage collector looks for new ones every half minute only."""
        kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        for kind in kinds:
            await _until_watched(api, kind)
        self._start_controllers()
        await self._until_ready()

    def run(self, name: str, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (STATE / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        self.pids[name] = process.pid
        return process

    def _start_api_server(self) -> None:
        url = "http://127.0.0.1:2379"
        self.run(
            "etcd",
            "etcd",
            f"--data-dir={STATE}/etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=4294967296",
        )
        self.run(
            "apiserver",
            "kube-apiserver",
            f"--etcd-servers={url}",
            f"--advertise-address={API}",
            "--secure-port=443",
            f"--tls-cert-file={STATE}/api.crt",
            f"--tls-private-key-file={STATE}/api.key",
            f"--token-auth-file={STATE}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={STATE}/accounts.key",
            f"--service-account-signing-key-file={STATE}/accounts.key",
            "--service-cluster-ip-range=10.96.0.0/12",
            "--authorization-mode=RBAC",
            f"--audit-policy-file={STATE}/audit.json",
            f"--audit-log-path={AUDIT_LOG}",
            "--audit-log-maxsize=10000",
        )

    def _start_controllers(self) -> None:
        self.run(
            "controller-manager",
            "kube-controller-manager",
            f"--kubeconfig={STATE}/controller-manager.json",
            f"--service-account-private-key-file={STATE}/accounts.key",
            f"--root-ca-file={STATE}/api.crt",
            "--use-service-account-credentials",
            "--leader-elect=false",
            *self._limits,
        )
        self.run(
            "scheduler",
            "kube-scheduler",
            f"--kubeconfig={STATE}/scheduler.json",
            "--leader-elect=false",
            *self._limits,
        )
        self.run(
            "kwok",
            "kwok",
            f"--kubeconfig={STATE}/kwok.json",
            f"--config={Path(__file__).with_name('kwok.yaml')}",
            "--manage-all-nodes=true",
            f"--node-ip={API}",
            f"--cidr={POD_RANGE}",
            "--node-lease-duration-seconds=40",
        )

    async def _until_ready(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            kubectl("create", "--filename=-", stdin=as_list(_nodes()))
            kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")
            kubectl("create", "namespace", NAMESPACE)
            accounts = ("get", "serviceaccounts", f"--namespace={NAMESPACE}", "--output=name")
            while "default" not in kubectl(*accounts):  # noqa: ASYNC110
                await asyncio.sleep(0.2)


def credentials(user: str) -> Credentials:
    tls = ssl.create_default_context(cafile=str(STATE / "api.crt"))
    return Credentials(server=f"https://{API}:443", tls=tls, token=lambda: user, namespace=NAMESPACE)


def _namespaces() -> None:
    """Every address of the pod range is ours: a process that listens on all addresses answers for all pods."""
    _run("ip link set lo up")
    _run(f"ip address add {API}/32 dev lo")
    _run(f"ip route add local {POD_RANGE} dev lo")
    _run("mount -t tmpfs scale /run")
    (STATE / "logs").mkdir(parents=True)
    (STATE / "hosts").write_text(f"127.0.0.1 localhost\n{API} {API_NAME}\n")  # kopf asks for the API server by name
    _run(f"mount --bind {STATE}/hosts /etc/hosts")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _keys() -> None:
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=scale"]
    files = ["-keyout", f"{STATE}/api.key", "-out", f"{STATE}/api.crt"]
    subprocess.run(
        [*openssl, *files, "-addext", f"subjectAltName=IP:{API},DNS:{API_NAME}"], check=True, capture_output=True
    )
    subprocess.run(["openssl", "genrsa", "-out", f"{STATE}/accounts.key", "2048"], check=True, capture_output=True)
    lines = [f'{token},{user},{token},"{groups}"' for token, (user, groups) in USERS.items()]
    (STATE / "tokens.csv").write_text("\n".join(lines) + "\n")
    (STATE / "audit.json").write_text(json.dumps(AUDIT_POLICY))
    for token in USERS:
        cluster = {"server": f"https://{API}:443", "certificate-authority": f"{STATE}/api.crt"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "scale", "cluster": cluster}],
            "users": [{"name": token, "user": {"token": token}}],
            "contexts": [{"name": "scale", "context": {"cluster": "scale", "user": token}}],
            "current-context": "scale",
        }
        (STATE / f"{token}.json").write_text(json.dumps(config))


def _nodes() -> list[dict[str, Any]]:
    room = {"cpu": "1000", "memory": "4Ti", "pods": "2000", "nvidia.com/gpu": "2000"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"fake-{index}", "labels": {"kubernetes.io/hostname": f"fake-{index}"}},
            "status": {"allocatable": room, "capacity": room},
        }
        for index in range(NODES)
    ]


async def _until_answering(api: kube.KubeApi) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not await _answers(api):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def _answers(api: kube.KubeApi) -> bool:
    async with httpx.AsyncClient(verify=api.credentials.tls, trust_env=False) as http:
        try:
            answer = await http.get(f"{api.credentials.server}/readyz", headers={"Authorization": "Bearer admin"})
        except httpx.HTTPError:
            return False
    return answer.is_success


async def _until_watched(api: kube.KubeApi, resource: kube.Resource) -> None:
    """A new CRD refuses watches for some seconds (429, then 410), and kopf's pauses after that grow long."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                version = (await api.list(resource)).resource_version
                async for _ in api.watch(resource, resource_version=version, seconds=3):
                    pass
            except kube.ApiError:
                await asyncio.sleep(0.2)
            else:
                return


def as_list(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    command = ["kubectl", f"--kubeconfig={STATE}/admin.json", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout

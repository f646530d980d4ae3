"""What is measured: our operator, the least that could be in its place, and a peer on the same control plane."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import yaml

from bench.scale import least
from bench.scale.control_plane import (
    API,
    NAMESPACE,
    REPOSITORY,
    STATE,
    ControlPlane,
    as_list,
    kubectl,
)
from bench.scale.watcher import Fleets, Watcher, is_true, until
from rolloutfleet.api.names import API_VERSION, COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_SERVER
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.resources import Resource

SERVICE_ACCOUNT_FILES = Path("/run/secrets/kubernetes.io/serviceaccount")
START_SECONDS = 60.0
STOP_SECONDS = 60.0
READY_SECONDS = 400.0
SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Account:
    """The service account that a subject runs as, with the rights that it ships with."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"

    def write_files(self) -> None:
        token = kubectl("create", "token", self.name, f"--namespace={self.namespace}", "--duration=24h").strip()
        self._files.mkdir(parents=True)
        (self._files / "token").write_text(token)
        (self._files / "namespace").write_text(self.namespace)
        (self._files / "ca.crt").write_bytes((STATE / "api.crt").read_bytes())
        SERVICE_ACCOUNT_FILES.mkdir(parents=True, exist_ok=True)

    def start(
        self, plane: ControlPlane, *command: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process that finds what a pod of this account would find. Its PID is the command's: nothing forks."""
        mount = f'mount --bind "$0" {SERVICE_ACCOUNT_FILES} && exec "$@"'
        as_pod = {"KUBERNETES_SERVICE_HOST": API, "KUBERNETES_SERVICE_PORT": "443", "KUBECONFIG": ""}
        inside = ("unshare", "--mount", "sh", "-c", mount, str(self._files), *command)
        return plane.run("operator", *inside, environment=as_pod | (environment or {}))

    @property
    def _files(self) -> Path:
        return STATE / "accounts" / self.namespace


class Subject(Fleets, Protocol):
    """An operator of fleets."""

    name: str
    kinds: tuple[Resource, ...]
    """What its CRDs define and it watches."""
    account: Account
    repairs: bool
    """It replaces a pod that is gone."""

    def install(self) -> None:
        """Once a control plane, before its controllers start: the garbage collector looks for new kinds seldom."""

    def manifest(self, name: str, engines: int) -> kube.Object:
        """What a user posts."""

    async def start(self, engines: int) -> subprocess.Popen[bytes]:
        """Its process, which answers; fleets will have this many engines."""


class Rolloutfleet(Subject):
    name = "rolloutfleet"
    fleet = kube.ROLLOUT_SERVER
    kinds = (kube.ROLLOUT_SERVER, kube.SERVER_GROUP)
    fleet_label = LABEL_SERVER
    account = Account("rolloutfleet-system", "rolloutfleet-operator")
    repairs = True

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def install(self) -> None:
        """The manifests but for the Deployment: the process is ours."""
        rendered = yaml.safe_load_all(kubectl("kustomize", f"{REPOSITORY}/manifests/base"))
        items = [manifest for manifest in rendered if manifest["kind"] != "Deployment"]
        kubectl("apply", "--server-side", "--filename=-", stdin=as_list(items))
        self.account.write_files()

    def manifest(self, name: str, engines: int) -> kube.Object:
        group = {"name": "engines", "replicas": engines, "engine": {"image": "engine"}}
        return {
            "apiVersion": API_VERSION,
            "kind": "RolloutServer",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"path": "/models/bench"}, "groups": [group]},
        }

    def is_engine(self, labels: dict[str, str]) -> bool:
        return labels.get(LABEL_COMPONENT) == COMPONENT_ENGINE

    def is_whole(self, fleet: kube.Object) -> bool:
        engines = (fleet.get("status") or {}).get("engines") or {}
        wanted = sum(group["replicas"] for group in fleet["spec"]["groups"])
        return is_true(fleet, "Ready") and engines.get("routable") == engines.get("desired") == wanted

    async def start(self, engines: int) -> subprocess.Popen[bytes]:
        environment = {
            "POD_IP": API,
            "POD_NAME": "operator",
            "POD_NAMESPACE": self.account.namespace,  # with it come the Lease and the webhook
            "ROLLOUTFLEET_ROUTER_IMAGE": "router",
            "ROLLOUTFLEET_AGENT_IMAGE": "agent",
            "ROLLOUTFLEET_PLACEHOLDER_IMAGE": "placeholder",
        }
        operator = self._run("rolloutfleet.control", environment=environment)
        await _until_it_answers(operator, "http://127.0.0.1:8080/healthz")
        return operator

    def _run(self, module: str, *arguments: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = (os.environ["OPERATOR_PYTHON"], "-B", "-m", module, *arguments)
        sources = {"PYTHONPATH": f"{REPOSITORY}/operator:{REPOSITORY}/tests"}
        return self.account.start(self._plane, *command, environment=sources | environment)


class Least(Rolloutfleet):
    """Makes what our operator has made for one fleet, and does nothing else."""

    name = "least"
    repairs = False

    def __init__(self, plane: ControlPlane, api: kube.KubeApi, watcher: Watcher) -> None:
        super().__init__(plane)
        self._api = api
        self._watcher = watcher

    def install(self) -> None:
        """As ours, which is measured beside it."""

    async def start(self, engines: int) -> subprocess.Popen[bytes]:
        operator = await super().start(engines)
        await self._api.create(self.fleet, self.manifest("pattern", engines))
        await until(lambda: "pattern" in self._watcher.whole, READY_SECONDS, "the pattern whole")
        await asyncio.sleep(SETTLE_SECONDS)  # its budget comes last
        record = STATE / "record.json"
        record.write_text(json.dumps(await least.recorded(self._api, "pattern")))
        await stop(operator)
        await self._api.delete(self.fleet, "pattern", namespace=NAMESPACE)
        await until(self._watcher.empty, READY_SECONDS, "the pattern gone")
        return self._run("bench.scale.least", str(record), environment={})


class LeaderWorkerSet(Subject):
    """kubernetes-sigs/lws as it ships, from a checkout in which run.sh has built `bin/manager`. Its group of one leader
    and its workers is as many pods as a fleet has engines; it has no router, gates, budget or Lease of a fleet."""

    name = "lws"
    fleet = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
    kinds = (fleet,)
    fleet_label = "leaderworkerset.sigs.k8s.io/name"
    account = Account("lws-system", "lws-controller-manager")
    repairs = True

    def __init__(self, plane: ControlPlane, checkout: Path) -> None:
        self._plane = plane
        self._checkout = checkout
        self._config = STATE / "lws.yaml"

    def install(self) -> None:
        rendered = yaml.safe_load_all(kubectl("kustomize", f"{self._checkout}/config/default"))
        items = [manifest for manifest in rendered if manifest and manifest["kind"] != "Deployment"]
        authority = base64.b64encode((STATE / "api.crt").read_bytes()).decode()
        for item in items:
            for webhook in item.get("webhooks", ()):  # there is no kube-proxy: its Service leads nowhere
                path = webhook["clientConfig"]["service"]["path"]
                webhook["clientConfig"] = {"url": f"https://{API}:9443{path}", "caBundle": authority}
        kubectl("apply", "--server-side", "--filename=-", stdin=as_list(items))
        certificates = STATE / "lws-certificates"
        certificates.mkdir()
        for name, ours in (("tls.crt", "api.crt"), ("tls.key", "api.key")):
            (certificates / name).write_bytes((STATE / ours).read_bytes())
        config = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": True},
            "internalCertManagement": {"enable": False},
            "webhook": {"certDir": str(certificates)},
        }
        self._config.write_text(yaml.safe_dump(config))
        self.account.write_files()

    def manifest(self, name: str, engines: int) -> kube.Object:
        container = {"name": "main", "image": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        template = {"size": engines, "restartPolicy": "None", "workerTemplate": {"spec": {"containers": [container]}}}
        return {
            "apiVersion": self.fleet.api_version,
            "kind": self.fleet.kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": 1, "leaderWorkerTemplate": template},
        }

    def is_engine(self, labels: dict[str, str]) -> bool:
        return True

    def is_whole(self, fleet: kube.Object) -> bool:
        return is_true(fleet, "Available")

    async def start(self, engines: int) -> subprocess.Popen[bytes]:
        command = (f"{self._checkout}/bin/manager", f"--config={self._config}", "--zap-log-level=2")
        operator = self.account.start(self._plane, *command)
        await _until_it_answers(operator, "http://127.0.0.1:8081/readyz")
        await _until_it_answers(operator, f"https://{API}:9443/", status=404)  # readyz says nothing of webhooks
        return operator


async def stop(operator: subprocess.Popen[bytes]) -> None:
    operator.terminate()
    await asyncio.to_thread(operator.wait, STOP_SECONDS)


async def _until_it_answers(operator: subprocess.Popen[bytes], url: str, *, status: int = 200) -> None:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http, asyncio.timeout(START_SECONDS):
        while await _status(http, url) != status:
            if operator.poll() is not None:
                raise SystemExit(f"the operator ended with {operator.returncode}")
            await asyncio.sleep(0.2)


async def _status(http: httpx.AsyncClient, url: str) -> int | None:
    try:
        return (await http.get(url)).status_code
    except httpx.HTTPError:
        return None

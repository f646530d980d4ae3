"""Fleets of tiny real engines for end-to-end tests: manifests, and looking into engines, routers and trainers.

Engines and routers are reached through the API server's proxy, so any cluster will do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.support import Kubectl, KubectlError, eventually
from rolloutfleet.api.server_group import EngineStatus
from rolloutfleet.api.weight_labels import fleet_id, weight_label

SHARED = "/var/lib/rolloutfleet-cluster/shared"
ENGINE_IMAGE = "localhost/rolloutfleet/engine-cpu:dev"
TRAINER_IMAGE = "localhost/rolloutfleet/trainer-example:dev"
START_SECONDS = 420.0

CPU_ARGUMENTS = {
    "device": "cpu",
    "load-format": "auto",
    "skip-tokenizer-init": "",
    "max-total-tokens": "8192",
}


def host_path(name: str, folder: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": f"{SHARED}/{folder}", "type": "Directory"}}


def engine_group(
    name: str = "main",
    *,
    replicas: int | None = 1,
    engine: dict[str, Any] | None = None,
    args: dict[str, str] | None = None,
    node: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Engines on the CPU; on `node`, where that is given."""
    spec: dict[str, Any] = {
        "securityContext": {"runAsUser": 65532, "runAsGroup": 0},
        "containers": [
            {
                "name": "engine",
                "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
                "volumeMounts": [
                    {"name": "environment", "mountPath": "/opt/engine", "readOnly": True},
                    {"name": "models", "mountPath": "/models", "readOnly": True},
                ],
            }
        ],
        "volumes": [host_path("environment", "engine"), host_path("models", "models")],
    }
    # Idle schedulers poll without a pause: several of them leave nothing of two cores for one that starts. Those of a
    # pair must: what they wait for comes by other ways than those that would wake them.
    idle = {} if fields.get("role") in ("Prefill", "Decode") else {"sleep-on-idle": ""}
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {
        "name": name,
        **({} if replicas is None else {"replicas": replicas}),
        "engine": {"image": ENGINE_IMAGE, "args": {**CPU_ARGUMENTS, **idle, **(args or {})}, **(engine or {})},
        "template": {"spec": spec},
        "recovery": {"backoff": {"initialSeconds": 2, "maxSeconds": 4}},
        "drainTimeoutSeconds": 10,
        **fields,
    }


def rollout_server(
    name: str,
    *,
    replicas: int = 1,
    model: str = "/models/m0",
    service_accounts: tuple[str, ...] = (),
    engine: dict[str, Any] | None = None,
    groups: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """The weights volume holds both tiny models, so an update names /weights/m1."""
    return {
        "apiVersion": "rolloutfleet.dev/v1alpha1",
        "kind": "RolloutServer",
        "metadata": {"name": name},
        "spec": {
            "model": {"path": model, "servedName": name},
            "groups": [engine_group(replicas=replicas, engine=engine)] if groups is None else groups,
            "weights": {
                "mountPath": "/weights",
                "volume": {"hostPath": {"path": f"{SHARED}/models", "type": "Directory"}},
            },
            "trainers": {"serviceAccounts": list(service_accounts)},
            **spec,
        },
    }


def stand_in(name: str, role: str, replicas: int, **pod_spec: Any) -> dict[str, Any]:
    """A group whose engines are stand_in_engine.py: a command in place of ours is handed SGLang's arguments."""
    container = {
        "name": "engine",
        "command": ["python3", "-S", "/stand-in/engine.py"],
        "volumeMounts": [{"name": "stand-in", "mountPath": "/stand-in"}],
    }
    return {
        "name": name,
        "role": role,
        "replicas": replicas,
        "engine": {"image": ENGINE_IMAGE},
        "drainTimeoutSeconds": 5,
        "template": {
            "spec": {
                "containers": [container],
                "volumes": [{"name": "stand-in", "configMap": {"name": "stand-in"}}],
                **pod_spec,
            }
        },
    }


def stand_in_code(kubectl: Kubectl) -> None:
    """The config map that stand-ins run from."""
    code = Path(__file__).with_name("stand_in_engine.py").read_text()
    kubectl("create", "configmap", "stand-in", f"--from-literal=engine.py={code}")


def trainer_pod(name: str, servers: str, *, service_account: str = "trainer") -> dict[str, Any]:
    """A pod in which `Trainer` runs code beside the injected agent."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"rolloutfleet.dev/rollout-servers": servers}},
        "spec": {
            "serviceAccountName": service_account,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "securityContext": {"runAsUser": 65532, "runAsGroup": 0, "runAsNonRoot": True},
            "containers": [
                {
                    "name": "trainer",
                    "image": TRAINER_IMAGE,
                    "command": ["sleep", "infinity"],
                    "volumeMounts": [
                        {"name": "environment", "mountPath": "/opt/engine", "readOnly": True},
                        {"name": "weights", "mountPath": "/weights", "readOnly": True},
                    ],
                }
            ],
            "volumes": [host_path("environment", "engine"), host_path("weights", "models")],
        },
    }


class TrainerError(AssertionError):
    """Trainer code raised; the text is its last line."""


class Trainer:
    """Runs a few lines in a trainer pod, with `fleet` connected to a role of it."""

    def __init__(self, kubectl: Kubectl, pod: str, role: str = "actor") -> None:
        self._kubectl = kubectl
        self.pod = pod
        self.role = role

    def __call__(self, expression: str, *, before: str = "", timeout: float = 180.0) -> Any:
        """The value of an expression over `fleet`, after some lines; models come back as plain data."""
        code = (
            "import json\n"
            "from rolloutfleet.trainer import connect\n"
            f"fleet = connect({self.role!r})\n"
            "def plain(x):\n"
            "    return x.model_dump(mode='json') if hasattr(x, 'model_dump') else str(x)\n"
            f"{before}\n"
            f"print('RESULT' + json.dumps({expression}, default=plain))\n"
        )
        try:
            output = self._kubectl(
                "exec", self.pod, "--container=trainer", "--", "python3", "-c", code, timeout=timeout
            )
        except KubectlError as error:
            lines = [line for line in error.stderr.splitlines() if "Error" in line or "Refused" in line or ": " in line]
            raise TrainerError("\n".join(lines[-2:]) or error.stderr) from error
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        return json.loads(line.removeprefix("RESULT"))


def engines(kubectl: Kubectl, group: str) -> list[dict[str, Any]]:
    """What status says of each, with what it leaves out since it is empty."""
    found: list[dict[str, Any]] = kubectl.json("get", "sgrp", group).get("status", {}).get("engines", [])
    return [EngineStatus.model_validate(engine).dump() for engine in found]


def ready(kubectl: Kubectl, server: str) -> dict[str, Any]:
    status = kubectl.json("get", "ros", server).get("status", {})
    return next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})


def await_routable(kubectl: Kubectl, server: str, count: int, *, seconds: float = START_SECONDS) -> None:
    def look() -> dict[str, Any]:
        status = kubectl.json("get", "ros", server).get("status", {})
        groups = [group for group in kubectl.json("get", "sgrp")["items"] if group["spec"]["server"] == server]
        told = sum(group.get("status", {}).get("routable", 0) for group in groups)
        return {"engines": status.get("engines"), "in groups": told, "conditions": status.get("conditions")}

    eventually(
        look,
        seconds,
        f"{server} has {count} routable engines",
        # Groups tell of progress up to some seconds later.
        accept=lambda seen: (seen["engines"] or {}).get("routable") == seen["in groups"] == count,
    )


def router_pods(kubectl: Kubectl, server: str) -> list[str]:
    labels = f"rolloutfleet.dev/server={server},rolloutfleet.dev/component=router"
    pods = kubectl.json("get", "pods", f"--selector={labels}")["items"]
    return [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def through_proxy(kubectl: Kubectl, pod: str, path: str) -> Any:
    """GET on port 30000 of a pod."""
    return json.loads(kubectl("get", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}:30000/proxy{path}"))


def listed_urls(kubectl: Kubectl, router: str) -> set[str]:
    return {worker["url"] for worker in through_proxy(kubectl, router, "/workers")["workers"]}


def label_of(kubectl: Kubectl, pod: str) -> str:
    """What the engine itself calls its weights."""
    return str(through_proxy(kubectl, pod, "/model_info")["weight_version"])


def label_for(kubectl: Kubectl, server: str, version: int) -> str:
    """What engines of this server call these weights."""
    uid = str(kubectl.json("get", "ros", server)["metadata"]["uid"])
    return weight_label(version, fleet_id(uid))


def paused(kubectl: Kubectl, pod: str) -> bool:
    try:
        kubectl("get", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}:30000/proxy/ready")
    except KubectlError:
        return True
    return False


def signal_engine(kubectl: Kubectl, pod: str, number: str, *, part: str = "sglang") -> None:
    """Send a signal to every process of SGLang in an engine's container whose command line has `part` in it."""
    code = (
        "import os, pathlib, signal\n"
        "for process in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    try:\n"
        "        words = (process / 'cmdline').read_bytes()\n"
        "    except OSError:\n"
        "        continue\n"
        f"    if int(process.name) != os.getpid() and {part.encode()!r} in words:\n"
        f"        os.kill(int(process.name), signal.{number})\n"
    )
    kubectl("exec", pod, "--container=engine", "--", "python3", "-S", "-c", code)

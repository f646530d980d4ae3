"""Trainers' pods with the agent in them, as a real API server with Pod Security and a quota admits them."""

from __future__ import annotations

from typing import Any

import httpx

from api_server.control_plane import ControlPlane
from rolloutfleet.plan.injection import inject

NAMESPACE = "locked"
RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
HARD = {"requests.cpu": "8", "requests.memory": "16Gi", "limits.cpu": "16", "limits.memory": "32Gi"}
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000650000,
    "fsGroup": 1000650000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def trainer(**container: Any) -> dict[str, Any]:
    """Of a restricted namespace: a user that no image knows, a file system that nobody may write to."""
    locked = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    only = {"name": "trainer", "image": "trainer:1", "securityContext": locked, "resources": RESOURCES, **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "train-",
            "annotations": {"rolloutfleet.dev/rollout-servers": "actor=base,reward=rm"},
        },
        "spec": {"serviceAccountName": "trainer", "containers": [only], "securityContext": RESTRICTED},
    }


def test_29_a_restricted_namespace_with_a_quota_admits_the_agent_and_what_it_refuses_is_not_the_agents(
    cluster: ControlPlane,
) -> None:
    credentials = cluster.credentials
    headers = {"Authorization": f"Bearer {credentials.token()}"}
    options: dict[str, Any] = {"headers": headers, "verify": credentials.tls, "trust_env": False, "timeout": 30.0}
    with httpx.Client(base_url=credentials.server, **options) as http:

        def created(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = http.post(f"/api/v1/{path}", json=body)
            assert answer.status_code == 201, answer.text
            found: dict[str, Any] = answer.json()
            return found

        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        created("namespaces", {"metadata": {"name": NAMESPACE, "labels": labels}})
        quotas = f"namespaces/{NAMESPACE}/resourcequotas"
        quota = created(quotas, {"metadata": {"name": "all"}, "spec": {"hard": HARD}})
        quota["status"] = {"hard": HARD, "used": dict.fromkeys(HARD, "0")}  # as its controller would
        assert http.put(f"/api/v1/{quotas}/all/status", json=quota).is_success

        pods = f"namespaces/{NAMESPACE}/pods"
        pod = created(pods, inject(trainer(), agent_image="agent:1"))
        contexts = [container["securityContext"] for container in pod["spec"]["initContainers"]]
        assert [context["readOnlyRootFilesystem"] for context in contexts] == [True]
        refusals: dict[str, dict[str, Any]] = {
            "violates PodSecurity": {"securityContext": {}},
            "must specify": {"resources": {}},
        }
        for said, wrong in refusals.items():
            refused = http.post(f"/api/v1/{pods}", json=inject(trainer(**wrong), agent_image="agent:1"))
            assert refused.status_code == 403
            assert said in refused.text
            assert "rolloutfleet-agent" not in refused.text

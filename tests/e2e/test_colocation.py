"""Trainer and engines on the same GPUs, up to the scheduler's allocation: the devices are made up, so that no kubelet
can prepare them. The pods are those that operator and webhook make of the sample."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.fleets import TRAINER_IMAGE
from e2e.support import Kubectl, eventually
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.injection import inject
from rolloutfleet.plan.objects import Defaults, wanted_children

SAMPLE = Path(__file__).parents[2] / "manifests/samples/colocated-gpu.yaml"
NODE = "node1"


@pytest.fixture
def device_class(kubectl: Kubectl) -> Iterator[str]:
    """Of two devices that a driver publishes on one node."""
    name = f"gpu-{uuid.uuid4().hex[:8]}.rolloutfleet.dev"
    selector = {"cel": {"expression": f"device.driver == '{name}'"}}
    slices = {
        "driver": name,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "one"}, {"name": "two"}],
    }
    kinds = {"DeviceClass": {"selectors": [selector]}, "ResourceSlice": slices}
    kubectl.create(
        *(
            {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
            for kind, spec in kinds.items()
        )
    )
    yield name
    kubectl("delete", f"deviceclass/{name}", f"resourceslice/{name}")


def sample(kind: str) -> dict[str, Any]:
    return next(found for found in yaml.safe_load_all(SAMPLE.read_text()) if found["kind"] == kind)


def runnable(pod: dict[str, Any]) -> dict[str, Any]:
    """With an image that is here, and without the volumes that are not."""
    spec = pod["spec"]
    gone = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in gone]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        container["image"] = TRAINER_IMAGE
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] not in gone]
    return pod


def engine_pods(space: Kubectl) -> list[dict[str, Any]]:
    """As the operator makes them."""
    server = RolloutServer.model_validate(
        {
            **sample("RolloutServer"),
            "metadata": {"name": "qwen", "namespace": space.namespace, "uid": str(uuid.uuid4())},
        }
    )
    defaults = Defaults(router_image="router", placeholder_image="pause", agent_image=TRAINER_IMAGE)
    (group,) = (
        ServerGroup.model_validate({**child, "metadata": {**child["metadata"], "uid": str(uuid.uuid4())}})
        for child in wanted_children(server, defaults, pairs=False)
        if child["kind"] == "ServerGroup"
    )
    pods = [engine_pod(group, index=index, epoch=1, defaults=defaults) for index in range(group.spec.replicas)]
    for pod in pods:
        del pod["metadata"]["ownerReferences"]  # there is no such object
    return [runnable(pod) for pod in pods]


def test_trainer_and_engines_are_given_the_same_gpus_each_engine_its_own(
    kubectl: Kubectl, namespace: str, device_class: str
) -> None:
    space = kubectl.within(namespace)
    space("create", "serviceaccount", "trainer")
    claim = sample("ResourceClaim")
    for request in claim["spec"]["devices"]["requests"]:
        request["exactly"]["deviceClassName"] = device_class
    space.create(claim)
    engines = engine_pods(space)
    trainer = runnable(inject(sample("Pod"), agent_image=TRAINER_IMAGE))
    for pod in (*engines, trainer):
        space.create(pod)
    names = [pod["metadata"]["name"] for pod in (*engines, trainer)]

    def scheduled() -> list[dict[str, Any]]:
        return [pod for pod in space.json("get", "pods", *names)["items"] if pod["spec"].get("nodeName")]

    pods = eventually(scheduled, 60, "all are scheduled", accept=lambda found: len(found) == len(names))
    assert {pod["spec"]["nodeName"] for pod in pods} == {NODE}
    status = space.json("get", "resourceclaim", "qwen-gpus")["status"]
    devices = {result["request"]: result["device"] for result in status["allocation"]["devices"]["results"]}
    assert sorted(devices) == ["gpu-0", "gpu-1"]
    assert sorted(devices.values()) == ["one", "two"]
    assert {user["uid"] for user in status["reservedFor"]} == {pod["metadata"]["uid"] for pod in pods}
    by_name = {pod["metadata"]["name"]: pod["spec"] for pod in pods}
    for index, engine in enumerate(engines):
        container = by_name[engine["metadata"]["name"]]["containers"][0]
        assert container["resources"]["claims"] == [{"name": "rolloutfleet-gpus", "request": f"gpu-{index}"}]
        assert "nvidia.com/gpu" not in str(container["resources"])
    agent = by_name["trainer"]["initContainers"][0]
    assert agent["resources"]["claims"] == by_name["trainer"]["containers"][0]["resources"]["claims"]
    space("delete", "pods", "--all", "--force", "--grace-period=0")

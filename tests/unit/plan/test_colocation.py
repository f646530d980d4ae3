"""Engines on the trainer's GPUs: whose they are, what they share, and how frozen ones come back."""

from __future__ import annotations

from typing import Any

from unit.plan.world import World, rollout_server


def pods(*, update_weights: bool = True, **group: Any) -> list[dict[str, Any]]:
    manifest = rollout_server(replicas=group.pop("replicas", 2))
    manifest["spec"]["updateWeights"] = update_weights
    manifest["spec"]["groups"][0] |= group
    world = World(manifest)
    world.settle()
    return [world.pods[name]["spec"] for name in world.engine_names()]


def engine(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(spec["containers"][0])


def test_a_colocated_engine_references_the_trainers_claim_and_requests_no_gpu_of_its_own() -> None:
    first, second = pods(colocation={"resourceClaim": "qwen-{index}-{rank}"})
    for spec, claim in ((first, "qwen-0-0"), (second, "qwen-1-0")):
        assert spec["resourceClaims"] == [{"name": "rolloutfleet-gpus", "resourceClaimName": claim}]
        assert engine(spec)["resources"] == {"claims": [{"name": "rolloutfleet-gpus"}]}


def test_engines_of_one_claim_see_the_gpus_of_their_own_request() -> None:
    for index, spec in enumerate(pods(colocation={"resourceClaim": "qwen-gpus", "request": "gpu-{index}"})):
        assert spec["resourceClaims"] == [{"name": "rolloutfleet-gpus", "resourceClaimName": "qwen-gpus"}]
        assert engine(spec)["resources"] == {"claims": [{"name": "rolloutfleet-gpus", "request": f"gpu-{index}"}]}


def test_without_a_claim_the_template_says_how_an_engine_gets_to_the_trainers_gpus() -> None:
    container = {"name": "engine", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}
    (spec,) = pods(replicas=1, colocation={}, template={"spec": {"containers": [container]}})
    assert "resourceClaims" not in spec
    assert engine(spec)["resources"] == {}


def test_a_folder_of_the_node_is_the_shared_memory_of_a_colocated_engine() -> None:
    (spec,) = pods(replicas=1, colocation={"sharedMemory": "/dev/shm/qwen"})
    volume = {"name": "rolloutfleet-shm", "hostPath": {"path": "/dev/shm/qwen", "type": "DirectoryOrCreate"}}
    assert volume in spec["volumes"]
    assert {"name": "rolloutfleet-shm", "mountPath": "/dev/shm"} in engine(spec)["volumeMounts"]
    assert "hostPID" not in spec
    assert "hostIPC" not in spec


def test_only_frozen_weights_that_are_released_are_kept_in_host_memory() -> None:
    def kept(**group: Any) -> bool:
        return "--enable-weights-cpu-backup" in engine(pods(replicas=1, **group)[0])["args"]

    assert kept(offload=True, update_weights=False)
    assert not kept(offload=True, update_weights=True)
    assert not kept(offload=False, update_weights=False)

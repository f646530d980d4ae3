"""What broke others' operators, where no other test shows it: docs/cases-operator.md. Numbers are the cases'."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.actions import Action, Apply, Requeue
from rolloutfleet.plan.engine_args import engine_arguments
from rolloutfleet.plan.failures import refusal
from rolloutfleet.plan.fleet import plan_fleet
from rolloutfleet.plan.objects import version_of
from rolloutfleet.plan.observed import encoder_table_url, engine_pod, router_pod
from unit.plan.world import DEFAULTS, World, rollout_server

Body = dict[str, Any]
ROOT = Path(__file__).parents[3]
BASE = ROOT / "manifests/base"


def serving(server: Body | None = None, *, routers: int = 1) -> World:
    world = World(server or rollout_server(replicas=2), routers=routers)
    world.settle()
    return world


def manifest(file: str, kind: str, name: str) -> Body:
    """Of the operator's installation."""
    found: list[Body] = [
        body
        for body in yaml.safe_load_all((BASE / file).read_text())
        if (body["kind"], body["metadata"]["name"]) == (kind, name)
    ]
    (body,) = found
    return body


def operators_pod() -> Body:
    spec: Body = manifest("operator.yaml", "Deployment", "rolloutfleet-operator")["spec"]["template"]["spec"]
    return spec


def test_7_no_pod_of_ours_is_told_of_the_services_around_it() -> None:
    placeholder = {"name": "spare", "role": "Placeholder", "engine": {}}
    world = serving(rollout_server(groups=[{"name": "main", "engine": {"image": "engine:1"}}, placeholder]))
    pods = [pod["spec"] for pod in world.pods.values()]
    assert len(pods) == 2
    pods += [world.router_set()["spec"]["template"]["spec"], operators_pod()]
    assert [pod["enableServiceLinks"] for pod in pods] == [False] * 4


def test_9_what_admission_and_others_add_to_our_objects_makes_no_write_and_no_pod() -> None:
    world = serving(routers=2)
    for pod in world.pods.values():  # a LimitRange, a registry's mirror, a hand
        container = pod["spec"]["containers"][0]
        container["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
        container["image"] = f"mirror/{container['image']}"
        pod["spec"]["tolerations"] = []
    for child in [*world.children.values(), *world.pods.values()]:
        child["metadata"].setdefault("labels", {})["team"] = "rl"
        child["metadata"].setdefault("annotations", {})["note"] = "by hand"
    routers = world.router_set()
    routers["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/router:1"
    applied = {key: version_of(child) for key, child in world.children.items()}

    def wants() -> list[Action]:
        plan = plan_fleet(world.fleet(), defaults=DEFAULTS, applied_versions=applied, now=world.now)
        return [action for action in plan if not isinstance(action, Requeue)]

    for _ in range(5):
        world.now += timedelta(minutes=1)
        assert wants() == []
    routers["metadata"]["generation"] += 1
    (put_back,) = [action for action in wants() if isinstance(action, Apply)]
    assert put_back.manifest["kind"] == "ReplicaSet", "an edit after our own write is one"


MISSING: dict[str, tuple[str, str]] = {
    "priority": ("PriorityClassNotFound", "no-such-class"),
    "account": ("ServiceAccountNotFound", "no-such-account"),
    "claim": ("Unschedulable", "no-such-claim"),
    "secret": ("CreateContainerConfigError", "no-such-secret"),
    "image": ("ImagePullBackOff", "no-such:image"),
}
REFUSED = {
    "priority": 'pods "p" is forbidden: no PriorityClass with name no-such-class was found',
    "account": 'pods "p" is forbidden: error looking up service account rl/no-such-account: not found',
}
"""What the API server says, word for word."""


def waits(reason: str, message: str) -> Body:
    container = {"name": "engine", "state": {"waiting": {"reason": reason, "message": message}}}
    placed = {"type": "PodScheduled", "status": "True"}
    return {"phase": "Pending", "conditions": [placed], "containerStatuses": [container]}


NO_CLAIM = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": '0/2 nodes are available: persistentvolumeclaim "no-such-claim" not found.',
}
STUCK: dict[str, Body] = {
    "claim": {"phase": "Pending", "conditions": [NO_CLAIM]},
    "secret": waits("CreateContainerConfigError", 'secret "no-such-secret" not found'),
    "image": waits("ImagePullBackOff", 'Back-off pulling image "registry.invalid/no-such:image"'),
}


def test_14_each_thing_that_is_missing_has_its_reason_costs_no_life_and_heals_by_itself() -> None:
    groups = [{"name": name, "replicas": 1, "engine": {"image": "engine:1"}} for name in MISSING]
    world = World(rollout_server(groups=groups))
    world.create_failures = {f"qwen-{name}-0-e1-r0": refusal("Forbidden", message) for name, message in REFUSED.items()}

    def step(seconds: float = 0) -> None:
        world.now += timedelta(seconds=seconds)
        for action in world.plan():
            world.perform(action)

    def flips() -> list[tuple[str, str]]:
        statuses = [world.server["status"], *(world.group_status(name) for name in MISSING)]
        return [(c["type"], c["lastTransitionTime"]) for status in statuses for c in status["conditions"]]

    for _ in range(3):
        step()
    for name, status in STUCK.items():
        world.pods[f"qwen-{name}-0-e1-r0"]["status"] = copy.deepcopy(status)
    for _ in range(3):
        step()
    before, seen = flips(), {}
    for _ in range(6):
        step(3600)
        seen = {name: world.group_status(name)["engines"][0] for name in MISSING}
    for name, (reason, thing) in MISSING.items():
        assert seen[name]["reason"] == reason
        assert thing in seen[name]["message"]
    assert {engine["restarts"] for engine in seen.values()} == {0}
    assert flips() == before, "nothing changes"

    world.create_failures.clear()
    for name in STUCK:
        world.pods[f"qwen-{name}-0-e1-r0"]["status"] = {"phase": "Pending", "conditions": []}
    since = world.now
    world.settle()
    assert world.now - since < timedelta(seconds=60)
    assert sorted(world.pods) == sorted(f"qwen-{name}-0-e1-r0" for name in MISSING)
    assert len(world.listed()) == 5


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        (["FD00:10:244::5"], "[fd00:10:244::5]"),
        (["fd00:10:244::5", "10.1.2.3"], "[fd00:10:244::5]"),
        (["10.1.2.3", "fd00:10:244::5"], "10.1.2.3"),
    ],
    ids=["one", "first of two", "second of two"],
)
def test_21_an_engine_has_one_url_of_the_family_that_comes_first(addresses: list[str], host: str) -> None:
    world = serving()
    name = world.engine_names()[0]
    status = {"podIP": addresses[0], "podIPs": [{"ip": address} for address in addresses]}
    pod = {**world.pods[name], "status": {**world.pods[name]["status"], **status}}
    assert engine_pod(pod).url == f"http://{host}:30000"
    assert encoder_table_url(engine_pod(pod).url) == f"http://{host}:8997"
    assert router_pod(pod, {}).url == f"http://{host}:30000"


def test_21_where_pods_have_ipv6_addresses_engines_listen_at_all_of_them() -> None:
    spec = {"server": "qwen", "model": {"path": "/m"}, "engine": {"image": "i", "nodes": 2, "tensorParallel": 2}}
    group = ServerGroup.model_validate({"metadata": {"name": "qwen-main", "namespace": "rl"}, "spec": spec})
    words = engine_arguments(group, index=0, epoch=1, rank=1, bind="::")
    assert words[words.index("--host") + 1] == "::"
    meeting = words[words.index("--dist-init-addr") + 1]
    assert meeting == "qwen-main-0-e1-r0.qwen-main-ranks.rl.svc:20000", "a name, whatever its addresses are"


def test_67_a_trainers_role_is_for_one_fleet_and_follows_the_accounts_that_are_named() -> None:
    world = serving(rollout_server(trainers={"serviceAccounts": ["b", "a"]}))

    binding = world.children["RoleBinding/qwen-trainer"]
    assert [subject["name"] for subject in binding["subjects"]] == ["a", "b"]
    assert binding["roleRef"]["name"] == "qwen-trainer"
    rules = world.children["Role/qwen-trainer"]["rules"]
    named = {name for rule in rules for name in rule.get("resourceNames", ["ANY " + rule["resources"][0]])}
    assert named == {"qwen", "qwen-main", "qwen-trainer", "ANY events"}
    world.server["spec"]["trainers"]["serviceAccounts"] = ["a"]
    world.settle()
    (left,) = world.children["RoleBinding/qwen-trainer"]["subjects"]
    assert (left["kind"], left["name"], left["namespace"]) == ("ServiceAccount", "a", "rl")
    world.server["spec"]["trainers"]["serviceAccounts"] = []
    world.settle()
    assert not {"Role/qwen-trainer", "RoleBinding/qwen-trainer"} & set(world.children)


def test_67_the_operator_gives_no_right_that_it_has_not_itself_and_needs_no_escalation() -> None:
    own = manifest("rbac.yaml", "ClusterRole", "rolloutfleet-operator")["rules"]
    assert not {verb for rule in own for verb in rule["verbs"]} & {"escalate", "bind", "impersonate", "*"}
    given = serving(rollout_server(trainers={"serviceAccounts": ["a"]})).children["Role/qwen-trainer"]["rules"]
    wanted = {(g, r, v) for rule in given for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    held = {
        (g, r, v)
        for rule in own
        if "resourceNames" not in rule
        for g in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }
    assert wanted <= held


def writable(pod: Body) -> set[str]:
    """Where its first container may write although nobody knows its user: mounts of volumes of the pod's own."""
    own = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = pod["containers"][0]["volumeMounts"]
    return {mount["mountPath"] for mount in mounts if mount["name"] in own and not mount.get("readOnly")}


def test_70_homes_and_caches_are_where_any_user_may_write() -> None:
    world = serving()
    engine = next(iter(world.pods.values()))["spec"]
    paths = {e["name"]: e["value"] for e in engine["containers"][0]["env"] if e["name"].endswith(("HOME", "_DIR"))}
    assert set(paths) == {"HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    assert all(any(Path(path).is_relative_to(mount) for mount in writable(engine)) for path in paths.values())

    router = world.router_set()["spec"]["template"]["spec"]
    assert router["containers"][0]["env"] == [{"name": "HOME", "value": "/tmp"}]
    for pod in (router, operators_pod()):
        assert writable(pod) == {"/tmp"}
        context = pod["containers"][0]["securityContext"]
        assert (context["readOnlyRootFilesystem"], context["runAsNonRoot"]) == (True, True)
        assert "runAsUser" not in context, "whoever the namespace says"


@pytest.mark.parametrize("image", ["operator", "router", "agent"])
def test_70_our_images_run_in_group_0_with_a_home_below_tmp(image: str) -> None:
    lines = (ROOT / "images" / image / "Dockerfile").read_text()
    assert "HOME=/tmp" in lines
    assert "PYTHONDONTWRITEBYTECODE=1" in lines
    assert "\nUSER 65532:0\n" in lines

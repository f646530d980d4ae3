"""The agent is put into annotated pods and into no others, and gets no more of the pod than it needs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from rolloutfleet.api.names import (
    AGENT_CONTAINER,
    AGENT_METRICS_PORT,
    AGENT_METRICS_PORT_NAME,
    ANNOTATION_ROLLOUT_SERVERS,
    ANNOTATION_SHARED_MEMORY,
    ANNOTATION_STORE_VOLUME,
    LABEL_COMPONENT,
)
from rolloutfleet.plan.injection import (
    AGENT_USER,
    SCRATCH_VOLUME,
    TOKEN_PATH,
    TOKEN_VOLUME,
    URL_VARIABLE,
    InjectionError,
    inject,
    parse_rollout_servers,
)

IMAGE = "registry/agent:1"


def pod(value: str | None = "actor=base", **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "train"}
    if value is not None:
        metadata["annotations"] = {ANNOTATION_ROLLOUT_SERVERS: value}
    return {"metadata": metadata, "spec": {"containers": [{"name": "trainer", "image": "t"}], **spec}}


def agent_of(injected: dict[str, Any]) -> dict[str, Any]:
    (agent,) = [c for c in injected["spec"]["initContainers"] if c["name"] == AGENT_CONTAINER]
    return dict(agent)


def trainer_of(injected: dict[str, Any]) -> dict[str, Any]:
    (trainer,) = [c for c in injected["spec"]["containers"] if c["name"] == "trainer"]
    return dict(trainer)


# The annotation's value


@pytest.mark.parametrize(
    ("value", "servers"),
    [
        ("actor=qwen", {"actor": "qwen"}),
        ("actor=qwen,reward=rm", {"actor": "qwen", "reward": "rm"}),
        (" actor = qwen , reward = rm ", {"actor": "qwen", "reward": "rm"}),
        ("actor=no-such-server", {"actor": "no-such-server"}),
        ("actor=qwen,judge=qwen", {"actor": "qwen", "judge": "qwen"}),
    ],
)
def test_good_values_are_read_and_handed_to_the_agent_without_blanks(value: str, servers: dict[str, str]) -> None:
    assert parse_rollout_servers(value) == servers
    env = {
        variable["name"]: variable.get("value") for variable in agent_of(inject(pod(value), agent_image=IMAGE))["env"]
    }
    assert env["ROLLOUTFLEET_SERVERS"] == ",".join(f"{role}={name}" for role, name in servers.items())


@pytest.mark.parametrize(
    "value",
    [
        "",
        "qwen",
        "actor=",
        "=qwen",
        "actor=qwen,actor=other",
        "actor=qwen,",
        "actor=qwen;reward=rm",
        "actor=other-namespace/qwen",
        "Actor=Qwen",
        "actor=qwen=rm",
        "actor=qwen\n,reward=rm.",
        "actor=-qwen",
    ],
)
def test_bad_values_are_refused_with_the_annotation_and_the_value_in_the_message(value: str) -> None:
    with pytest.raises(InjectionError) as refusal:
        inject(pod(value), agent_image=IMAGE)
    assert ANNOTATION_ROLLOUT_SERVERS in str(refusal.value)
    assert repr(value) in str(refusal.value)


def test_a_role_named_twice_is_told_as_such() -> None:
    with pytest.raises(InjectionError, match="role actor is named twice"):
        parse_rollout_servers("actor=qwen,actor=other")


# Which pods


@pytest.mark.parametrize("metadata", [{"name": "p"}, {"name": "p", "annotations": None}, {"annotations": {"a": "b"}}])
def test_a_pod_without_the_annotation_is_left_as_it_is(metadata: dict[str, Any]) -> None:
    plain = {"metadata": metadata, "spec": {"containers": [{"name": "trainer", "image": "t"}]}}
    assert inject(plain, agent_image=IMAGE) == plain


def test_the_input_is_not_changed() -> None:
    given = pod(volumes=[{"name": "data", "emptyDir": {}}])
    before = deepcopy(given)
    assert inject(given, agent_image=IMAGE) != before
    assert given == before


def test_a_second_injection_changes_nothing() -> None:
    once = inject(pod(volumes=[{"name": "data", "emptyDir": {}}]), agent_image=IMAGE)
    assert inject(once, agent_image="registry/agent:2") == once


def test_a_job_template_without_name_and_namespace_gets_the_agent_as_a_native_sidecar() -> None:
    template = {
        "metadata": {"annotations": {ANNOTATION_ROLLOUT_SERVERS: "actor=base"}},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": "trainer",
            "containers": [{"name": "trainer", "image": "t", "command": ["sh", "-c", "sleep 20; exit 0"]}],
        },
    }
    injected = inject(template, agent_image=IMAGE, pull_policy="Never")
    agent = agent_of(injected)
    assert (agent["restartPolicy"], agent["image"], agent["imagePullPolicy"]) == ("Always", IMAGE, "Never")
    assert injected["spec"]["restartPolicy"] == "Never"
    assert [c["name"] for c in injected["spec"]["containers"]] == ["trainer"], "a Job ends when the trainer ends"
    assert injected["metadata"]["labels"] == {LABEL_COMPONENT: "trainer"}
    fields = {v["name"]: v["valueFrom"]["fieldRef"]["fieldPath"] for v in agent["env"] if "valueFrom" in v}
    assert fields == {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
    }


def test_prometheus_finds_the_agent_by_a_port_that_no_pod_takes_of_its_node() -> None:
    (port,) = agent_of(inject(pod(), agent_image=IMAGE))["ports"]
    assert port == {"name": AGENT_METRICS_PORT_NAME, "containerPort": AGENT_METRICS_PORT, "protocol": "TCP"}
    assert "ports" not in agent_of(inject(pod(hostNetwork=True), agent_image=IMAGE))


def test_the_agent_is_up_before_any_init_container_of_the_trainer_and_labels_are_kept() -> None:
    given = pod(initContainers=[{"name": "fetch", "image": "f"}])
    given["metadata"]["labels"] = {"team": "rl"}
    injected = inject(given, agent_image=IMAGE)
    assert [c["name"] for c in injected["spec"]["initContainers"]] == [AGENT_CONTAINER, "fetch"]
    assert injected["metadata"]["labels"] == {"team": "rl", LABEL_COMPONENT: "trainer"}
    assert agent_of(injected)["startupProbe"]["exec"]["command"][-1] == "rolloutfleet.agent.healthcheck"


# Names that are ours


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_foreign_container_of_the_agents_name_is_refused(kind: str) -> None:
    given = pod()
    given["spec"].setdefault(kind, []).append({"name": AGENT_CONTAINER, "image": "theirs"})
    with pytest.raises(InjectionError, match=rf"spec\.{kind}: the name {AGENT_CONTAINER} .* rename yours"):
        inject(given, agent_image=IMAGE)


@pytest.mark.parametrize("name", [TOKEN_VOLUME, SCRATCH_VOLUME])
def test_a_foreign_volume_of_our_names_is_refused(name: str) -> None:
    with pytest.raises(InjectionError, match=rf"spec\.volumes: the name {name}"):
        inject(pod(volumes=[{"name": name, "emptyDir": {}}]), agent_image=IMAGE)


# The token


def test_the_agent_has_a_token_of_its_own_and_nobody_else_gets_it() -> None:
    given = pod(automountServiceAccountToken=False, serviceAccountName="trainer")
    given["spec"]["containers"].append({"name": "second", "image": "s"})
    injected = inject(given, agent_image=IMAGE)
    (volume,) = [v for v in injected["spec"]["volumes"] if v["name"] == TOKEN_VOLUME]
    kinds = {kind for source in volume["projected"]["sources"] for kind in source}
    assert kinds == {"serviceAccountToken", "configMap", "downwardAPI"}
    mounts = {m["name"]: m for m in agent_of(injected)["volumeMounts"]}
    assert mounts[TOKEN_VOLUME] == {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True}
    assert injected["spec"]["automountServiceAccountToken"] is False
    for container in injected["spec"]["containers"]:
        assert TOKEN_VOLUME not in {m["name"] for m in container.get("volumeMounts") or []}


# The trainer's volumes


def test_data_volumes_are_mirrored_read_only_at_the_trainers_paths() -> None:
    given = pod(
        volumes=[
            {"name": "weights", "persistentVolumeClaim": {"claimName": "w"}},
            {"name": "models", "hostPath": {"path": "/srv"}},
            {"name": "unmounted", "emptyDir": {}},
        ]
    )
    given["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "weights", "mountPath": "/weights", "subPath": "run-1", "mountPropagation": "Bidirectional"},
        {"name": "models", "mountPath": "/models"},
    ]
    mounts = agent_of(inject(given, agent_image=IMAGE))["volumeMounts"]
    assert {"name": "weights", "mountPath": "/weights", "subPath": "run-1", "readOnly": True} in mounts
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts
    assert "unmounted" not in {mount["name"] for mount in mounts}


def with_store(name: object) -> dict[str, Any]:
    given = pod(
        volumes=[
            {"name": "runs", "persistentVolumeClaim": {"claimName": "r"}},
            {"name": "models", "hostPath": {"path": "/srv"}},
            {"name": "password", "secret": {"secretName": "s"}},
            {"name": "unmounted", "emptyDir": {}},
        ]
    )
    given["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "runs", "mountPath": "/runs"},
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "password", "mountPath": "/secret"},
    ]
    given["metadata"]["annotations"][ANNOTATION_STORE_VOLUME] = name
    return given


def test_the_agent_may_write_to_the_volume_that_the_pod_names_for_samples() -> None:
    mounts = agent_of(inject(with_store("runs"), agent_image=IMAGE))["volumeMounts"]
    assert {"name": "runs", "mountPath": "/runs"} in mounts
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts


@pytest.mark.parametrize("name", ["models", "password", "unmounted", "other", "", 7])
def test_a_store_on_a_volume_that_cannot_be_written_to_is_refused_with_those_that_can(name: object) -> None:
    with pytest.raises(InjectionError, match=rf"store-volume: {name!r}: .* there is runs"):
        inject(with_store(name), agent_image=IMAGE)


NAME_FIELD = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}


@pytest.mark.parametrize(
    ("variables", "mirrored"),
    [
        ([{"name": "RUN", "value": "7"}, {"name": "POD_NAME", "valueFrom": NAME_FIELD}], True),
        ([{"name": "RUN", "value": "7"}, {"name": "POD_NAME", "value": "other"}], False),
        ([{"name": "RUN", "value": "$(POD_NAME)"}, {"name": "POD_NAME", "valueFrom": NAME_FIELD}], False),
        ([{"name": "RUN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}], False),
        ([], False),
    ],
)
def test_a_path_of_variables_is_mirrored_only_where_the_agent_has_the_same_ones(
    variables: list[dict[str, Any]], mirrored: bool
) -> None:
    given = pod(volumes=[{"name": "weights", "persistentVolumeClaim": {"claimName": "w"}}])
    mount = {"name": "weights", "mountPath": "/weights", "subPathExpr": "$(RUN)/$(POD_NAME)"}
    given["spec"]["containers"][0] |= {"env": variables, "volumeMounts": [mount]}
    agent = agent_of(inject(given, agent_image=IMAGE))
    assert ({**mount, "readOnly": True} in agent["volumeMounts"]) is mirrored
    assert ("weights" in {held["name"] for held in agent["volumeMounts"]}) is mirrored
    assert ({"name": "RUN", "value": "7"} in agent["env"]) is mirrored
    assert len({variable["name"] for variable in agent["env"]}) == len(agent["env"])


@pytest.mark.parametrize(
    "source",
    [
        {"secret": {"secretName": "s"}},
        {"configMap": {"name": "c"}},
        {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        {"downwardAPI": {"items": []}},
    ],
)
def test_secrets_and_tokens_of_the_trainer_are_not_shown_to_the_agent(source: dict[str, Any]) -> None:
    given = pod(volumes=[{"name": "private", **source}])
    given["spec"]["containers"][0]["volumeMounts"] = [{"name": "private", "mountPath": "/private"}]
    assert "private" not in {m["name"] for m in agent_of(inject(given, agent_image=IMAGE))["volumeMounts"]}


def test_no_path_is_mounted_twice_and_the_agents_own_paths_stay_its_own() -> None:
    given = pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}])
    given["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "a", "mountPath": "/data"},
        {"name": "a", "mountPath": "/tmp"},
        {"name": "b", "mountPath": TOKEN_PATH + "/"},
    ]
    given["spec"]["containers"].append(
        {"name": "second", "image": "s", "volumeMounts": [{"name": "b", "mountPath": "/data/"}]}
    )
    mounts = agent_of(inject(given, agent_image=IMAGE))["volumeMounts"]
    assert [(m["name"], m["mountPath"]) for m in mounts] == [
        (TOKEN_VOLUME, TOKEN_PATH),
        (SCRATCH_VOLUME, "/tmp"),
        ("a", "/data"),
    ]


# Security


def test_the_agent_satisfies_the_restricted_pod_security_standard() -> None:
    security = agent_of(inject(pod(), agent_image=IMAGE))["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": AGENT_USER,
        "runAsGroup": 0,
    }


def test_the_agent_follows_the_pods_user_unless_that_is_root() -> None:
    arbitrary = {"runAsUser": 1000650000, "fsGroup": 1000650000}
    injected = inject(pod(securityContext=arbitrary), agent_image=IMAGE)
    assert "runAsUser" not in agent_of(injected)["securityContext"]
    assert injected["spec"]["securityContext"] == arbitrary
    for context in ({"runAsUser": 0}, {"runAsNonRoot": True}, None):
        agent = agent_of(inject(pod(securityContext=context), agent_image=IMAGE))
        assert agent["securityContext"]["runAsUser"] == AGENT_USER


def test_the_restricted_namespaces_pod_keeps_its_own_security_contexts() -> None:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    given = pod("actor=base,reward=rm", securityContext={"runAsNonRoot": True, "runAsUser": 1000650000})
    del given["metadata"]["name"]
    given["metadata"]["generateName"] = "train-"
    given["spec"]["containers"][0]["securityContext"] = context
    injected = inject(given, agent_image=IMAGE)
    assert trainer_of(injected)["securityContext"] == context
    assert injected["metadata"]["generateName"] == "train-"


# The trainer's environment


def test_every_container_learns_the_agents_address() -> None:
    given = pod()
    given["spec"]["containers"].append({"name": "second", "image": "s", "env": [{"name": "A", "value": "1"}]})
    injected = inject(given, agent_image=IMAGE)
    address = {"name": URL_VARIABLE, "value": "http://127.0.0.1:8477"}
    assert trainer_of(injected)["env"] == [address]
    assert injected["spec"]["containers"][1]["env"] == [{"name": "A", "value": "1"}, address]


def test_an_address_that_the_user_has_set_is_not_overwritten() -> None:
    given = pod()
    given["spec"]["containers"][0]["env"] = [{"name": URL_VARIABLE, "value": "http://mine"}]
    injected = inject(given, agent_image=IMAGE)
    assert trainer_of(injected)["env"] == [{"name": URL_VARIABLE, "value": "http://mine"}]


# Colocated engines


def colocated(path: object = "/dev/shm/qwen", **spec: Any) -> dict[str, Any]:
    trainer = pod(**spec)
    trainer["metadata"]["annotations"][ANNOTATION_SHARED_MEMORY] = path
    return trainer


def test_containers_of_a_colocated_trainer_see_the_nodes_folder_as_dev_shm() -> None:
    twins = [{"name": "trainer", "image": "t"}, {"name": "other", "image": "o", "volumeMounts": None}]
    injected = inject(colocated(containers=twins), agent_image=IMAGE)
    for container in injected["spec"]["containers"]:
        assert container["volumeMounts"] == [{"name": "rolloutfleet-shm", "mountPath": "/dev/shm"}]
    assert {"name": "rolloutfleet-shm", "hostPath": {"path": "/dev/shm/qwen", "type": "DirectoryOrCreate"}} in (
        injected["spec"]["volumes"]
    )
    assert "/dev/shm" not in [mount["mountPath"] for mount in agent_of(injected)["volumeMounts"]]
    assert inject(injected, agent_image=IMAGE) == injected


def test_the_agent_of_a_colocated_trainer_sees_its_gpus_and_no_other_one_does() -> None:
    claims = [{"name": "gpus"}, {"name": "nic", "request": "one"}]
    containers = [{"name": name, "image": "t", "resources": {"claims": claims}} for name in ("trainer", "other")]
    assert agent_of(inject(colocated(containers=containers), agent_image=IMAGE))["resources"]["claims"] == claims
    assert "claims" not in agent_of(inject(pod(containers=containers), agent_image=IMAGE))["resources"]
    assert "claims" not in agent_of(inject(colocated(), agent_image=IMAGE))["resources"]


@pytest.mark.parametrize("path", ["", "/dev/shm", "/dev/shm/", "/etc", "/dev/shm/../etc", "/dev/shm/a/b", "qwen", 7])
def test_a_folder_outside_of_the_nodes_shared_memory_is_refused(path: object) -> None:
    with pytest.raises(InjectionError, match=r"rolloutfleet\.dev/shared-memory: .*must be /dev/shm/NAME"):
        inject(colocated(path), agent_image=IMAGE)


def test_a_trainer_that_mounts_its_own_dev_shm_is_told_so() -> None:
    mounts = [{"name": "mine", "mountPath": "/dev/shm/"}]
    containers = [{"name": "trainer", "image": "t", "volumeMounts": mounts}]
    with pytest.raises(InjectionError, match="container trainer mounts something at /dev/shm"):
        inject(colocated(containers=containers), agent_image=IMAGE)

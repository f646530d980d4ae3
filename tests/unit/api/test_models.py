"""Models read what they wrote, and what a newer version wrote; derived names fit where Kubernetes wants them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rolloutfleet.api import names
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup

LABEL_VALUE = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

SERVER: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": "RolloutServer",
    "metadata": {"name": "qwen", "namespace": "rl", "uid": "u1", "generation": 3},
    "spec": {
        "model": {"path": "/models/qwen", "servedName": "qwen"},
        "groups": [
            {
                "name": "main",
                "engine": {"image": "engine", "args": {"mem-fraction-static": "0.8", "enable-metrics": ""}},
                "template": {"spec": {"tolerations": [{"operator": "Exists"}], "nodeName": None}},
            }
        ],
        "weights": {"volume": {"persistentVolumeClaim": {"claimName": "weights"}}},
    },
    "status": {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}],
        "training": {
            "holder": "trainer-0",
            "fence": 2,
            "weights": {
                "phase": "Committed",
                "version": 4,
                "path": "/weights/v4",
                "checksums": [{"group": "qwen-main", "revision": "r1", "checksum": "ab"}],
                "transaction": 5,
                "engines": [{"pod": "qwen-main-0-e1-r0", "outcome": "Committed"}],
            },
        },
    },
}
GROUP: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": "ServerGroup",
    "metadata": {"name": "qwen-main"},
    "spec": {"server": "qwen", "model": {"path": "/models/qwen"}, "engine": {"image": "engine"}},
    "status": {"engines": [{"index": 0, "epoch": 2, "phase": "Serving", "weightVersion": 4, "podUid": "u2"}]},
}


@pytest.mark.parametrize(("model", "stored"), [(RolloutServer, SERVER), (ServerGroup, GROUP)])
def test_what_a_model_writes_it_reads_again_unchanged(
    model: type[RolloutServer] | type[ServerGroup], stored: dict[str, Any]
) -> None:
    read = model.model_validate(stored)
    assert model.model_validate(read.dump()) == read
    assert read.name == stored["metadata"]["name"]


def test_reading_ignores_the_fields_of_a_newer_version() -> None:
    newer = {**GROUP, "spec": {**GROUP["spec"], "newField": 1, "engine": {"image": "engine", "newer": {}}}}
    assert ServerGroup.model_validate(newer) == ServerGroup.model_validate(GROUP)


def test_replicas_left_out_stay_out_so_that_an_autoscaler_may_own_them() -> None:
    server = RolloutServer.model_validate(SERVER)
    assert server.spec.groups[0].replicas is None
    assert "replicas" not in server.dump()["spec"]["groups"][0]
    assert ServerGroup.model_validate(GROUP).spec.replicas == 1


def test_numbers_are_no_arguments() -> None:
    spec = {**GROUP["spec"], "engine": {"image": "engine", "args": {"max-total-tokens": 8192}}}
    with pytest.raises(ValidationError, match="max-total-tokens"):
        ServerGroup.model_validate({**GROUP, "spec": spec})


name_parts = st.from_regex(SERVICE_NAME, fullmatch=True)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    pair=st.tuples(name_parts, name_parts).filter(
        lambda pair: len("-".join(pair)) <= names.DERIVED_NAME_BUDGET and max(map(len, pair)) <= 40
    ),
    index=st.integers(0, 1023),
    epoch=st.integers(1, 999_999),
    rank=st.integers(0, 99),
)
def test_every_derived_name_fits_63_characters(pair: tuple[str, str], index: int, epoch: int, rank: int) -> None:
    server, group = pair
    server_group = names.server_group_name(server, group)
    pod = names.engine_pod_name(server_group, index, epoch, rank)
    for name in (server_group, pod, names.router_name(server), names.trainer_name(server)):
        assert SERVICE_NAME.fullmatch(name), name
        assert LABEL_VALUE.fullmatch(name), name
    assert pod.startswith(names.engine_name(server_group, index, epoch))


def test_the_longest_names_fit() -> None:
    server_group = "s" * names.DERIVED_NAME_BUDGET
    assert len(names.engine_pod_name(server_group, 9999, 999_999, 99)) <= 63

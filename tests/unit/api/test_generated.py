"""What is generated and committed is what the models say, and what the API server can take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.api.crdgen import MAX_CRD_BYTES, RESOURCES, SchemaError, crd, rendered, structural_schema
from rolloutfleet.api.refgen import reference
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.schema import Column, Kind, Model, Resource, Rule
from rolloutfleet.api.server_group import ServerGroup

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["rolloutservers.yaml", "servergroups.yaml"])
def test_the_committed_crds_are_those_of_the_models(name: str) -> None:
    assert (ROOT / "crds" / name).read_text() == rendered()[name], "run `make generate`"
    assert len(rendered()[name].encode()) < MAX_CRD_BYTES


def test_the_committed_reference_is_that_of_the_models() -> None:
    assert (ROOT / "docs/reference/api.md").read_text() == reference(), "run `make generate`"


@pytest.mark.parametrize("resource", RESOURCES)
def test_names_columns_and_subresources_are_what_users_type(resource: type[Resource]) -> None:
    spec = crd(resource)["spec"]
    version = spec["versions"][0]
    assert spec["names"]["categories"] == ["rollout"]
    assert "status" in version["subresources"]
    columns = {column["name"] for column in version["additionalPrinterColumns"]}
    assert {"Routable", "Weights", "Reason", "Age"} <= columns


def test_short_names_and_scale() -> None:
    assert crd(RolloutServer)["spec"]["names"]["shortNames"] == ["ros"]
    group = crd(ServerGroup)["spec"]
    assert group["names"]["shortNames"] == ["sgrp"]
    assert group["versions"][0]["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


def test_a_schema_holds_nothing_that_apiextensions_does_not_know() -> None:
    forbidden = {"$ref", "$defs", "anyOf", "const", "title", "exclusiveMinimum", "prefixItems"}

    def walk(node: Any, *, names: bool = False) -> None:
        if isinstance(node, dict):
            assert names or not forbidden & set(node)
            for key, child in node.items():
                walk(child, names=key == "properties")
        elif isinstance(node, list):
            for child in node:
                walk(child)

    for resource in RESOURCES:
        walk(structural_schema(resource))


def test_an_unbounded_string_below_a_rule_is_refused_by_its_path() -> None:
    class Spec(Model):
        rules = (Rule("self.text != ''", "text: must not be empty"),)
        text: str

    class Thing(Resource):
        kind_info = Kind("Thing", "things", "thing", (), columns=(Column("Age", ".metadata.creationTimestamp"),))
        spec: Spec

    with pytest.raises(SchemaError, match=r"Thing\.spec\.text"):
        structural_schema(Thing)

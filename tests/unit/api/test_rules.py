"""Every CEL rule says what a few lines of Python say, on objects that hypothesis makes up.

The rules are taken from the generated schemas, so a rule without a twin here fails. That the API server takes them,
and what it answers, is in tests/e2e/test_crds.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.api.common import OWNED_ENGINE_ARGS, OWNED_ENGINE_ENV, OWNED_ROUTER_ARGS
from rolloutfleet.api.crdgen import RESOURCES, structural_schema
from rolloutfleet.api.names import DERIVED_NAME_BUDGET, EXTERNAL_GROUP
from rolloutfleet.api.schema import VALIDATIONS

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
FLAG = re.compile(r"[a-z][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class Twin:
    """`says` is what the rule whose message begins with `message` must say of any `self` among `objects`. A rule of
    changes is asked with another of them as `oldSelf`; what `says` says of the pair, the old one first."""

    message: str
    objects: st.SearchStrategy[Any]
    says: Callable[..., bool]
    of_changes: bool = False


def arguments(owned: tuple[str, ...]) -> st.SearchStrategy[dict[str, str]]:
    """Flags of the operator, their abbreviations, longer ones, and others."""
    name = st.sampled_from(owned)
    abbreviated = st.builds(lambda flag, length: flag[: 1 + length % len(flag)], name, st.integers(0, 40))
    longer = st.builds(lambda flag, tail: flag + tail, name, st.text("-abc", min_size=1, max_size=4))
    other = st.text("abcxyz019-_A.\n", max_size=70) | st.sampled_from(("mem-fraction-static", "--port", "x" * 64))
    return st.dictionaries(name | abbreviated | longer | other, st.just("1"), max_size=4)


def no_owned(owned: tuple[str, ...]) -> Callable[[dict[str, str]], bool]:
    return lambda chosen: not any(flag.startswith(key) for key in chosen for flag in owned)


def keys_are_flags(chosen: dict[str, str]) -> bool:
    return all(FLAG.fullmatch(key) for key in chosen)


small = st.integers(1, 12)
engines = st.fixed_dictionaries({"tensorParallel": small, "pipelineParallel": small, "nodes": small})
backoffs = st.fixed_dictionaries({"initialSeconds": st.integers(1, 50), "maxSeconds": st.integers(1, 50)})
group_names = st.text("abc", min_size=1, max_size=2) | st.text("ab", min_size=1, max_size=40)
groups = st.lists(st.fixed_dictionaries({"name": group_names}), min_size=1, max_size=4)
object_names = st.text("ab1-.", min_size=1, max_size=6) | st.text("ab", min_size=30, max_size=45)
servers = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({"name": object_names}),
        "spec": st.fixed_dictionaries({"groups": groups}, optional={"external": st.just({"engines": []})}),
    }
)


names = st.sampled_from(("A", "_a9", "SGLANG_HOST_IP", "SGLANG_HOST_IPS")) | st.text("aZ_9-.=", max_size=4)
variables = st.dictionaries(names, st.just("1"), max_size=3)
rolling = st.fixed_dictionaries({"maxUnavailable": st.integers(0, 2), "maxSurge": st.integers(0, 2)})
role_groups = st.fixed_dictionaries(
    {
        "groups": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(("Regular", "Prefill", "Decode", "Encoder"))}),
            min_size=1,
            max_size=4,
        )
    }
)


whole_groups = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("Regular", "Placeholder")),
        "offload": st.booleans(),
        "engine": st.fixed_dictionaries(
            {"args": st.dictionaries(st.just("device"), st.just("cpu"))}, optional={"image": st.just("i")}
        ),
    }
)
with_external: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"groups": st.lists(st.fixed_dictionaries({"name": st.sampled_from(("a", EXTERNAL_GROUP))}), max_size=2)},
    optional={"external": st.just({"engines": []})},
)


encoder_groups = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("Regular", "Encoder")),
        "offload": st.booleans(),
        "engine": st.fixed_dictionaries({"nodes": st.integers(1, 2)}),
    }
)


copying_fleets: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "groups": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(("Regular", "Prefill", "Decode", "Encoder", "Placeholder")),
                    "engine": st.fixed_dictionaries({"nodes": st.integers(1, 2)}),
                }
            ),
            max_size=2,
        ),
    },
    optional={
        "external": st.just({"engines": []}),
        "weights": st.fixed_dictionaries({}, optional={"localCopy": st.just({"sizeLimit": "1Gi"})}),
    },
)


def copies(spec: dict[str, Any]) -> bool:
    return "localCopy" in spec.get("weights", {})


def copying_engines_are_whole(spec: dict[str, Any]) -> bool:
    apart = ("Encoder", "Placeholder")
    return not copies(spec) or all(g["engine"]["nodes"] == 1 or g["role"] in apart for g in spec["groups"])


claim_names = st.sampled_from(("gpus", "{index}", "g-{rank}", "{rank}.{index}", "index"))
colocations = st.fixed_dictionaries({}, optional={"resourceClaim": claim_names, "request": claim_names})
colocated_groups = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("Regular", "Encoder", "Placeholder")),
        "engine": st.fixed_dictionaries({"nodes": st.integers(1, 2)}),
        "rollingUpdate": rolling,
    },
    optional={
        "replicas": st.integers(0, 3),
        "colocation": colocations,
    },
)


def colocation_fits_the_role(group: dict[str, Any]) -> bool:
    return "colocation" not in group or group["role"] == "Regular"


def every_engine_has_its_gpus(group: dict[str, Any]) -> bool:
    colocation = group.get("colocation", {})
    named = any("{index}" in colocation.get(name, "") for name in ("resourceClaim", "request"))
    return named or group.get("replicas", 1) <= 1 or "resourceClaim" not in colocation


def every_node_has_its_claim(group: dict[str, Any]) -> bool:
    claim = group.get("colocation", {}).get("resourceClaim", "{rank}")
    return "{rank}" in claim or group["engine"]["nodes"] == 1


def encoder_is_plain(group: dict[str, Any]) -> bool:
    return group["role"] != "Encoder" or not (group["offload"] or group["engine"]["nodes"] != 1)


def encoders_have_users(spec: dict[str, Any]) -> bool:
    return "Encoder" not in roles(spec) or bool({"Regular", "Prefill"} & roles(spec))


def placeholder_is_plain(group: dict[str, Any]) -> bool:
    return group["role"] != "Placeholder" or not (group["offload"] or group["engine"]["args"])


def external_name_is_free(spec: dict[str, Any]) -> bool:
    return "external" not in spec or all(group["name"] != EXTERNAL_GROUP for group in spec["groups"])


def external_names_fit(server: dict[str, Any]) -> bool:
    fits = len(f"{server['metadata']['name']}-{EXTERNAL_GROUP}") <= DERIVED_NAME_BUDGET
    return "external" not in server["spec"] or fits


def roles(spec: dict[str, Any]) -> set[str]:
    return {group["role"] for group in spec["groups"]}


def paired_groups(flag: str) -> st.SearchStrategy[dict[str, Any]]:
    args = st.dictionaries(st.sampled_from((flag, "other")), st.sampled_from(("", "1", "64")))
    group = st.fixed_dictionaries(
        {
            "role": st.sampled_from(("Regular", "Prefill", "Decode")),
            "engine": st.fixed_dictionaries({"args": args}),
        }
    )
    return st.fixed_dictionaries({"groups": st.lists(group, min_size=1, max_size=3)})


shaped_groups = st.fixed_dictionaries(
    {
        "groups": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(("Regular", "Prefill", "Decode")),
                    "engine": st.fixed_dictionaries(
                        {
                            "tensorParallel": st.integers(1, 6),
                            "pipelineParallel": st.integers(1, 3),
                            "args": st.dictionaries(st.sampled_from(("attn-dp-size", "dp-size", "x")), st.just("2")),
                        }
                    ),
                }
            ),
            min_size=1,
            max_size=3,
        )
    }
)


def pairs_of(spec: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    by_role = {role: [g["engine"] for g in spec["groups"] if g["role"] == role] for role in ("Prefill", "Decode")}
    return [(prefill, decode) for prefill in by_role["Prefill"] for decode in by_role["Decode"]]


def tensors_pair(spec: dict[str, Any]) -> bool:
    def fits(one: dict[str, Any], other: dict[str, Any]) -> bool:
        small, large = sorted((one["tensorParallel"], other["tensorParallel"]))
        return large % small == 0 or bool({"attn-dp-size", "dp-size"} & (one["args"].keys() | other["args"].keys()))

    return all(fits(prefill, decode) for prefill, decode in pairs_of(spec))


def pipelines_pair(spec: dict[str, Any]) -> bool:
    return all(d["pipelineParallel"] in (1, p["pipelineParallel"]) for p, d in pairs_of(spec))


def agree_on(flag: str, spec: dict[str, Any]) -> bool:
    paired = [group for group in spec["groups"] if group["role"] != "Regular"]
    return len({group["engine"]["args"].get(flag, "") for group in paired}) <= 1


def names_are_unique(spec: dict[str, Any]) -> bool:
    return len({group["name"] for group in spec["groups"]}) == len(spec["groups"])


def moment_of(write: dict[str, int]) -> tuple[int, int]:
    return write["fence"], write["sequence"]


def derived_names_fit(server: dict[str, Any]) -> bool:
    name = server["metadata"]["name"]
    return all(len(f"{name}-{group['name']}") <= DERIVED_NAME_BUDGET for group in server["spec"]["groups"])


writes = st.fixed_dictionaries({"fence": st.integers(0, 3), "sequence": st.integers(0, 3)})


TWINS = (
    Twin("fence, sequence: later", writes, lambda old, new: moment_of(old) <= moment_of(new), of_changes=True),
    Twin("engine.args: keys are flags", arguments(OWNED_ENGINE_ARGS), keys_are_flags),
    Twin("engine.args: these flags", arguments(OWNED_ENGINE_ARGS), no_owned(OWNED_ENGINE_ARGS)),
    Twin("router.args: keys are flags", arguments(OWNED_ROUTER_ARGS), keys_are_flags),
    Twin("router.args: these flags", arguments(OWNED_ROUTER_ARGS), no_owned(OWNED_ROUTER_ARGS)),
    Twin(
        "engine.nodes: tensorParallel",
        engines,
        lambda engine: engine["tensorParallel"] * engine["pipelineParallel"] % engine["nodes"] == 0,
    ),
    Twin("engine.env: names", variables, lambda env: all(VARIABLE.fullmatch(name) for name in env)),
    Twin("engine.env: set by the operator", variables, lambda env: not set(OWNED_ENGINE_ENV) & set(env)),
    Twin("engine.image: required", whole_groups, lambda g: "image" in g["engine"] or g["role"] == "Placeholder"),
    Twin("role Placeholder: runs no engine", whole_groups, placeholder_is_plain),
    Twin("role Encoder: SGLang's encoders", encoder_groups, encoder_is_plain),
    Twin("colocation: for engines that trade", colocated_groups, colocation_fits_the_role),
    Twin("colocation.request: of which", colocations, lambda c: "request" not in c or "resourceClaim" in c),
    Twin("colocation.request, or resourceClaim", colocated_groups, every_engine_has_its_gpus),
    Twin("colocation.resourceClaim: must contain {rank}", colocated_groups, every_node_has_its_claim),
    Twin(
        "rollingUpdate.maxSurge: must be 0 with colocation",
        colocated_groups,
        lambda group: "colocation" not in group or group["rollingUpdate"]["maxSurge"] == 0,
    ),
    Twin("groups: of engine.tensorParallel", shaped_groups, tensors_pair),
    Twin("groups: engine.pipelineParallel of a Decode", shaped_groups, pipelines_pair),
    Twin("groups: role Encoder serves", role_groups, encoders_have_users),
    Twin(
        "groups: at least one group is needed", with_external, lambda spec: bool(spec["groups"]) or "external" in spec
    ),
    Twin("groups: the name external", with_external, external_name_is_free),
    Twin("metadata.name: with spec.external", servers, external_names_fit),
    Twin("weights.localCopy: engines of several pods", copying_fleets, copying_engines_are_whole),
    Twin(
        "weights.localCopy: engines of spec.external",
        copying_fleets,
        lambda spec: not (copies(spec) and "external" in spec),
    ),
    Twin(
        "rollingUpdate: maxUnavailable and maxSurge",
        rolling,
        lambda update: update["maxUnavailable"] + update["maxSurge"] >= 1,
    ),
    Twin("groups: role Prefill needs", role_groups, lambda spec: len({"Prefill", "Decode"} & roles(spec)) != 1),
    Twin("groups: role Regular beside", role_groups, lambda spec: not {"Prefill", "Regular"} <= roles(spec)),
    *(
        Twin(f"groups: engine.args[{flag}]", paired_groups(flag), partial(agree_on, flag))
        for flag in ("page-size", "kv-cache-dtype", "disaggregation-transfer-backend")
    ),
    Twin("backoff.initialSeconds", backoffs, lambda backoff: backoff["initialSeconds"] <= backoff["maxSeconds"]),
    Twin("groups: every name", st.fixed_dictionaries({"groups": groups}), names_are_unique),
    Twin("metadata.name: letters", servers, lambda server: NAME.fullmatch(server["metadata"]["name"]) is not None),
    Twin("metadata.name: at most 40", servers, lambda server: len(server["metadata"]["name"]) <= 40),
    Twin("spec.groups[].name: NAME-GROUP", servers, derived_names_fit),
)


def validations(node: Any) -> Iterator[dict[str, str]]:
    if isinstance(node, dict):
        yield from node.get(VALIDATIONS, [])
        for child in node.values():
            yield from validations(child)


RULES = {rule["message"]: rule["rule"] for resource in RESOURCES for rule in validations(structural_schema(resource))}


def test_every_rule_has_one_twin_and_every_twin_a_rule() -> None:
    for message in RULES:
        assert len([twin for twin in TWINS if message.startswith(twin.message)]) == 1, message
    for twin in TWINS:
        assert any(message.startswith(twin.message) for message in RULES), twin.message


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.message)
def test_a_rule_says_what_its_twin_says(twin: Twin) -> None:
    program = cel.compile(next(rule for message, rule in RULES.items() if message.startswith(twin.message)))
    said: set[bool] = set()

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(twin.objects, twin.objects if twin.of_changes else st.none())
    def agree(value: Any, old: Any) -> None:
        expected = twin.says(old, value) if twin.of_changes else twin.says(value)
        known = {"self": value, "oldSelf": old} if twin.of_changes else {"self": value}
        assert program.execute(known) is expected, known
        said.add(expected)

    agree()
    assert said == {True, False}, "the made up objects never make a difference"

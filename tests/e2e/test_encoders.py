"""Encoders on the real cluster, up to their arguments, their order and the tables of the language engines.

SGLang's processors for images import kernels that exist for AMX and CUDA alone, and the image of the CPU engine does
not stand in for those yet. So the engines here are stand-ins behind SGLang's own command line.
"""

from __future__ import annotations

import json
from typing import Any

from e2e.fleets import await_routable, engines, ready, rollout_server, stand_in, stand_in_code, through_proxy
from e2e.support import Kubectl, eventually


def server(encoders: int) -> dict[str, Any]:
    return rollout_server("see", groups=[stand_in("vision", "Encoder", encoders), stand_in("main", "Regular", 2)])


def tables(kubectl: Kubectl) -> list[set[str]]:
    """What each language engine knows, as it says itself."""
    found = []
    for engine in engines(kubectl, "see-main"):
        path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{engine['pod']}:8997/proxy/list_encoder_urls"
        found.append(set(json.loads(kubectl("get", "--raw", path))["encoder_urls"]))
    return found


def addresses(kubectl: Kubectl) -> set[str]:
    return {engine["url"] for engine in engines(kubectl, "see-vision")}


def test_language_engines_serve_once_they_know_an_encoder_and_follow_it_to_its_new_address(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    stand_in_code(inside)
    inside.apply(server(0))
    eventually(
        lambda: {engine["reason"] for engine in engines(inside, "see-main")},
        90,
        "without an encoder nobody serves",
        accept=lambda reasons: reasons == {"NoEncoder"},
    )
    assert ready(inside, "see")["status"] == "False"

    inside.apply(server(2))
    await_routable(inside, "see", 4, seconds=90)
    assert tables(inside) == [addresses(inside)] * 2
    pods = inside.json("get", "pods", "--selector=rolloutfleet.dev/component=engine")["items"]
    flags = {pod["metadata"]["labels"]["rolloutfleet.dev/role"]: pod["spec"]["containers"][0]["args"] for pod in pods}
    assert "--encoder-only" in flags["Encoder"]
    assert "--language-only" in flags["Regular"]

    victim = engines(inside, "see-vision")[0]
    inside("delete", "pod", victim["pod"], "--grace-period=0", "--force")
    eventually(
        lambda: (tables(inside), addresses(inside)),
        90,
        "every table has the new address and not the old one",
        accept=lambda seen: victim["url"] not in seen[1] and len(seen[1]) == 2 and seen[0] == [seen[1]] * 2,
    )
    (router,) = inside(
        "get", "pods", "--selector=rolloutfleet.dev/component=router", "--output=jsonpath={.items[*].metadata.name}"
    ).split()
    workers = {worker["url"] for worker in through_proxy(inside, router, "/workers")["workers"]}
    assert workers == {engine["url"] for engine in engines(inside, "see-main")}

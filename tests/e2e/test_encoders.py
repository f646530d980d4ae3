"""Encoders on the real cluster: an image through SGLang's own engines, and the tables of language engines, where
stand-ins behind SGLang's command line are restarted faster than real ones."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

from e2e.fleets import (
    CPU_ARGUMENTS,
    await_routable,
    engine_group,
    engines,
    ready,
    rollout_server,
    router_pods,
    stand_in,
    stand_in_code,
    through_proxy,
)
from e2e.support import Kubectl, eventually

# Of this size the tiny model makes 16 embeddings.
IMAGE_PIXELS = 112
COLOURS = [(255, 0, 0), (0, 64, 255), (255, 255, 255)]


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
    eventually(
        lambda: ready(inside, "see").get("status"), 30, "the server says so", accept=lambda status: status == "False"
    )

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


def seeing(name: str, role: str = "Regular") -> dict[str, Any]:
    """Engines of the tiny model that sees: it needs its tokenizer, and compiles nothing."""
    arguments = {**CPU_ARGUMENTS, "sleep-on-idle": "", "dtype": "float32"}
    del arguments["skip-tokenizer-init"]
    environment = {"SGLANG_CPU_ENGINE_IMAGES": "1", "TORCHDYNAMO_DISABLE": "1"}
    return engine_group(name, role=role, engine={"args": arguments, "env": environment})


def png(colour: tuple[int, int, int]) -> str:
    """An image of one colour, as a data URL."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + bytes(colour) * IMAGE_PIXELS) * IMAGE_PIXELS
    header = struct.pack(">IIBBBBB", IMAGE_PIXELS, IMAGE_PIXELS, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


POST = """
import sys, urllib.request
json = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1], data=sys.stdin.buffer.read(), headers=json)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def tokens_about(kubectl: Kubectl, server: str, colour: tuple[int, int, int]) -> list[int]:
    """What the fleet says, greedily, about an image: a pod of it asks the router."""
    request = {
        "text": "<|vision_start|><|image_pad|><|vision_end|>What is it?",
        "image_data": [png(colour)],
        "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
    }
    (router,) = router_pods(kubectl, server)
    url = f"http://{kubectl.json('get', 'pod', router)['status']['podIP']}:30000/generate"
    asking = ("exec", "--stdin", engines(kubectl, f"{server}-main")[0]["pod"], "--container=engine", "--")
    answer = kubectl(*asking, "python3", "-S", "-c", POST, url, stdin=json.dumps(request))
    found: list[int] = json.loads(answer)["output_ids"]
    return found


def test_images_through_an_encoder_give_the_tokens_of_an_engine_that_sees_by_itself(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    inside.apply(rollout_server("whole", model="/models/vl", groups=[seeing("main")]))
    await_routable(inside, "whole", 1)
    expected = [tokens_about(inside, "whole", colour) for colour in COLOURS]
    assert len({tuple(tokens) for tokens in expected}) == len(COLOURS), "the model does not look at the image"
    inside("delete", "rolloutserver", "whole")

    inside.apply(rollout_server("split", model="/models/vl", groups=[seeing("vision", "Encoder"), seeing("main")]))
    await_routable(inside, "split", 2)
    assert [tokens_about(inside, "split", colour) for colour in COLOURS] == expected

    (encoder,) = engines(inside, "split-vision")
    inside("delete", "pod", encoder["pod"], "--grace-period=0", "--force")
    eventually(
        lambda: engines(inside, "split-main")[0]["reason"],
        30,
        "nobody is asked about images while there is no encoder",
        accept=lambda reason: reason == "NoEncoder",
    )
    await_routable(inside, "split", 2)
    assert [tokens_about(inside, "split", colour) for colour in COLOURS] == expected

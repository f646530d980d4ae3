"""Prompts with images, through agent and router to a real engine whose tiny model sees: what it is sent, what is kept,
and what a bad image costs."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.api.samples import Sample
from rolloutfleet.engine.http import Http
from with_engine import collecting
from with_engine.collecting import FLOAT32, RealFleet, close, directly
from with_engine.conftest import Server, place
from with_engine.test_samples import TOLERANCE

TURN_WITH_IMAGE = """
from dataclasses import replace
from rolloutfleet.trainer import observe

async def turns(sample, params, engines):
    image = sample.metadata["image"]
    for turn in range(3):
        used = sample.response_length
        if turn == 2:
            sample = observe(sample, image["tokens"])
            engines = replace(engines, inputs={"image_data": [image["url"]]})
            used += len(image["tokens"])
        sample = await engines.complete(sample, params | {"max_new_tokens": used + 8})
        if sample.status == "aborted":
            return sample
    return sample
"""
PIXELS, EMBEDDINGS = 112, 16
"""Of an image of this size the tiny model makes so many embeddings."""
LARGE = 3 << 20
N, TOKENS = 8, 24
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def image(colour: tuple[int, int, int], *, padding: int = 0) -> str:
    """Of one colour, as a data URL. `padding`: bytes that belong to the file and not to the picture."""
    rows = (b"\0" + bytes(colour) * PIXELS) * PIXELS
    header = struct.pack(">IIBBBBB", PIXELS, PIXELS, 8, 2, 0, 0, 0)
    ballast = chunk(b"noIs", random.Random(0).randbytes(padding)) if padding else b""
    content = chunk(b"IHDR", header) + ballast + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def vocabulary() -> dict[str, int]:
    tokenizer = json.loads((place("MODELS") / "vl/tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **special}


def seen(images: int) -> list[int]:
    """Token ids of so many images and a question: one placeholder an image, which the engine makes room for itself."""
    ids = vocabulary()
    one = [ids[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    return one * images + [ids[letter] for letter in "What?"]


RED, BLUE, WHITE = (255, 0, 0), (0, 64, 255), (255, 255, 255)


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory, http: Http, runner: asyncio.Runner) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("engine")
    server = Server(folder, place("MODELS"), http, *FLOAT32, model="vl", sees=True)
    with collecting.started(server, runner) as server:
        yield server


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, sighted: Server) -> Iterator[str]:
    with collecting.router(tmp_path_factory.mktemp("router"), sighted.url) as url:
        yield url


@pytest.fixture
def fleet(tmp_path: Path, runner: asyncio.Runner, sighted: Server, router: str) -> Iterator[RealFleet]:
    with collecting.fleet(tmp_path, runner, sighted, router, model="vl") as fleet:
        yield fleet


def with_images(*rows: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": seen(len(images)), "image_data": images} for images in rows]


def stored_bytes(fleet: RealFleet) -> int:
    return sum(file.stat().st_size for file in fleet.folder.glob("ledger.sqlite*"))


def assert_is_the_engines(fleet: RealFleet, sample: Sample, images: list[str]) -> None:
    inputs = {"image_data": images} if images else {}
    tokens, logprobs = directly(fleet.engine, sample.prompt_tokens, sample.response_length, **inputs)
    assert sample.response_tokens == tokens
    close(sample.rollout_log_probs, logprobs, TOLERANCE)


def test_large_images_are_sent_with_each_request_and_stored_with_none(fleet: RealFleet) -> None:
    rows = with_images([image(RED, padding=LARGE), image(BLUE, padding=LARGE)], [image(WHITE), image(BLUE)])
    run = fleet.collect(rows, n=N, sampling_params=GREEDY, data={"multimodal_keys": ["image_data"]})
    batch = run.batch(1, timeout=120)
    by_prompt = [[sample for sample in batch.samples if sample.group_index == prompt] for prompt in (0, 1)]
    assert [len(group) for group in by_prompt] == [N, N]
    assert by_prompt[0][0].response_tokens != by_prompt[1][0].response_tokens, "the model does not look at the images"
    for row, group in zip(rows, by_prompt, strict=True):
        for sample in group:
            assert sample.status == "truncated"
            assert sample.prompt_tokens == row["prompt"], "as the trainer's processor takes them: not expanded"
            expanded = len(row["prompt"]) + 2 * (EMBEDDINGS - 1)
            assert sample.prefix_cache_info.total_prompt_tokens == expanded, "what a trainer can check its own by"
        assert_is_the_engines(fleet, group[0], row["image_data"])
    assert stored_bytes(fleet) < 1 << 20 < LARGE


def test_a_sample_that_was_stopped_goes_on_with_its_images(fleet: RealFleet) -> None:
    rows, long = with_images([image(RED), image(BLUE)]), 1024
    keys = {"multimodal_keys": ["image_data"]}
    run = fleet.collect(rows, n=2, sampling_params=GREEDY | {"max_new_tokens": long}, data=keys)
    fleet.until_it_has_made(2, 32)
    run.end()
    for sample in run.batch(1, timeout=120).samples:
        assert (sample.attempts, sample.response_length) == (2, long)
        assert_is_the_engines(fleet, sample, rows[0]["image_data"])


def test_an_image_in_the_third_turn_is_seen_from_there_on(fleet: RealFleet) -> None:
    (fleet.folder / "tools.py").write_text(TURN_WITH_IMAGE)
    tokens = seen(1)
    row = {"prompt": [7, 8, 9], "metadata": {"image": {"tokens": tokens, "url": image(RED)}}}
    run = fleet.collect([row], n=2, sampling_params=GREEDY, generate="tools:turns", plugin_folders=[str(fleet.folder)])
    for sample in run.batch(1, timeout=120).samples:
        assert sample.loss_mask == [1] * 16 + [0] * len(tokens) + [1] * 8
        assert sample.response_tokens[16 : 16 + len(tokens)] == tokens
        before = sample.changed(
            **{name: getattr(sample, name)[:16] for name in ("response_tokens", "rollout_log_probs", "loss_mask")},
            weight_versions=[{"version": 0, "start": 0, "end": 16}],
        )
        assert_is_the_engines(fleet, before, [])
        context = sample.tokens[: len(sample.tokens) - 8]
        seen_now, logprobs = directly(fleet.engine, context, 8, image_data=[image(RED)])
        assert sample.response_tokens[-8:] == seen_now
        close(sample.rollout_log_probs[-8:], logprobs, TOLERANCE)


def test_a_broken_image_and_one_that_never_comes_cost_their_own_prompts(fleet: RealFleet) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        rows = with_images([image(RED)], ["data:image/png;base64,AAAA"], [hanging], [image(BLUE)])
        keys = {"multimodal_keys": ["image_data"]}
        run = fleet.collect(rows, sampling_params=GREEDY, data=keys, attempts=2)
        batch = run.batch(1, timeout=120)
    assert {sample.group_index for sample in batch.samples} == {0, 3}
    assert run.view().dropped == {"failed": 2}
    errors = {view.error for view in fleet.trainer.observed(samples=16).samples if view.status == "failed"}
    assert any("AAAA" in error for error in errors)
    assert any("a.png" in error for error in errors)


def test_messages_with_images_become_tokens_by_the_models_own_tokenizer(fleet: RealFleet) -> None:
    """transformers is not in the agent's environment: it comes from a folder, as a user would give it."""
    libraries = [str(next(place("ENGINE").glob("lib/python3*/site-packages")))]
    parts = [{"type": "image"}, {"type": "text", "text": "What? \u00fc\U0001f600"}]
    row = {"prompt": [{"role": "user", "content": parts}], "image_data": [image(RED)]}
    run = fleet.collect(
        [row],
        sampling_params=GREEDY,
        data={"multimodal_keys": ["image_data"]},
        tokenizer=str(place("MODELS") / "vl"),
        plugin_folders=libraries,
    )
    ids = vocabulary()
    named = {number: token for token, number in ids.items()}
    for sample in run.batch(1, timeout=120).samples:
        text = [named[token] for token in sample.prompt_tokens]
        assert text.count("<|image_pad|>") == 1
        assert text[-10:] == ["<|im_start|>", *"assistant"], "where the answer begins"
        assert sample.response, "decoded by the same tokenizer"
        assert_is_the_engines(fleet, sample, [image(RED)])

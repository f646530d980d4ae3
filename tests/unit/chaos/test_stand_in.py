"""The stand-in engine, asked by the client that asks real ones."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos.trainer import safetensors
from e2e import stand_in_engine
from e2e.stand_in_engine import Engine, LanguageServer, Server, expected_tokens
from rolloutfleet.agent.answers import sample_of
from rolloutfleet.api.samples import Sample
from rolloutfleet.engine.errors import EngineRefused
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.sglang import EngineClient

FLEET = "abcdef01"
PAYLOAD = {"rid": "r", "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}


@pytest.fixture
def url() -> Iterator[str]:
    handler = type("Handler", (LanguageServer,), {"engine": Engine("/models/m0", f"0@{FLEET}")})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def checkpoint(folder: Path, version: int) -> str:
    path = folder / f"v{version}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(safetensors(version))
    return str(path)


def made_by(version: int, count: int) -> list[int]:
    return expected_tokens(hashlib.sha256(safetensors(version)).hexdigest(), [5, 6], count)


def with_client(url: str, test: Any) -> None:
    async def run() -> None:
        async with Http(max_connections=4) as http:
            await test(EngineClient(url, http=http))

    asyncio.run(run())


async def running_one(engine: EngineClient) -> None:
    async with asyncio.timeout(5):
        while True:
            if (await engine.load()).running:
                return
            await asyncio.sleep(0.01)


def test_weights_label_and_checksum_change_together_and_tokens_tell_them(url: str, tmp_path: Path) -> None:
    async def test(engine: EngineClient) -> None:
        first = await engine.checksum()
        assert await engine.generates(seconds=5)
        sample = sample_of(await engine.generate(PAYLOAD, seconds=5), Sample(), fleet=FLEET)
        assert sample.response_tokens == [ord("0")] * 6
        await engine.update_weights_from_disk(checkpoint(tmp_path, 7), label=f"7@{FLEET}")
        assert (await engine.model_info()).weight_version == f"7@{FLEET}"
        assert await engine.checksum() != first
        sample = sample_of(await engine.generate(PAYLOAD, seconds=5), Sample(), fleet=FLEET)
        assert sample.response_tokens == made_by(7, 6)
        with pytest.raises(EngineRefused):
            await engine.update_weights_from_disk(str(tmp_path / "none"), label=f"8@{FLEET}")
        assert (await engine.model_info()).weight_version == f"7@{FLEET}"

    with_client(url, test)


def test_a_pause_holds_what_runs_and_its_tokens_name_the_weights_of_their_moment(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_engine, "REQUEST_SECONDS", 0.6)

    async def test(engine: EngineClient) -> None:
        await engine.update_weights_from_disk(checkpoint(tmp_path, 1), label=f"1@{FLEET}")
        running = asyncio.create_task(engine.generate(PAYLOAD, seconds=10))
        await asyncio.sleep(0.3)
        await engine.pause("retract")
        assert await engine.ping()
        assert not await engine.ready()
        assert (await engine.load()).running == 1
        await engine.update_weights_from_disk(checkpoint(tmp_path, 2), label=f"2@{FLEET}")
        assert not running.done()
        await engine.continue_generation()
        sample = sample_of(await running, Sample(), fleet=FLEET)
        assert [span.version for span in sample.weight_versions] == [1, 2]
        middle = sample.weight_versions[0].end
        assert sample.response_tokens == made_by(1, 6)[:middle] + made_by(2, 6)[middle:]

    with_client(url, test)


def test_an_abort_ends_what_runs_with_what_it_has(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in_engine, "REQUEST_SECONDS", 5.0)

    async def test(engine: EngineClient) -> None:
        running = asyncio.create_task(engine.generate(PAYLOAD, seconds=10))
        await running_one(engine)
        await engine.pause("abort")
        sample = sample_of(await running, Sample(), fleet=FLEET)
        assert sample.status == "aborted"
        assert len(sample.response_tokens) < 6
        assert (await engine.load()).running == 0

    with_client(url, test)


def test_requests_are_aborted_by_prefix_and_those_of_others_go_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in_engine, "REQUEST_SECONDS", 2.0)

    async def test(engine: EngineClient) -> None:
        ours, other = (
            asyncio.create_task(engine.generate(PAYLOAD | {"rid": rid}, seconds=10)) for rid in ("ours-1", "other-1")
        )
        async with asyncio.timeout(5):
            while (await engine.load()).running < 2:
                await asyncio.wait([ours, other], timeout=0.01)
        await engine.abort("ours")
        assert (await ours)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await other)["meta_info"]["finish_reason"]["type"] == "length"

    with_client(url, test)


def test_what_clients_asked_for_is_counted_and_the_operators_looks_are_not(url: str) -> None:
    async def test(engine: EngineClient) -> None:
        assert await engine.generates(seconds=5)
        await engine.generate(PAYLOAD, seconds=5)

    with_client(url, test)
    assert httpx.get(f"{url}/requests").json() == {"count": 1}

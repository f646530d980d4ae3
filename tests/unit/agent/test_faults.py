"""Faults that review found in clients, agent and command line: each test failed before its fix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web

from rolloutfleet.agent import leadership
from rolloutfleet.agent.answers import sample_of
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.server import Role, application
from rolloutfleet.api.agent import MemoryRequest, UpdateWeights
from rolloutfleet.api.samples import Sample
from rolloutfleet.cli.main import main
from rolloutfleet.engine.checkpoint import INDEX, read_checkpoint
from rolloutfleet.engine.errors import CheckpointError, EngineRefused, EngineTimeout
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.kube import client as client_module
from rolloutfleet.kube.client import POD
from rolloutfleet.kube.errors import ApiError, Unreachable
from rolloutfleet.plan.concurrency import FIRST_PER_ENGINE
from rolloutfleet.plan.injection import inject
from rolloutfleet.trainer.client import Fleet
from rolloutfleet.trainer.errors import FleetError, Refused
from unit.agent.test_sampling import request, with_router
from unit.agent.world import FLEET, World, answer, play, signed
from unit.engine.stand_in import StandIn
from unit.engine.test_checkpoint import write_shard
from unit.engine.test_clients import ask_engine
from unit.injection.test_injection import pod
from unit.kube.test_client import Server, ask, watched
from unit.trainer.test_client import VIEW, Agent, agent, fleet  # noqa: F401

# 1. test_updates.py


def test_an_offload_waits_for_a_running_update(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        loading, gate = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            loading.set()
            await gate.wait()

        world.engines[0].before["update_weights_from_disk"] = wait
        update = asyncio.create_task(world.updater.update(UpdateWeights(path=str(world.volume / "w1"))))
        await loading.wait()
        offload = asyncio.create_task(world.memory.offload(MemoryRequest()))
        for _ in range(50):  # long enough for the offload's record and its first call
            await asyncio.sleep(0)
        assert [engine.asked.count("pause_generation") for engine in world.engines] == [1, 1]
        gate.set()
        await asyncio.gather(update, offload)
        memory = world.training.memory
        assert memory is not None, "the commit of the update overwrote the record of the offload"
        assert memory.uids == [engine.uid for engine in world.engines]
        assert all(engine.paused and engine.released for engine in world.engines)

    play(tmp_path, story, engines=2)


# 2. test_updates.py


@pytest.mark.parametrize("error", [Unreachable("broken pipe"), ApiError("etcd leader changed", status=500)])
def test_a_commit_that_the_api_server_does_not_take_at_once_is_written_again(
    tmp_path: Path, error: ApiError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "WRITE_PAUSE_SECONDS", 0.0, raising=False)

    async def story(world: World) -> None:
        failures = [error, error]

        def fail() -> None:
            if failures:
                raise failures.pop()

        world.cluster.before_apply = [lambda: None, fail, fail]
        assert (await world.updater.update(UpdateWeights(path=str(world.volume / "w1")))).committed
        assert [engine.paused for engine in world.engines] == [False, False]

    play(tmp_path, story, engines=2)


# 3. test_clients.py, test_updates.py


@pytest.mark.parametrize("body", ["<html>a proxy</html>", ["a", "list"]])
def test_an_answer_that_is_no_json_object_is_a_refusal(body: Any) -> None:
    with pytest.raises(EngineRefused, match="not a JSON object"):
        ask_engine(StandIn.always(200, body), lambda engine: engine.model_info())


def test_an_engine_that_answers_nonsense_does_not_keep_the_others_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[0].refuses["weights_checker"] = (200, "<html>")
        assert (await world.updater.update(UpdateWeights(path=str(world.volume / "w1")))).committed
        assert [engine.paused for engine in world.engines] == [True, False]

    play(tmp_path, story, engines=2)


# 4. test_sampling.py


class Stuck(RouterClient):
    async def generate(
        self, payload: dict[str, Any], *, seconds: float, routing_key: str | None = None
    ) -> dict[str, Any]:
        await asyncio.sleep(seconds)
        raise EngineTimeout("stuck")


def test_samples_that_waited_for_a_slot_do_not_get_their_time_once_more(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        sampler = Sampler(fleet=world.fleet, router=lambda url: Stuck(url, http=world.http), engine=world.client)
        generated = await sampler.generate(request([[1]], n=FIRST_PER_ENGINE + 5, timeout_seconds=0.3))
        assert {sample.status for sample in generated.groups[0].samples} == {"aborted"}
        assert generated.seconds < 0.55, "0.6 s: the last five were given 0.3 s after they had waited 0.3 s"

    play(tmp_path, story, engines=1)


# 5. test_sampling.py


def meta(**changed: Any) -> dict[str, Any]:
    return {"meta_info": {**answer([1])["meta_info"], **changed}}


@pytest.mark.parametrize(
    "body",
    [
        meta(output_token_logprobs=[[-0.5]]),
        meta(output_token_logprobs=[], completion_tokens=3),
        meta(finish_reason="stop"),
        meta(weight_versions=[{"version": signed(0)}]),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_no_sample(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not an answer of SGLang|without log probabilities"):
        sample_of(body, Sample(), fleet=FLEET)


# 6. test_server.py


def test_a_trainer_that_hangs_up_ends_its_requests_at_the_router(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        heard, closed = asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            heard.set()
            while await reader.read(65536):
                pass
            closed.set()
            writer.close()

        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            router = StandIn.always(200, {})
            router.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            sampler = await with_router(world, router)
            role = Role(
                fleet=world.fleet,
                leadership=world.leadership,
                updater=world.updater,
                sessions=world.sessions,
                memory=Memory(fleet=world.fleet, leadership=world.leadership, engine=world.client),
                sampler=sampler,
                collections=world.collections(sampler),
                observations=world.observations,
            )
            # As in agent/__main__.py; without handler_cancellation aiohttp lets the handler run on.
            runner = web.AppRunner(application({"actor": role}), access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with ClientSession(timeout=ClientTimeout(total=None)) as http:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/servers/actor/generate"
                trainer = asyncio.create_task(
                    http.post(url, json={"prompts": [[1]], "timeout_seconds": 600}).__aenter__()
                )
                await heard.wait()
                trainer.cancel()
                await asyncio.gather(trainer, return_exceptions=True)
            await asyncio.wait_for(closed.wait(), 3.0)
            await runner.cleanup()

    play(tmp_path, story, engines=1)


# 7. test_checkpoint.py


@pytest.mark.parametrize("text", ["[]", '{"weight_map": {"a": ["x"]}}'])
def test_an_index_of_another_form_is_named(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": [2]})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not a weight index"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("header", ["[]", '{"a": 1}', '{"a": {}}', '{"a": {"shape": null, "data_offsets": [0, 0]}}'])
def test_a_header_of_another_form_is_named(tmp_path: Path, header: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match="its header is not of safetensors"):
        read_checkpoint(tmp_path)


# 8. kube/test_client.py


def test_a_retry_after_that_is_a_date_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(_: float) -> None:
        pass

    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=pause))
    server = Server((503, {}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), (200, {"a": 1}))
    assert ask(server, lambda api: api.get(POD, "p", namespace="rl")) == {"a": 1}


def test_a_success_that_is_no_json_object_is_an_api_error() -> None:
    with pytest.raises(ApiError, match="not a JSON object"):
        ask(Server((200, "<html>log in</html>")), lambda api: api.get(POD, "p", namespace="rl"))


def test_a_watch_that_breaks_off_within_an_event_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        watched(Server((200, '{"type": "ADDED", "obj')))


# 9. trainer/test_client.py


def test_an_agent_that_is_newer_than_the_library_is_understood(agent: Agent, fleet: Fleet) -> None:  # noqa: F811
    agent.replies = [(200, {**VIEW, "field_of_tomorrow": 1})]
    assert fleet.view().server == "qwen"


def test_a_success_that_is_not_the_agents_is_a_fleet_error(agent: Agent, fleet: Fleet) -> None:  # noqa: F811
    agent.replies = [(200, "<html>")]
    with pytest.raises(FleetError):
        fleet.view()


def test_a_bad_update_or_tag_is_refused_before_it_is_sent(agent: Agent, fleet: Fleet) -> None:  # noqa: F811
    for call in (
        lambda: fleet.update_weights("/w", version=0),
        lambda: fleet.update_weights("/w", timeout=0.0),
        lambda: fleet.offload("bogus"),  # type: ignore[arg-type]
    ):
        with pytest.raises(Refused) as refusal:
            call()
        assert refusal.value.code == "BadRequest"
    assert agent.asked == []


# 10. test_injection.py, test_inject.py


def test_an_empty_env_of_a_manifest_is_filled() -> None:
    given = pod()
    given["spec"]["containers"][0]["env"] = None
    assert inject(given, agent_image="a")["spec"]["containers"][0]["env"][0]["name"] == "ROLLOUTFLEET_AGENT_URL"


@pytest.mark.parametrize(
    "data",
    [
        b"- a\n- b\n",
        b"text",
        b"\xff\xfe\xfa",
        b"kind: Pod\nmetadata: {annotations: {rolloutfleet.dev/rollout-servers: 3}}\nspec: {}\n",
        b"kind: Pod\nmetadata: {annotations: {rolloutfleet.dev/rollout-servers: 'actor=b'}}\nspec:\n",
    ],
)
def test_a_file_that_holds_no_manifests_is_told_and_no_traceback(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_bytes(data)
    assert main(["inject", "-f", str(tmp_path / "x.yaml"), "--agent-image", "a"]) == 2
    assert capsys.readouterr().err.startswith("rolloutfleet inject: ")

"""Samples come back in order, once, from weights that were committed; a bad prompt costs its own samples only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent import sampling
from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.api.agent import Generate, SamplingParams
from rolloutfleet.engine.errors import EngineUnreachable
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.plan.concurrency import FIRST_PER_ENGINE
from unit.agent.world import ABORT, World, answer, fleet_on_loopback, signed
from unit.engine.stand_in import Answer, Answering, Asked, HangUp, StandIn

STRANGER = signed(0, "beef0000")
"""What an engine of another fleet calls its weights, at the same version number as ours."""


@pytest.mark.parametrize(
    "params",
    [
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop_token_ids": [2, 11]},
        {"temperature": 0},
        {"ignore_eos": True, "max_new_tokens": 16},
        {"min_new_tokens": 8, "max_new_tokens": 8},
    ],
)
def test_good_parameters_are_passed_on_as_they_are(params: dict[str, Any], tmp_path: Path, quick: None) -> None:
    router = StandIn.always(200, answer([1]))
    sampled(tmp_path, router, request([[1]], sampling_params=SamplingParams.model_validate(params)))
    assert router.asked[0].body["sampling_params"] == {"max_new_tokens": 128, **params}


# Through the router


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause worth waiting for between attempts."""
    monkeypatch.setattr(sampling, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(sampling, "LAST_PAUSE_SECONDS", 0.01)


def request(prompts: list[list[int]], **fields: Any) -> Generate:
    return Generate(prompts=prompts, **{"timeout_seconds": 5.0, **fields})


async def with_router(world: World, router: StandIn) -> Sampler:
    body = world.cluster.seen("rolloutservers", "qwen")
    body["status"]["router"] = {"url": router.url}
    world.cluster.put("rolloutservers", body)
    return sampler_of(world)


def sampler_of(world: World) -> Sampler:
    return Sampler(fleet=world.fleet, router=lambda url: RouterClient(url, http=world.http), engine=world.client)


def sampled(
    tmp_path: Path, router: StandIn, asked: Generate, prepare: Callable[[World], None] = lambda _: None
) -> list[Any]:
    async def scenario() -> list[Any]:
        async with fleet_on_loopback(tmp_path, 1) as world, router:
            prepare(world)
            sampler = await with_router(world, router)
            generated = await sampler.generate(asked)
            assert [group.prompt for group in generated.groups] == asked.prompts
            return [group.samples for group in generated.groups]

    return asyncio.run(scenario())


def committed(version: int) -> Callable[[World], None]:
    return lambda world: world.change_training(weights={"phase": "Committed", "version": version})


def in_turn(*answers: Answer | type[HangUp]) -> Answering:
    """The first answers in order, the last one for ever."""
    left = list(answers)

    async def answering(_: Asked) -> Answer:
        told = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(told, type):
            raise told
        return told

    return answering


def test_groups_keep_the_order_of_the_prompts_whoever_answers_first(tmp_path: Path, quick: None) -> None:
    answered: list[int] = []
    last = asyncio.Event()

    async def backwards(asked: Asked) -> Answer:
        (token,) = asked.body["input_ids"]
        if token != 3:
            await last.wait()
        answered.append(token)
        last.set()
        return 200, answer([token * 10])

    groups = sampled(tmp_path, StandIn(backwards), request([[1], [2], [3]], n=2))
    assert answered[0] == 3
    responses = [[sample.response_tokens for sample in samples] for samples in groups]
    assert responses == [[[10]] * 2, [[20]] * 2, [[30]] * 2]
    numbers = [[(sample.group_index, sample.index, sample.prompt_tokens) for sample in samples] for samples in groups]
    assert numbers == [[(group, index, [group + 1]) for index in range(2)] for group in range(3)]


def test_each_sample_is_one_request_with_log_probs_and_an_id_of_its_own(tmp_path: Path, quick: None) -> None:
    router = StandIn.always(200, answer([1]))
    sampled(tmp_path, router, request([[5, 6]], n=3, sampling_params=SamplingParams(temperature=0.5)))
    assert [a.path for a in router.asked] == ["/generate"] * 3
    ids = [a.body["rid"] for a in router.asked]
    assert len({*ids}) == 3
    assert {len(name) for name in ids} == {32}, "no id is the beginning of another"
    for asked in router.asked:
        assert asked.body["input_ids"] == [5, 6]
        assert asked.body["return_logprob"] is True
        assert asked.body["extra_key"] == "0.0"
        assert asked.body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 128}


@pytest.mark.parametrize(
    "trouble",
    [
        (200, ABORT),
        (500, {"error": "engine died"}),
        (503, {"error": "no worker"}),
        (408, {"error": "timeout"}),
        (429, {"error": "queue full"}),
        (200, answer([1], version="default")),
        (200, answer([1], version=STRANGER)),
        HangUp,
    ],
)
def test_what_another_engine_could_answer_is_tried_again_under_a_new_id(
    tmp_path: Path, quick: None, trouble: Answer | type[HangUp]
) -> None:
    router = StandIn(in_turn(trouble, trouble, (200, answer([7]))))
    ((sample,),) = sampled(tmp_path, router, request([[1]]))
    assert (sample.status, sample.response_tokens, sample.attempts) == ("truncated", [7], 3)
    assert len({asked.body["rid"] for asked in router.asked}) == 3


class Hesitant(RouterClient):
    """Cannot be connected to at first."""

    refusals = 2

    async def generate(
        self, payload: dict[str, Any], *, seconds: float, routing_key: str | None = None
    ) -> dict[str, Any]:
        if self.refusals:
            self.refusals -= 1
            raise EngineUnreachable("connection refused")
        return await super().generate(payload, seconds=seconds, routing_key=routing_key)


def test_a_router_that_does_not_listen_yet_is_tried_again(tmp_path: Path, quick: None) -> None:
    async def scenario() -> None:
        async with fleet_on_loopback(tmp_path, 1) as world, StandIn.always(200, answer([7])) as router:
            await with_router(world, router)
            sampler = Sampler(fleet=world.fleet, router=lambda url: Hesitant(url, http=world.http), engine=world.client)
            ((sample,),) = [group.samples for group in (await sampler.generate(request([[1]]))).groups]
            assert (sample.status, sample.attempts) == ("truncated", 3)

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_prompt_that_is_refused_fails_its_own_samples_at_once_and_no_others(
    tmp_path: Path, quick: None, status: int
) -> None:
    async def picky(asked: Asked) -> Answer:
        return (status, {"error": {"message": "too long"}}) if asked.body["input_ids"] == [2] else (200, answer([7]))

    router = StandIn(picky)
    good, bad, also_good = sampled(tmp_path, router, request([[1], [2], [3]]))
    assert (good[0].status, also_good[0].status) == ("truncated", "truncated")
    assert (bad[0].status, bad[0].response_tokens, bad[0].attempts) == ("failed", [], 1)
    assert "too long" in bad[0].error
    assert len(router.asked) == 3


def test_a_sample_that_does_not_finish_in_time_is_aborted_with_the_reason_and_no_tokens(
    tmp_path: Path, quick: None
) -> None:
    ((sample,),) = sampled(tmp_path, StandIn.always(200, ABORT), request([[1]], timeout_seconds=0.1))
    assert (sample.status, sample.response_tokens, sample.weight_versions) == ("aborted", [], [])
    assert sample.error == "not finished in 0.1 s: aborted by a pause"
    assert sample.attempts >= 2


def test_an_engine_that_does_not_answer_is_given_up_with_the_request(tmp_path: Path, quick: None) -> None:
    async def never(_: Asked) -> Answer:
        await asyncio.Event().wait()
        return 200, {}

    ((sample,),) = sampled(tmp_path, StandIn(never), request([[1]], timeout_seconds=0.1))
    assert (sample.status, sample.attempts) == ("aborted", 1)
    assert "no answer in" in sample.error


def test_a_sample_of_weights_that_make_noise_fails_at_once_and_the_server_is_told_once(
    tmp_path: Path, quick: None
) -> None:
    noise = answer([0], version=signed(0))
    noise["meta_info"]["output_token_logprobs"] = [[None, 0, None]]

    async def scenario() -> None:
        async with fleet_on_loopback(tmp_path, 1) as world, StandIn.always(200, noise) as router:
            sampler = await with_router(world, router)
            answered = await sampler.generate(request([[1], [2]]))
            samples = [group.samples[0] for group in answered.groups]
            assert [(sample.status, sample.attempts) for sample in samples] == [("failed", 1)] * 2
            (event,) = world.cluster.events
            assert (event["type"], event["reason"]) == ("Warning", "NonFiniteSamples")
            assert "weights of version 0 hold NaN" in event["note"]
            assert "rollback=True" in event["note"]

    asyncio.run(scenario())


def test_noise_of_a_version_that_was_never_committed_is_tried_again(tmp_path: Path, quick: None) -> None:
    noise = answer([0], version=signed(2))
    noise["meta_info"]["output_token_logprobs"] = [[None, 0, None]]
    ((sample,),) = sampled(tmp_path, StandIn(in_turn((200, noise), (200, answer([7])))), request([[1]]))
    assert (sample.response_tokens, sample.attempts) == ([7], 2)


# Which weights


def test_a_version_that_was_never_committed_is_never_delivered(tmp_path: Path, quick: None) -> None:
    router = StandIn(
        in_turn((200, answer([1], version=signed(2))), (200, answer([2], version=signed(2))), (200, answer([7])))
    )
    ((sample,),) = sampled(tmp_path, router, request([[1]]))
    assert (sample.response_tokens, sample.attempts) == ([7], 3)


def test_if_nothing_else_answers_the_sample_is_aborted_and_says_so(tmp_path: Path, quick: None) -> None:
    router = StandIn.always(200, answer([1], version=signed(2)))
    ((sample,),) = sampled(tmp_path, router, request([[1]], timeout_seconds=0.1), committed(1))
    assert (sample.status, sample.response_tokens) == ("aborted", [])
    assert "never committed" in sample.error


def test_one_span_of_a_version_that_was_never_committed_spoils_the_sample(tmp_path: Path, quick: None) -> None:
    spans = [{"version": signed(0), "start": 0, "end": 1}, {"version": signed(2), "start": 1, "end": 2}]
    router = StandIn(in_turn((200, answer([1, 2], weight_versions=spans)), (200, answer([7]))))
    ((sample,),) = sampled(tmp_path, router, request([[1]]))
    assert sample.response_tokens == [7]


def test_a_version_that_is_committed_while_its_sample_runs_is_delivered(tmp_path: Path, quick: None) -> None:
    async def scenario() -> None:
        async def during(_: Asked) -> Answer:
            world.change_training(weights={"phase": "Committed", "version": 1})
            spans = [{"version": signed(0), "start": 0, "end": 1}, {"version": signed(1), "start": 1, "end": 2}]
            return 200, answer([1, 2], weight_versions=spans)

        async with fleet_on_loopback(tmp_path, 1) as world, StandIn(during) as router:
            sampler = await with_router(world, router)
            ((sample,),) = [group.samples for group in (await sampler.generate(request([[1]]))).groups]
            assert sample.response_tokens == [1, 2]
            assert sample.attempts == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)], ids=["update", "rollback"])
def test_weights_that_were_replaced_before_a_sample_was_asked_for_make_none_of_it(
    tmp_path: Path, quick: None, before: int, now: int
) -> None:
    """An engine that an update could not reach is in a router's table for a moment longer."""

    async def scenario() -> None:
        stale, fresh = answer([1], version=signed(before)), answer([2], version=signed(now))
        async with (
            fleet_on_loopback(tmp_path, 1) as world,
            StandIn(in_turn((200, stale), (200, stale), (200, fresh))) as router,
        ):
            sampler = await with_router(world, router)
            committed(before)(world)
            ((sample,),) = [group.samples for group in (await sampler.generate(request([[1]]))).groups]
            assert (sample.weight_versions[0].version, sample.attempts) == (before, 1)
            committed(now)(world)
            ((sample,),) = [group.samples for group in (await sampler.generate(request([[1]]))).groups]
            assert (sample.weight_versions[0].version, sample.attempts) == (now, 2)

    asyncio.run(scenario())


# Whose answer


@pytest.mark.parametrize("theirs", [STRANGER, "0"], ids=["another fleet's", "nobody's"])
def test_an_answer_that_is_not_signed_for_this_fleet_is_never_delivered(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture, theirs: str
) -> None:
    router = StandIn.always(200, answer([1], version=theirs))
    ((sample,),) = sampled(tmp_path, router, request([[1]], timeout_seconds=0.2))
    assert (sample.status, sample.response_tokens, sample.weight_versions) == ("aborted", [], [])
    assert f"not ours: answered by an engine whose weight version is '{theirs}'" in sample.error
    told = [record.getMessage() for record in caplog.records if record.name == sampling.__name__]
    assert told[0].startswith("qwen: answer 1 that is dropped: not ours")
    assert len(told) < sample.attempts, "told ever more rarely"


def test_one_span_of_another_fleet_spoils_the_sample(tmp_path: Path, quick: None) -> None:
    spans = [{"version": STRANGER, "start": 0, "end": 1}, {"version": signed(0), "start": 1, "end": 2}]
    router = StandIn(in_turn((200, answer([1, 2], weight_versions=spans)), (200, answer([7]))))
    ((sample,),) = sampled(tmp_path, router, request([[1]]))
    assert (sample.response_tokens, sample.attempts) == ([7], 2)


def test_a_server_that_was_made_anew_is_another_fleet(tmp_path: Path, quick: None) -> None:
    async def scenario() -> None:
        async def during(_: Asked) -> Answer:
            body = world.cluster.seen("rolloutservers", "qwen")
            body["metadata"]["uid"] = "beef0000-0000-0000-0000-000000000000"
            world.cluster.put("rolloutservers", body)
            await world.fleet.refresh()
            return 200, answer([1], version=signed(0) if len(router.asked) < 3 else STRANGER)

        async with fleet_on_loopback(tmp_path, 1) as world, StandIn(during) as router:
            sampler = await with_router(world, router)
            ((sample,),) = [group.samples for group in (await sampler.generate(request([[1]]))).groups]
            assert (sample.status, sample.attempts) == ("truncated", 3)

    asyncio.run(scenario())


# Bounds


def test_no_more_requests_run_at_once_than_the_routable_engines_bear(tmp_path: Path, quick: None) -> None:
    inside, most = 0, 0
    full = asyncio.Event()

    async def crowded(_: Asked) -> Answer:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == FIRST_PER_ENGINE:
            full.set()
        await full.wait()
        inside -= 1
        return 200, answer([1])

    groups = sampled(tmp_path, StandIn(crowded), request([[1]], n=FIRST_PER_ENGINE + 20))
    assert most == FIRST_PER_ENGINE
    assert [sample.status for sample in groups[0]] == ["truncated"] * (FIRST_PER_ENGINE + 20)


def test_a_caller_that_goes_away_closes_the_connections_to_the_router(tmp_path: Path, quick: None) -> None:
    async def scenario() -> None:
        heard, closed = asyncio.Semaphore(0), asyncio.Semaphore(0)

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            heard.release()
            while await reader.read(65536):
                pass
            closed.release()
            writer.close()

        async with (
            fleet_on_loopback(tmp_path, 1) as world,
            await asyncio.start_server(listen, "127.0.0.1", 0) as server,
        ):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            router = StandIn.always(200, {})
            router.url = url
            sampler = await with_router(world, router)
            caller = asyncio.create_task(sampler.generate(request([[1], [2]], timeout_seconds=600.0)))
            for _ in range(2):
                await heard.acquire()
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            for _ in range(2):
                await closed.acquire()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda world: world.cluster.objects.pop(("rolloutservers", "qwen")), "WaitingForServer"),
        (lambda world: world.cluster.objects["rolloutservers", "qwen"].pop("status"), "NoRouter"),
    ],
)
def test_without_a_server_or_a_router_the_request_is_refused(
    tmp_path: Path, prepare: Callable[[World], Any], code: str
) -> None:
    async def scenario() -> None:
        async with fleet_on_loopback(tmp_path, 1) as world:
            prepare(world)
            sampler = Sampler(
                fleet=world.fleet, router=lambda url: RouterClient(url, http=world.http), engine=world.client
            )
            with pytest.raises(AgentError) as refusal:
                await sampler.generate(request([[1]]))
            assert (refusal.value.code, refusal.value.status) == (code, 503)

    asyncio.run(scenario())

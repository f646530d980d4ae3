"""Engines and routers are asked as SGLang and sglang-router want it, and their failures become typed errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rolloutfleet.engine import http as http_module
from rolloutfleet.engine.errors import EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient, Worker
from rolloutfleet.engine.sglang import EngineClient, Load, ModelInfo
from unit.engine.stand_in import Answer, Asked, StandIn


def ask_engine(stand_in: StandIn, question: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        async with stand_in, Http(max_connections=10) as http:
            return await question(EngineClient(stand_in.url, http=http))

    return asyncio.run(scenario())


def ask_router(stand_in: StandIn, question: Callable[[RouterClient], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        async with stand_in, Http(max_connections=10) as http:
            return await question(RouterClient(stand_in.url, http=http))

    return asyncio.run(scenario())


# A peer whose machine has vanished


def test_the_kernel_asks_for_a_silent_peer_and_gives_up_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    real = http_module.kept_alive

    def remembered(address: tuple[Any, ...]) -> socket.socket:
        made.append(real(address))
        return made[-1]

    monkeypatch.setattr(http_module, "kept_alive", remembered)

    async def scenario() -> list[int]:
        async with StandIn.always(200, {}) as peer, Http(max_connections=1) as http:
            await EngineClient(peer.url, http=http).ping()
            (used,) = made
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            return [used.getsockopt(socket.IPPROTO_TCP, option) for option in options]

    idle, interval, count, unsent = asyncio.run(scenario())
    assert idle + interval * count < 60
    assert 0 < unsent < 60_000, "milliseconds; 0 is the kernel's own 15 minutes"


# Errors


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError"}}, "too long"),
        ({"error": "no such session"}, "no such session"),
        ({"success": False, "message": "shape mismatch"}, "shape mismatch"),
        ({"detail": "what"}, "{'detail': 'what'}"),
        (["a", "list"], "['a', 'list']"),
        ("upstream gone", "upstream gone"),
        ("", ""),
    ],
)
def test_an_error_status_becomes_a_refusal_with_the_peers_reason(body: Any, reason: str) -> None:
    stand_in = StandIn.always(400, body)
    with pytest.raises(EngineRefused) as refusal:
        ask_engine(stand_in, lambda engine: engine.continue_generation())
    assert refusal.value.status == 400
    assert str(refusal.value) == f"POST {stand_in.url}/continue_generation: 400 {reason}"


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(EngineRefused) as refusal:
        ask_engine(StandIn.always(500, "x" * 10_000), lambda engine: engine.abort_all())
    assert refusal.value.status == 500
    assert len(str(refusal.value)) < 600


# What SGLang does not do as it is asked to


@pytest.mark.parametrize(("paired", "peer"), [(False, {}), (True, {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0})])
def test_requests_are_aborted_by_prefix_although_only_a_known_id_is_passed_on(
    paired: bool, peer: dict[str, Any]
) -> None:
    running = {"ab-1": asyncio.Event(), "ab-2": asyncio.Event(), "other": asyncio.Event()}

    async def answering(asked: Asked) -> Answer:
        """As SGLang 0.5.23; the request that makes the prefix known arrives after the first word."""
        if asked.path == "/generate":
            await asyncio.sleep(0.05)
            own = running[asked.body["rid"]] = asyncio.Event()
            await own.wait()
            return 200, {}
        if asked.body["rid"] in running:
            for rid, end in running.items():
                if rid.startswith(asked.body["rid"]):
                    end.set()
        return 200, {}

    stand_in = StandIn(answering)
    ask_engine(stand_in, lambda engine: engine.abort("ab", paired=paired))
    assert {rid for rid, end in running.items() if end.is_set()} == {"ab", "ab-1", "ab-2"}
    (marker,) = [asked.body for asked in stand_in.asked if asked.path == "/generate"]
    assert marker == {
        "rid": "ab",
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 16, "ignore_eos": True},
        **peer,
    }


@pytest.mark.parametrize(
    ("paired", "words", "counts"),
    [
        (True, "Decode handshake failed for request rank=0 with exception KVTransferError(Fake KVReceiver)", True),
        (True, "Prefill bootstrap failed for request rank=0 with exception Fake KVSender Exception", True),
        (True, "CUDA error: an illegal memory access", False),
        (False, "Decode handshake failed", False),
    ],
)
def test_a_marker_that_an_engine_of_a_pair_aborts_before_its_peer_has_answered_is_aborted(
    paired: bool, words: str, counts: bool
) -> None:
    async def answering(asked: Asked) -> Answer:
        return (500, {"error": {"message": words}}) if asked.path == "/generate" else (200, {})

    def told() -> None:
        ask_engine(StandIn(answering), lambda engine: engine.abort("ab", paired=paired))

    if counts:
        told()
    else:
        with pytest.raises(EngineRefused, match=words):
            told()


def test_an_engine_that_is_gone_cannot_be_told_to_abort() -> None:
    with pytest.raises(EngineRefused):
        ask_engine(StandIn.always(503, "gone"), lambda engine: engine.abort("ab"))


def test_a_refused_connection_is_unreachable() -> None:
    async def scenario() -> None:
        with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and nobody answers
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            async with Http(max_connections=10) as http:
                with pytest.raises(EngineUnreachable, match=r"GET http://127\.0\.0\.1:\d+/ping: ClientConnectorError"):
                    await EngineClient(url, http=http).ping()

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port", "unix:/engine"])
def test_an_address_that_is_none_is_unreachable(url: str) -> None:
    async def scenario() -> None:
        async with Http(max_connections=10) as http:
            with pytest.raises(EngineUnreachable, match="POST"):
                await EngineClient(url, http=http).continue_generation()

    asyncio.run(scenario())


def test_a_connection_that_breaks_before_the_answer_is_unreachable_and_no_time_out() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Http(max_connections=10) as http:
                with pytest.raises(EngineUnreachable, match="ServerDisconnectedError"):
                    await EngineClient(url, http=http).pause("retract")

    asyncio.run(scenario())


def test_no_answer_in_time_is_a_time_out_that_names_the_time() -> None:
    async def never(_: Asked) -> Answer:
        await asyncio.Event().wait()
        return 200, {}

    with pytest.raises(EngineTimeout, match=r"/pause_generation: no answer in 0\.05 s"):
        ask_engine(StandIn(never), lambda engine: engine.pause("retract", seconds=0.05))


# The engine


def test_flags_are_true_for_200_and_false_for_an_error_status() -> None:
    async def paused(asked: Asked) -> Answer:
        return (200, "") if asked.path == "/ping" else (503, "")

    assert ask_engine(StandIn(paused), lambda engine: engine.ping()) is True
    assert ask_engine(StandIn(paused), lambda engine: engine.ready()) is False


def test_model_info_is_read_as_texts() -> None:
    stand_in = StandIn.always(200, {"model_path": "/models/m0", "weight_version": 3, "more": True})
    assert ask_engine(stand_in, lambda engine: engine.model_info()) == ModelInfo("/models/m0", "3")


def test_load_is_summed_over_ranks() -> None:
    ranks = [{"num_running_reqs": 2, "num_waiting_reqs": 5}, {"num_running_reqs": 1}]
    assert ask_engine(StandIn.always(200, {"loads": ranks}), lambda engine: engine.load()) == Load(3, 5)
    assert ask_engine(StandIn.always(200, {}), lambda engine: engine.load()) == Load(0, 0)


def test_the_checksum_is_the_digest_over_all_ranks() -> None:
    stand_in = StandIn.always(200, {"success": True, "per_engine_checksum": "abc", "ranks": []})
    assert ask_engine(stand_in, lambda engine: engine.checksum()) == "abc"
    assert [(a.method, a.path, a.body) for a in stand_in.asked] == [
        ("POST", "/weights_checker", {"action": "checksum"})
    ]


@pytest.mark.parametrize(
    "answer",
    [{"success": False, "message": "no", "per_engine_checksum": "abc"}, {"success": True, "message": "none"}],
)
def test_an_answer_without_a_checksum_is_a_refusal_although_its_status_is_200(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused, match=f"no weights checksum: {answer['message']}"):
        ask_engine(StandIn.always(200, answer), lambda engine: engine.checksum())


def test_weights_are_updated_with_the_label_that_is_given() -> None:
    stand_in = StandIn.always(200, {"success": True})
    ask_engine(stand_in, lambda e: e.update_weights_from_disk("/weights/7", label="7@5e1f0a27", flush_cache=False))
    (asked,) = stand_in.asked
    assert (asked.method, asked.path) == ("POST", "/update_weights_from_disk")
    assert asked.body == {"model_path": "/weights/7", "weight_version": "7@5e1f0a27", "flush_cache": False}


@pytest.mark.parametrize("answer", [{"success": False, "message": "bad shape"}, {"message": "bad shape"}])
def test_an_update_that_does_not_say_success_is_a_refusal(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused, match="update_weights_from_disk: bad shape"):
        ask_engine(StandIn.always(200, answer), lambda e: e.update_weights_from_disk("/weights/7", label="7@5e1f0a27"))


def test_that_an_engine_sees_no_checkpoint_is_said_before_what_sglang_makes_of_it() -> None:
    """In the words of 0.5.23, which looks on the network for a folder that it does not find."""
    said = "Failed to get weights iterator: [Errno -2] Name or service not known."
    stand_in = StandIn.always(400, {"success": False, "message": said})
    with pytest.raises(EngineRefused, match="sees no checkpoint at /weights/7: is the volume mounted") as refusal:
        ask_engine(stand_in, lambda e: e.update_weights_from_disk("/weights/7", label="7@5e1f0a27"))
    assert said in str(refusal.value)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda e: e.pause("abort"), "/pause_generation", {"mode": "abort"}),
        (lambda e: e.continue_generation(), "/continue_generation", {}),
        (lambda e: e.abort_all(), "/abort_request", {"abort_all": True}),
        (lambda e: e.flush_cache(), "/flush_cache", {}),
        (lambda e: e.flush_cache(wait_seconds=9), "/flush_cache?timeout=9", {}),
        (lambda e: e.release_memory(("weights",)), "/release_memory_occupation", {"tags": ["weights"]}),
        (lambda e: e.resume_memory(["kv_cache"]), "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ],
)
def test_each_order_is_one_post_with_a_json_body(
    call: Callable[[EngineClient], Awaitable[None]], path: str, body: dict[str, Any]
) -> None:
    stand_in = StandIn.always(200, {"success": True})
    ask_engine(stand_in, call)
    assert [(a.method, a.path, a.body) for a in stand_in.asked] == [("POST", path, body)]
    assert stand_in.asked[0].headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_nothing_is_sent_twice(status: int) -> None:
    stand_in = StandIn.always(status, {})
    with pytest.raises(EngineError):
        ask_engine(stand_in, lambda engine: engine.release_memory(["weights"]))
    assert len(stand_in.asked) == 1, "a second release kills SGLang's scheduler"


# The router


def test_workers_are_listed_with_urls_that_can_be_compared() -> None:
    table = {"workers": [{"id": "w1", "url": "http://10.0.0.1:30000/", "worker_type": "regular", "is_healthy": True}]}
    stand_in = StandIn.always(200, table)
    assert ask_router(stand_in, lambda router: router.list_workers()) == [
        Worker("w1", "http://10.0.0.1:30000", "regular", True)
    ]
    assert ask_router(StandIn.always(200, {"workers": None}), lambda router: router.list_workers()) == []


def test_a_worker_that_says_nothing_of_its_health_is_not_healthy() -> None:
    stand_in = StandIn.always(200, {"workers": [{"id": "w1", "url": "u"}]})
    (worker,) = ask_router(stand_in, lambda router: router.list_workers())
    assert worker.is_healthy is False


def test_a_worker_is_registered_by_url_and_type() -> None:
    stand_in = StandIn.always(202, {"status": "accepted", "worker_id": "w1"})
    url = "http://10.0.0.1:30000"
    assert ask_router(stand_in, lambda router: router.add_worker(url, worker_type="decode")) == "w1"
    ask_router(stand_in, lambda router: router.add_worker(url, worker_type="prefill", bootstrap_port=8998))
    assert [(asked.method, asked.path) for asked in stand_in.asked] == [("POST", "/workers")] * 2
    assert [asked.body for asked in stand_in.asked] == [
        {"url": url, "worker_type": "decode"},
        {"url": url, "worker_type": "prefill", "bootstrap_port": 8998},
    ]


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (200, {"id": "w1", "job_status": {"status": "processing"}}, ""),
        (200, {"id": "w1", "is_healthy": True}, ""),
        (200, {"id": "w1", "job_status": {"status": "failed", "message": "Workflow timeout after 40s"}}, "timeout"),
        (404, {"error": "Worker not found"}, "started anew"),
    ],
)
def test_a_router_says_what_became_of_a_registration(status: int, body: dict[str, Any], failure: str) -> None:
    told = ask_router(StandIn.always(status, body), lambda router: router.registration_failure("w1"))
    assert failure in told
    assert bool(told) is bool(failure)


def test_removing_a_worker_that_is_gone_is_success_and_other_errors_are_told() -> None:
    gone = StandIn.always(404, {"error": "not found"})
    ask_router(gone, lambda router: router.remove_worker("w1"))
    assert [(a.method, a.path) for a in gone.asked] == [("DELETE", "/workers/w1")]
    with pytest.raises(EngineRefused, match="500 broken"):
        ask_router(StandIn.always(500, {"error": "broken"}), lambda router: router.remove_worker("w1"))


def test_a_routing_key_is_a_header_and_is_absent_without_one() -> None:
    stand_in = StandIn.always(200, {"text": "t"})

    async def both(router: RouterClient) -> None:
        assert await router.generate({"rid": "1"}, seconds=5, routing_key="group-3") == {"text": "t"}
        await router.generate({"rid": "2"}, seconds=5)

    ask_router(stand_in, both)
    assert [a.headers.get("X-SMG-Routing-Key") for a in stand_in.asked] == ["group-3", None]
    assert [(a.path, a.body) for a in stand_in.asked] == [("/generate", {"rid": "1"}), ("/generate", {"rid": "2"})]

"""How many buckets are under way, and what a sender waits for; agent and groups are stand-ins that say when."""

from __future__ import annotations

import threading
import unittest
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from pydantic import BaseModel

from rolloutfleet.api.agent import SendBucket, StepResult, UpdateEngine, UpdateResult, UpdateSession
from rolloutfleet.api.rollout_server import EngineVerdict
from rolloutfleet.trainer import NonFiniteWeights, sending
from rolloutfleet.trainer.sending import Senders, send
from servers import wait_until

OPTIONS = {"version": None, "rollback": False, "pause_mode": "Retract", "timeout_seconds": 60.0}
TENSORS = 5


class Agent:
    """Answers when it is told to, and says of each request when it came."""

    def __init__(self, *uids: str) -> None:
        self.uids = uids
        self.asked: list[str] = []
        self.failed: dict[str, str] = {}
        self.may_answer: dict[str, threading.Event] = {}
        self.over = threading.Event()

    def call(
        self, method: str, path: str, answer: type[Any], *, body: BaseModel | None = None, seconds: float = 30.0
    ) -> Any:
        what = path.rpartition("/")[2] if method == "POST" else method
        if isinstance(body, SendBucket):
            what = f"bucket {body.number}"
        self.asked.append(what)
        if what in self.may_answer:
            self.may_answer[what].wait(seconds)
        if what == "updates":
            engines = [
                UpdateEngine(uid=uid, pod=uid, url="http://x", ranks=1, group=uid, join=False) for uid in self.uids
            ]
            return UpdateSession(id="x", version=1, engines=engines, deadline_seconds=60.0)
        if what == "GET":
            self.over.wait(seconds)
        if what in ("GET", "finish", "DELETE"):
            self.over.set()
            outcomes = [(uid, "Unreachable" if uid in self.failed else "Committed") for uid in self.uids]
            verdicts = [EngineVerdict.model_validate({"pod": uid, "uid": uid, "outcome": o}) for uid, o in outcomes]
            return UpdateResult(version=1, committed=True, engines=verdicts, seconds={})
        return StepResult(failed=dict(self.failed))


class Groups:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.sent: list[dict[str, Future[None]]] = []
        self.flats: list[weakref.ref[torch.Tensor]] = []
        self.aborted: list[str] = []
        self.stuck: str = ""
        """UID of the engine whose part is never through."""

    def names(self, _: str) -> dict[str, str]:
        return {}

    def keep(self, _: dict[str, str]) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self, uid: str) -> None:
        self.aborted.append(uid)

    def broadcasting(self, flat: torch.Tensor, *, seconds: float) -> dict[str, Future[None]]:
        self.flats.append(weakref.ref(flat))
        parts: dict[str, Future[None]] = {uid: Future() for uid in self._agent.uids}
        for uid, part in parts.items():
            if uid != self.stuck:
                part.set_result(None)
        self.sent.append(parts)
        return parts

    @property
    def alive(self) -> int:
        return sum(flat() is not None for flat in self.flats)


class Overlap(unittest.TestCase):
    def setUp(self) -> None:
        self.agent = Agent("a", "b")
        self.groups = Groups(self.agent)
        self.kept = Senders()
        self.kept.groups[0] = self.groups  # type: ignore[assignment]
        self.alive: list[int] = []
        """Buckets that are there while a tensor of the next one is read."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            self.alive.append(self.groups.alive)
            yield f"w{number}", torch.ones(4)

    def sending(self, tensors: Any) -> Future[UpdateResult]:
        result: Future[UpdateResult] = Future()

        def run() -> None:
            try:
                result.set_result(send(self.agent, self.kept, tensors, OPTIONS, {"bucket_bytes": 1}))
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        return result

    def hold_back(self, what: str) -> threading.Event:
        event = self.agent.may_answer[what] = threading.Event()
        self.addCleanup(event.set)
        return event

    def until_asked(self, what: str) -> None:
        wait_until(lambda: what in self.agent.asked, seconds=30.0, what=f"{what} is asked for")

    def test_the_agent_is_asked_for_the_next_bucket_while_one_travels_and_no_third_one_is_made(self) -> None:
        first = self.hold_back("bucket 0")
        result = self.sending(self.tensors())
        self.until_asked("bucket 1")
        self.assertNotIn("bucket 2", self.agent.asked)
        first.set()
        self.assertTrue(result.result(timeout=30.0).committed)
        self.assertEqual(
            [each for each in self.agent.asked if each.startswith("bucket")],
            [f"bucket {number}" for number in range(TENSORS)],
        )
        self.assertLess(max(self.alive), sending.UNDER_WAY)

    def test_an_engine_that_dies_while_it_receives_is_not_waited_for_when_the_agent_knows(self) -> None:
        self.groups.stuck = "b"
        second = self.hold_back("bucket 1")
        result = self.sending(self.tensors())
        self.until_asked("bucket 1")
        self.assertEqual(self.groups.aborted, [])
        self.agent.failed = {"b": "dead"}
        second.set()
        outcomes = [verdict.outcome for verdict in result.result(timeout=sending.SETTLE_SECONDS / 2).engines]
        self.assertEqual(outcomes, ["Committed", "Unreachable"])
        self.assertIn("b", self.groups.aborted)

    def test_an_engine_that_dies_in_the_last_bucket_does_not_keep_the_others_standing(self) -> None:
        self.groups.stuck = "b"
        finish = self.hold_back("finish")
        result = self.sending({"w": torch.ones(4)})
        self.until_asked("finish")
        self.agent.failed = {"b": "dead"}
        finish.set()
        self.assertTrue(result.result(timeout=sending.SETTLE_SECONDS / 2).committed)
        self.assertIn("b", self.groups.aborted)

    def test_what_travels_arrives_before_the_update_is_given_up_for_a_bad_tensor(self) -> None:
        """An engine whose sender leaves an NCCL broadcast is stuck for good."""

        def poisoned() -> Iterator[tuple[str, torch.Tensor]]:
            yield "good", torch.ones(4)
            yield "bad", torch.full((4,), float("nan"))

        first = self.hold_back("bucket 0")
        result = self.sending(poisoned())
        self.until_asked("bucket 0")
        self.assertNotIn("DELETE", self.agent.asked)
        first.set()
        with self.assertRaises(NonFiniteWeights):
            result.result(timeout=30.0)
        self.assertIn("DELETE", self.agent.asked)

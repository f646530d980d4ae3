"""The work queue coalesces, never gives one key to two workers, and brings failures back later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rolloutfleet.kube.queue import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, WorkQueue

LIMIT = 5.0
"""Seconds after which a test has hung."""

Reconcile = Callable[[str], Awaitable[None]]


async def worked(
    queue: WorkQueue[str], reconcile: Reconcile, scenario: Callable[[], Awaitable[None]], *, workers: int = 1
) -> None:
    running = asyncio.create_task(queue.run(workers=workers, reconcile=reconcile))
    try:
        await asyncio.wait_for(scenario(), LIMIT)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def idle(rounds: int = 20) -> None:
    """Let every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def test_a_key_that_is_added_while_it_waits_is_one_piece_of_work() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        done: list[str] = []

        async def reconcile(key: str) -> None:
            done.append(key)

        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert queue.depth() == 2
        await worked(queue, reconcile, idle)
        assert done == ["a", "b"], "oldest first, each once"
        assert queue.depth() == 0

    asyncio.run(scenario())


def test_a_key_that_is_added_while_it_is_worked_on_is_worked_on_once_more_and_never_by_two() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        begun, gate = 0, asyncio.Event()
        inside, most = 0, 0

        async def reconcile(_: str) -> None:
            nonlocal begun, inside, most
            begun, inside = begun + 1, inside + 1
            most = max(most, inside)
            await gate.wait()
            inside -= 1

        async def story() -> None:
            queue.add("a")
            await idle()
            assert begun == 1
            queue.add("a")
            queue.add("a")
            await idle()
            assert begun == 1, "another worker is free, but the key is being worked on"
            gate.set()
            await idle()
            assert begun == 2

        await worked(queue, reconcile, story, workers=3)
        assert most == 1

    asyncio.run(scenario())


def test_different_keys_are_worked_on_at_once_up_to_the_number_of_workers() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        inside: set[str] = set()
        gate = asyncio.Event()

        async def reconcile(key: str) -> None:
            inside.add(key)
            await gate.wait()

        async def story() -> None:
            for key in ("a", "b", "c"):
                queue.add(key)
            await idle()
            assert inside == {"a", "b"}
            gate.set()
            await idle()
            assert inside == {"a", "b", "c"}

        await worked(queue, reconcile, story, workers=2)

    asyncio.run(scenario())


def test_a_failure_does_not_stop_the_worker_and_comes_back_later_and_later_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 1.0)
        pauses: list[float] = []

        def again(key: str, seconds: float) -> None:
            pauses.append(seconds)
            queue.add(key)

        monkeypatch.setattr(queue, "add_after", again)
        failures = 12
        succeeded = asyncio.Event()

        async def reconcile(_: str) -> None:
            if len(pauses) < failures:
                raise RuntimeError("not yet")
            succeeded.set()

        async def story() -> None:
            queue.add("a")
            await succeeded.wait()

        await worked(queue, reconcile, story)
        assert pauses[:3] == [FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS]
        assert pauses == sorted(pauses)
        assert pauses[-1] == LAST_RETRY_SECONDS

    asyncio.run(scenario())


def test_a_success_forgets_earlier_failures_and_keys_fail_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 1.0)
        pauses: list[tuple[str, float]] = []
        monkeypatch.setattr(queue, "add_after", lambda key, seconds: pauses.append((key, seconds)))
        broken = {"a", "b"}

        async def reconcile(key: str) -> None:
            if key in broken:
                raise RuntimeError("broken")

        async def story() -> None:
            for key in ("a", "a", "b"):
                queue.add(key)
                await idle()
            broken.clear()
            queue.add("a")
            await idle()
            broken.add("a")
            queue.add("a")
            await idle()

        await worked(queue, reconcile, story)
        first, second = FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS
        assert pauses == [("a", first), ("a", second), ("b", first), ("a", first)]

    asyncio.run(scenario())


def test_jitter_shortens_a_pause_by_at_most_half(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(jitter=lambda: 0.0)
        pauses: list[float] = []
        monkeypatch.setattr(queue, "add_after", lambda _, seconds: pauses.append(seconds))

        async def reconcile(_: str) -> None:
            raise RuntimeError("broken")

        async def story() -> None:
            queue.add("a")
            await idle()

        await worked(queue, reconcile, story)
        assert pauses == [FIRST_RETRY_SECONDS / 2]

    asyncio.run(scenario())


class Timers:
    """Stands in for the event loop's call_later."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, callback: Callable[[str], None], key: str) -> Timers.Handle:
        entry = (seconds, lambda: callback(key))
        self.pending.append(entry)
        return Timers.Handle(lambda: self.pending.remove(entry))

    class Handle:
        def __init__(self, cancel: Callable[[], None]) -> None:
            self.cancel = cancel


class Moment:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    return timers


def test_of_several_later_moments_the_earliest_counts(timers: Timers) -> None:
    queue: WorkQueue[str] = WorkQueue(clock=Moment())
    queue.add_after("a", 10.0)
    queue.add_after("a", 30.0)
    assert [seconds for seconds, _ in timers.pending] == [10.0]
    queue.add_after("a", 2.0)
    queue.add_after("b", 5.0)
    assert [seconds for seconds, _ in timers.pending] == [2.0, 5.0], "the later one of a was cancelled"


def test_moments_are_compared_as_points_in_time_and_not_as_pauses(timers: Timers) -> None:
    clock = Moment()
    queue: WorkQueue[str] = WorkQueue(clock=clock)
    queue.add_after("a", 10.0)
    clock.now += 8.0
    queue.add_after("a", 5.0)
    assert [seconds for seconds, _ in timers.pending] == [10.0], "2 s from now is before 5 s from now"


def test_an_add_in_between_does_not_cancel_the_later_moment(timers: Timers) -> None:
    queue: WorkQueue[str] = WorkQueue(clock=Moment())
    queue.add_after("a", 10.0)
    queue.add("a")
    assert len(timers.pending) == 1
    timers.pending[0][1]()
    assert queue.depth() == 1


def test_after_its_moment_a_key_can_be_asked_for_again(timers: Timers) -> None:
    queue: WorkQueue[str] = WorkQueue(clock=Moment())
    queue.add_after("a", 10.0)
    timers.pending.pop()[1]()
    assert queue.depth() == 1
    queue.add_after("a", 20.0)
    assert [seconds for seconds, _ in timers.pending] == [20.0]


def test_the_age_is_that_of_the_key_that_has_waited_longest() -> None:
    clock = Moment()
    queue: WorkQueue[str] = WorkQueue(clock=clock)
    assert queue.oldest_age() == 0.0
    queue.add("a")
    clock.now += 3.0
    queue.add("b")
    queue.add("a")
    clock.now += 1.0
    assert queue.oldest_age() == 4.0


def test_a_later_moment_really_comes() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        done = asyncio.Event()

        async def reconcile(_: str) -> None:
            done.set()

        async def story() -> None:
            queue.add_after("a", 0.01)
            await done.wait()

        await worked(queue, reconcile, story)

    asyncio.run(scenario())


def test_news_that_may_be_followed_by_more_are_seen_by_whatever_takes_the_key_first() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        done: list[str] = []
        later = asyncio.Event()

        async def reconcile(key: str) -> None:
            done.append(key)
            if key == "b":
                later.set()

        async def news() -> None:
            queue.add_soon("a", 0.02)
            queue.add_soon("b", 0.02)
            queue.add("a")
            await idle()
            assert done == ["a"], "at once"
            await later.wait()
            await idle()
            assert done == ["a", "b"], "once each"

        await worked(queue, reconcile, news)

    asyncio.run(scenario())


def test_news_that_wait_for_less_do_not_wait_for_those_that_wait_for_more() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        done: list[str] = []
        worked_on = asyncio.Event()

        async def reconcile(key: str) -> None:
            done.append(key)
            worked_on.set()

        async def news() -> None:
            queue.add_soon("a", 3600)
            queue.add_soon("a", 0.001)
            queue.add_soon("a", 3600)
            await worked_on.wait()
            await idle()
            assert done == ["a"]

        await worked(queue, reconcile, news)

    asyncio.run(scenario())


def test_news_of_a_key_that_is_being_worked_on_have_it_worked_on_once_more() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        begun, gate, again = 0, asyncio.Event(), asyncio.Event()

        async def reconcile(_: str) -> None:
            nonlocal begun
            begun += 1
            if begun == 2:
                again.set()
            await gate.wait()

        async def news() -> None:
            queue.add("a")
            await idle()
            queue.add_soon("a", 0.001)
            gate.set()
            await again.wait()

        await worked(queue, reconcile, news)

    asyncio.run(scenario())

"""How many requests to have open at once: enough that no engine ever waits for us, few enough that none waits long in
an engine while another one is free."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_PER_ENGINE = 64
LEAST_PER_ENGINE = 8
MOST_PER_ENGINE = 2048
QUEUE_PER_ENGINE = 4
"""Requests that should wait in each engine, so that the next batch is never short of one."""
LONG_QUEUE_PER_ENGINE = 16
GROWTH = 1.25


def per_engine(current: int, *, open_requests: int, engines: int, waiting: Sequence[int]) -> int:
    """The next bound for each engine. `open_requests`: ours, now. `waiting`: the queues of those of the
    `engines` routable ones whose /v1/loads answered; of the others the same is assumed.

    A queue that has become long is cut to what it should be; a bound that is reached while no queue is there grows by
    a quarter. Without answers it stays.
    """
    if not waiting or engines < 1:
        return current
    queue = sum(waiting) / len(waiting)
    if queue > LONG_QUEUE_PER_ENGINE:
        busy = open_requests / engines - queue
        return _bounded(min(current, busy + QUEUE_PER_ENGINE))
    if queue < QUEUE_PER_ENGINE and open_requests >= current * engines:
        return _bounded(current * GROWTH)
    return current


def _bounded(bound: float) -> int:
    return int(min(max(bound, LEAST_PER_ENGINE), MOST_PER_ENGINE))

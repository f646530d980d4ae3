"""Which replica of the operator acts: one at a time, by Lease. The others hold what they have seen ready and look.

A leader that cannot renew stops before anybody else may begin, by its own clock, and contends again: an API server
that is slow or away pauses the operator and ends no process. What still arrives late is refused by what it carries:
the version of the status that it was planned from, the UID of what it deletes, the epoch in the name that it creates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from rolloutfleet.control.freshness import NotLeading
from rolloutfleet.kube.client import ApiError, KubeApi
from rolloutfleet.kube.lease import HeldBy, LeaseHolder

logger = logging.getLogger(__name__)

LEASE = "rolloutfleet-operator"
DURATION_SECONDS = 4
RENEW_SECONDS = 1.0
MARGIN_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""How often a standby looks; at the end of a lease that is not renewed it looks at that moment."""
ATTEMPT_SECONDS = 10.0
RELEASE_SECONDS = 1.0
SLACK_SECONDS = 0.01


def operators_lease(
    api: KubeApi, namespace: str, identity: str, *, monotonic: Callable[[], float] = time.monotonic
) -> LeaseHolder:
    """`identity`: the pod's name, so that a container that starts anew in it need not wait for its own lease to end."""
    return LeaseHolder(
        api=api,
        namespace=namespace,
        name=LEASE,
        identity=identity,
        duration_seconds=DURATION_SECONDS,
        renew_seconds=RENEW_SECONDS,
        margin_seconds=MARGIN_SECONDS,
        create=True,
        monotonic=monotonic,
    )


class Leadership:
    """Without a lease (outside of a cluster, where nobody makes replicas) it leads for ever."""

    def __init__(self, lease: LeaseHolder | None = None) -> None:
        self._lease = lease
        self._told = ""

    @property
    def certain(self) -> bool:
        return self._lease is None or self._lease.valid

    def require(self) -> None:
        """Raises NotLeading."""
        if not self.certain:
            raise NotLeading("this replica of the operator does not lead, or not for certain")

    async def run(self, term: Callable[[], Awaitable[None]]) -> None:
        """Contend for ever; while leading, `term` runs, and it is cancelled the moment that this ends.

        Cancelled itself, it gives the lease back for the next one to take at once.
        """
        if self._lease is None:
            await term()
            return
        while True:
            pause = await self._contend(self._lease, term)
            await asyncio.sleep(pause)

    async def _contend(self, lease: LeaseHolder, term: Callable[[], Awaitable[None]]) -> float:
        """Seconds after which to try again."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                fence = await lease.acquire()
        except HeldBy as error:
            self._tell(f"stands by, {error}")
            return min(LOOK_SECONDS, error.seconds_left + SLACK_SECONDS) if error.seconds_left else LOOK_SECONDS
        except (ApiError, TimeoutError) as error:
            self._tell(f"stands by, lease {LEASE} not reached: {str(error) or type(error).__name__}")
            return LOOK_SECONDS
        self._tell(f"leads, with fencing number {fence}")
        try:
            await _while_kept(lease, term)
        finally:
            await _give_back(lease)
        self._tell("leads no more: everything is stopped, and contended for anew")
        return 0.0

    def _tell(self, state: str) -> None:
        """Once, however often it is found again."""
        if state != self._told:
            self._told = state
            logger.info("%s", state)


async def _while_kept(lease: LeaseHolder, term: Callable[[], Awaitable[None]]) -> None:
    """Run `term` until the lease is lost. If `term` ends by itself that is an error, and it is raised."""
    keeping = asyncio.ensure_future(lease.keep())
    acting = asyncio.ensure_future(term())
    try:
        await asyncio.wait((keeping, acting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = acting.done()
        for task in (keeping, acting):
            task.cancel()
        await asyncio.gather(keeping, acting, return_exceptions=True)
    if ended:
        acting.result()
        raise RuntimeError("the leader's work has ended")


async def _give_back(lease: LeaseHolder) -> None:
    """Nothing acts any more. Whoever is not reached learns it from the lease's end."""
    with contextlib.suppress(ApiError, TimeoutError):
        async with asyncio.timeout(RELEASE_SECONDS):
            await lease.release()

"""A Lease of coordination.k8s.io as a fencing lock: who leads, and the how-manieth leader that is.

Expiry is judged by the observer's own clock since it last saw the Lease change, as client-go does: clocks of different
machines are never compared. The transition count rises with each acquisition; it is the fencing number that every
write of the holder carries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from rolloutfleet.kube.client import LEASE, AlreadyExists, ApiError, Conflict, KubeApi, NotFound, Object

logger = logging.getLogger(__name__)

DURATION_SECONDS = 15
RENEW_SECONDS = 4.0
SLOW_SECONDS = 0.5
"""A holder whose requests take longer asks for a lease of DURATION_SECONDS: a short one would end before its renewal
has been answered, again and again."""


class HeldBy(Exception):
    """Somebody else leads."""

    def __init__(self, holder: str, *, seconds_left: float = 0.0) -> None:
        super().__init__(f"led by {holder}")
        self.holder = holder
        self.seconds_left = seconds_left
        """Until the lease runs out if its holder does not renew it; 0 where that is not known."""


class LeaseHolder:
    """One contender for one Lease.

    `margin_seconds`: how long before others may take over the lease stops to be valid here, so that what was sent at
    the last moment arrives in time. `create`: make the Lease if there is none; else that is NotFound.
    """

    def __init__(
        self,
        *,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        duration_seconds: int = DURATION_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
        margin_seconds: float = 0.0,
        create: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration_seconds
        self._renew = renew_seconds
        self._margin = margin_seconds
        self._create = create
        self._monotonic = monotonic
        self._took: dict[str, float] = {}
        """Seconds that the last request of each kind took, answered or not."""
        self._seen: tuple[object, ...] = ()
        self._seen_at = 0.0
        self._valid_until = 0.0
        self.fence = 0
        self.holder = ""
        """Who leads as last seen; empty when nobody does."""

    @property
    def valid(self) -> bool:
        """We lead, for certain: no other can have taken over yet."""
        return self._left() > 0

    async def acquire(self, *, above: int = 0) -> int:
        """Become the leader; the fencing number, greater than `above`: of a Lease that somebody deleted the count
        begins anew, and what was written under a number does not forget it. Raises HeldBy, ApiError."""
        try:
            lease = await self._found()
        except AlreadyExists as error:
            raise HeldBy("another contender") from error
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        observed = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        now = self._monotonic()
        if observed != self._seen:
            self._seen, self._seen_at = observed, now
        self.holder = holder
        duration = float(spec.get("leaseDurationSeconds") or self._duration)
        left = self._seen_at + duration - now
        if holder and holder != self._identity and left > 0:
            raise HeldBy(holder, seconds_left=left)
        # A restarted process of the same pod gets a new number as well: its predecessor's late writes are refused.
        fence = max(int(spec.get("leaseTransitions") or 0), above) + 1
        try:
            await self._write(lease, fence=fence, acquired=True)
        except Conflict as error:
            raise HeldBy("another contender") from error
        return fence

    async def _found(self) -> Object:
        try:
            return await self._get()
        except NotFound:
            if not self._create:
                raise
        metadata = {"name": self._name, "namespace": self._namespace}
        return await self._api.create(
            LEASE, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        )

    async def renew(self) -> None:
        """Raises HeldBy when another has taken over, ApiError when nothing is known.

        Among these a Conflict: somebody wrote the object, perhaps only its labels; the next look tells.
        """
        lease = await self._get()
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") != self._identity or int(spec.get("leaseTransitions") or 0) != self.fence:
            self._valid_until = 0.0
            self.holder = str(spec.get("holderIdentity") or "")
            raise HeldBy(self.holder)
        await self._write(lease, fence=self.fence, acquired=False)

    async def release(self) -> None:
        """Let the next one take over at once."""
        if not self.valid:
            return
        self._valid_until = 0.0
        lease = await self._get()
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self._identity and int(spec.get("leaseTransitions") or 0) == self.fence:
            lease["spec"] = {**spec, "holderIdentity": None}
            await self._api.update(LEASE, lease)
            self.holder = ""

    async def _write(self, lease: Object, *, fence: int, acquired: bool) -> None:
        before = self._monotonic()
        duration = self._wanted_duration()
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            **(lease.get("spec") or {}),
            "holderIdentity": self._identity,
            "leaseDurationSeconds": duration,
            "leaseTransitions": fence,
            "renewTime": stamp,
        }
        if acquired:
            spec["acquireTime"] = stamp
        lease["spec"] = spec
        await self._timed("update", self._api.update(LEASE, lease))
        self.fence, self.holder = fence, self._identity
        self._valid_until = before + duration - self._margin

    async def _get(self) -> Object:
        return await self._timed("get", self._api.get(LEASE, self._name, namespace=self._namespace))

    async def _timed(self, what: str, request: Awaitable[Object]) -> Object:
        begun = self._monotonic()
        try:
            return await request
        finally:
            self._took[what] = self._monotonic() - begun

    def _wanted_duration(self) -> int:
        slow = max(self._took.values(), default=0.0) > SLOW_SECONDS
        return max(self._duration, DURATION_SECONDS) if slow else self._duration

    async def keep(self) -> None:
        """Renew until the lease is lost or cannot be renewed in time; return at that very moment."""
        pause = self._renew
        while True:
            await asyncio.sleep(min(pause, max(self._left(), 0.0)))
            if not self.valid:
                return
            begun = self._monotonic()
            try:
                # A connection that hangs must leave time for an attempt over another one.
                patience = (self._wanted_duration() - self._margin - self._renew) / 2
                async with asyncio.timeout(min(patience, self._left())):
                    await self.renew()
            except HeldBy as error:
                logger.warning("lease %s lost: %s", self._name, error)
                return
            except (ApiError, TimeoutError) as error:
                logger.warning("lease %s not renewed: %s", self._name, str(error) or type(error).__name__)
            pause = max(self._renew - (self._monotonic() - begun), 0.0)

    def _left(self) -> float:
        return self._valid_until - self._monotonic()

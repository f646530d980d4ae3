"""Leads one fleet: contends for its Lease, and writes `status.training` under the Lease's fencing number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rolloutfleet.agent.errors import AgentError, conflict
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.api.names import AGENT_MANAGER, API_VERSION, trainer_name
from rolloutfleet.api.rollout_server import RolloutServer, TrainingStatus
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.lease import HeldBy, LeaseHolder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CONTEND_SECONDS = 2.0
FIRST_LOOK_SECONDS = 0.1
"""An agent that was restarted leads again as soon as it has read what."""
WRITE_PAUSE_SECONDS = 0.5


class Leadership:
    def __init__(self, *, api: kube.KubeApi, namespace: str, fleet: Fleet, identity: str) -> None:
        self._api = api
        self._namespace = namespace
        self._fleet = fleet
        self._term: tuple[int, str] | None = None
        """The fencing number under which the operation that runs has begun, and the UID of the server that it led."""
        self._sequence = 0
        """Of our last write."""
        self.operations = asyncio.Lock()
        """Held by an update, offload or onload: each writes the whole of status.training and pauses engines."""
        self.unasked = False
        """The operation that runs, or was the last one, is the agent's own: who asks for another one waits for it."""
        self.lease = LeaseHolder(api=api, namespace=namespace, name=trainer_name(fleet.name), identity=identity)

    async def run(self) -> None:
        """Contend for ever; a frozen server has nothing to lead until it is asked for."""
        while True:
            server = self._fleet.server
            if server is None:
                await asyncio.sleep(FIRST_LOOK_SECONDS)
                continue
            if _may_be_led(server):
                try:
                    training = server.status.training
                    await self.lease.acquire(above=training.fence if training is not None else 0)
                    logger.info("leads %s with fencing number %d", self._fleet.name, self.lease.fence)
                    await self.lease.keep()
                except HeldBy:
                    pass
                except kube.ApiError as error:
                    logger.warning("lease of %s: %s", self._fleet.name, error)
            await asyncio.sleep(CONTEND_SECONDS)

    async def alone(self, operation: Coroutine[Any, Any, Result], *, unasked: bool = False) -> Result:
        """One operation on the fleet at a time, each in a task of its own: it ends even if the caller goes away."""

        async def locked() -> Result:
            async with self.operations:
                self.unasked = unasked
                self._term = None
                return await operation

        return await asyncio.shield(asyncio.ensure_future(locked()))

    def require(self) -> None:
        """Raises AgentError (409) unless this agent leads, for certain."""
        if not self.lease.valid:
            holder = self.lease.holder
            text = f"pod {holder} leads it" if holder else "nobody leads it yet; try again in a moment"
            raise conflict("NotLeading", f"this agent does not lead RolloutServer {self._fleet.name}: {text}")
        term = (self.lease.fence, self._fleet.uid)
        self._term = self._term or term
        if self._term[1] != self._fleet.uid:
            raise self._replaced()
        if self._term != term:
            # It leads again. In between nobody did, and the operator has restored the fleet.
            text = f"its Lease of RolloutServer {self._fleet.name} ran out in the middle; begin anew"
            raise conflict("NotLeading", f"this agent has led without a break only since then: {text}")

    async def write(self, training: TrainingStatus) -> None:
        """Write our subtree. Raises AgentError when we do not lead any more, ApiError.

        One request, without a look before it: engines may stand still meanwhile. The API server refuses what another
        term has overtaken, or a later write of ours (the rule of TrainingStatus): a request that was given up may be
        carried out all the same.
        """
        self._sequence += 1
        stamped = training.model_copy(update={"holder": self.lease.holder, **self._stamp()})
        while True:
            self.require()  # also the bound of this loop: while the API is away, no lease is renewed
            try:
                there = await self._apply(stamped)
                break
            except kube.Invalid:
                await self._refuse_if_overtaken()
                raise
            except (kube.NotFound, kube.Forbidden):
                raise
            except kube.ApiError as error:
                # The same write is safe to repeat; a fleet may be paused meanwhile.
                logger.warning("status of %s not written yet: %s", self._fleet.name, error)
                await asyncio.sleep(WRITE_PAUSE_SECONDS)
        if there.uid != self._fleet.uid:  # no condition of an apply to a status can say so before
            await self._apply(TrainingStatus.model_validate(self._stamp()))
            raise self._replaced()
        self._fleet.server = there

    def _stamp(self) -> dict[str, int]:
        return {"fence": self.lease.fence, "sequence": self._sequence}

    async def _apply(self, training: TrainingStatus) -> RolloutServer:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "RolloutServer",
            "metadata": {"name": self._fleet.name, "namespace": self._namespace},
            "status": {"training": training.dump()},
        }
        applied = await self._api.apply(
            kube.ROLLOUT_SERVER, manifest, field_manager=AGENT_MANAGER, force=True, subresource="status"
        )
        return RolloutServer.model_validate(applied)

    async def _refuse_if_overtaken(self) -> None:
        """Raises AgentError, ApiError."""
        read = await self._api.get(kube.ROLLOUT_SERVER, self._fleet.name, namespace=self._namespace)
        written = RolloutServer.model_validate(read).status.training
        if written is not None and written.fence > self.lease.fence:
            raise conflict("Fenced", f"pod {written.holder} has taken over RolloutServer {self._fleet.name}")

    def _replaced(self) -> AgentError:
        text = f"RolloutServer {self._fleet.name} was deleted and made anew; what was begun for the old one ends here"
        return conflict("NotLeading", text)


def _may_be_led(server: RolloutServer) -> bool:
    """Its weights can be updated, or memory released: of external engines nobody knows before they are asked."""
    offload = any(group.offload for group in server.spec.groups) or server.spec.external is not None
    return server.spec.update_weights or offload

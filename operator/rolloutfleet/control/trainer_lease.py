"""A trainer's status is never read beside a Lease of before it.

Watches of two kinds run apart. Beside an older Lease an update that has just begun looks like one whose leader has
died: its engines would be resumed in the middle of it, and those whose memory is being released would be replaced.
"""

from __future__ import annotations

from rolloutfleet.api.names import trainer_name
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.observed import Fleet


class TrainerLease:
    def __init__(self, *, api: kube.KubeApi, store: FleetStore) -> None:
        self._api = api
        self._store = store
        self._asked: dict[FleetKey, int] = {}
        """The fencing number for which it was asked: a Lease that was deleted and made anew is behind until an agent
        leads again."""

    async def catches_up(self, key: FleetKey, fleet: Fleet) -> bool:
        """Whether the store knows a newer Lease now than when it told of this fleet. Raises ApiError."""
        training = fleet.server.status.training
        if training is None or training.fence <= fleet.lease.fence or self._asked.get(key) == training.fence:
            return False
        try:
            lease = await self._api.get(kube.LEASE, trainer_name(key.name), namespace=key.namespace)
        except kube.NotFound:
            return False
        self._asked[key] = training.fence
        return self._store.upsert("Lease", lease) is not None

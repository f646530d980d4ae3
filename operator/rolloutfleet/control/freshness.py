"""Whether a plan still speaks of the world as it is."""

from __future__ import annotations

from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.kube import client as kube


class Stop(Exception):
    """The rest of the plan must not be performed: it was made for a world that has moved."""


class NotLeading(Stop):
    """It is not certain that this replica of the operator leads: another one may have begun."""


async def require_same_training(api: kube.KubeApi, store: FleetStore, key: FleetKey, planned: str) -> None:
    """Raises Stop if the trainer has begun or ended something since the plan was made, under `planned` (Training.key).

    A watch may lag, or bring the news while the plan is performed: without this look an engine could be registered or
    resumed in the middle of an update, or with the weights of before it.
    """
    fresh = await api.get(kube.ROLLOUT_SERVER, key.name, namespace=key.namespace)
    held = store.server(key) or {}
    if (fresh.get("status") or {}).get("training") != (held.get("status") or {}).get("training"):
        store.upsert("RolloutServer", fresh)
        raise Stop
    if store.training_key(key) != planned:
        raise Stop

"""Versions of the served model of `world`, as a trainer's DeltaWriter writes them."""

from __future__ import annotations

from rolloutfleet.trainer import DeltaWriter
from unit.agent.world import World
from unit.worker.versions import bits, host, served_model


def write_deltas(world: World, *, name: str = "weight") -> tuple[str, str]:
    """Names of a full version and of a delta on it."""
    writer = DeltaWriter(world.volume, base=served_model(world.volume.parent / "base"))
    names = []
    for version in (1, 2):
        dtype, elements = bits("BF16", *range(version, version + 6))
        saved = writer.save_from_host(host({name: (dtype, elements.reshape(2, 3))}), version=version)
        assert saved.full is (version == 1)
        names.append(saved.path.name)
    return names[0], names[1]

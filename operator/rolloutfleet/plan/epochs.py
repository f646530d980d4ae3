"""Numbers for lives of engines: above everything that a group's status or any of its pods has ever used."""

from __future__ import annotations

from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.observed import EnginePod


class Epochs:
    def __init__(self, group: ServerGroup, pods: tuple[EnginePod, ...]) -> None:
        used = [record.epoch for record in group.status.engines] + [pod.epoch for pod in pods]
        self.last = max([group.status.last_epoch, *used])

    def next(self) -> int:
        self.last += 1
        return self.last

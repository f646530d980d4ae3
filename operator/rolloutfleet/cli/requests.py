"""What users ask of single engines, as annotations of ServerGroups (the operator's side: plan/requests.py).

A request names a life (INDEX-eEPOCH), so it means nothing once that life is over and nobody has to remove it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.cli.fleet import Engine
from rolloutfleet.cli.session import Refused, Session
from rolloutfleet.kube.client import SERVER_GROUP, Conflict

ATTEMPTS = 8
"""The operator writes the same object while engines come and go."""


def merged(value: str, asked: Iterable[str], lives: Iterable[str]) -> str:
    """The annotation with what is asked for, without what is about lives that are over.

    `asked`, `lives`: INDEX-eEPOCH; `lives` are those that the group's status has now.
    """
    known = set(lives)
    words = [word.strip() for word in value.split(",")]
    return ",".join(dict.fromkeys(word for word in [*words, *asked] if word in known))


def life(engine: Engine) -> str:
    return f"{engine.record.index}-e{engine.record.epoch}"


async def ask(session: Session, engines: Iterable[Engine], *, annotation: str) -> None:
    """Write the request to the engines' groups. Raises Refused when all lives of a group ended meanwhile, ApiError."""
    by_group: dict[str, list[Engine]] = {}
    for engine in engines:
        by_group.setdefault(engine.group.name, []).append(engine)
    for group, asked in by_group.items():
        await _ask_group(session, group, asked, annotation)


async def _ask_group(session: Session, name: str, asked: list[Engine], annotation: str) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        group = ServerGroup.model_validate(await session.api.get(SERVER_GROUP, name, namespace=session.namespace))
        before = str((group.metadata.get("annotations") or {}).get(annotation, ""))
        lives = [life(Engine(group, record)) for record in group.status.engines]
        gone = [engine.life for engine in asked if life(engine) not in lives]
        if len(gone) == len(asked):
            raise Refused(f"{', '.join(gone)}: ended meanwhile; nothing was asked for")
        value = merged(before, [life(engine) for engine in asked], lives)
        metadata = {"resourceVersion": group.metadata["resourceVersion"], "annotations": {annotation: value}}
        try:
            await session.api.patch(SERVER_GROUP, name, {"metadata": metadata}, namespace=session.namespace)
        except Conflict:
            if attempt == ATTEMPTS:
                raise
            await asyncio.sleep(0.1 * attempt)
        else:
            return

"""Which encoders the language engines know.

Each language engine keeps a table of encoders, in memory only, and picks one for every image. An encoder that came back
has another address, and registers itself only with engines that it was told of at its own start; so the tables are
reconciled like the routers' (SGLang's EncoderBootstrapServer: list, register, unregister).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rolloutfleet.plan.actions import RegisterEncoder, UnregisterEncoder
from rolloutfleet.plan.engines import EngineView
from rolloutfleet.plan.observed import encoder_table_url


def with_encoders(views: Sequence[EngineView]) -> list[EngineView]:
    """Encoders serve where every language engine lists them; language engines need one that is up."""
    tables = [view.probe.encoders for view in _language_engines(views) if view.probe.encoders is not None]
    up = _wanted(views)
    marked = []
    for view in views:
        url = view.pod.url if view.pod is not None else ""
        if view.role == "Encoder":
            view = replace(
                view,
                listed=any(url in table for table in tables),
                acknowledged=bool(tables) and all(url in table for table in tables),
            )
        elif view.pod is not None and view.pod.language_only and view.probe.encoders is not None:
            view = replace(view, lacks_encoder=not view.probe.encoders & up)
        elif view.pod is not None and view.pod.language_only:
            view = replace(view, lacks_encoder=not view.listed)  # its table is not read yet
        marked.append(view)
    return marked


def table_changes(views: Sequence[EngineView]) -> list[RegisterEncoder | UnregisterEncoder]:
    wanted = _wanted(views)
    changes: list[RegisterEncoder | UnregisterEncoder] = []
    for view in _language_engines(views):
        table, pod = view.probe.encoders, view.pod
        if table is None or pod is None:
            continue
        server = encoder_table_url(pod.url)
        changes += [UnregisterEncoder(pod_uid=pod.uid, table=server, url=url) for url in sorted(table - wanted)]
        changes += [RegisterEncoder(pod_uid=pod.uid, table=server, url=url) for url in sorted(wanted - table)]
    return changes


def _wanted(views: Sequence[EngineView]) -> frozenset[str]:
    return frozenset(
        view.pod.url
        for view in views
        if view.role == "Encoder" and view.pod is not None and view.answering and not view.leaving
    )


def _language_engines(views: Sequence[EngineView]) -> list[EngineView]:
    return [view for view in views if view.pod is not None and view.pod.language_only and view.answering]

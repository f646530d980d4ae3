"""Engines that somebody else runs: shown to the rest of the plan as if each had one pod that is never made or deleted.

Their identity is the URL. A life begins when one answers and ends when it does not: whoever answers there next may be
another process with other weights, so it gets a new epoch and is proved from the start. Nothing is ever restarted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.api.names import INITIAL_WEIGHT_VERSION, engine_pod_name
from rolloutfleet.api.server_group import EngineStatus, Failure, ServerGroup
from rolloutfleet.api.weight_labels import parse_label
from rolloutfleet.plan.epochs import Epochs
from rolloutfleet.plan.observed import EnginePod, EngineProbe, canonical_url, external_uid


def external_records(
    group: ServerGroup, probes: Mapping[str, EngineProbe], epochs: Epochs, now: datetime
) -> list[EngineStatus]:
    """One record a URL, kept while the URL stays; those of URLs that were removed are among them until they go."""
    records = {record.url: record for record in group.status.engines}
    taken = {record.index for record in group.status.engines}
    found = []
    for url in wanted_urls(group):
        record = records.pop(url, None)
        if record is None:
            index = next(index for index in range(len(taken) + 1) if index not in taken)
            taken.add(index)
            record = EngineStatus(index=index, epoch=epochs.next(), url=url)
        probe = probes.get(external_uid(url))
        if record.pod_uid and probe is not None and not probe.answering:
            record = _gone(record, epochs, now)
        found.append(record)
    return found + list(records.values())


def _gone(record: EngineStatus, epochs: Epochs, now: datetime) -> EngineStatus:
    text = f"no answer at {record.url}; it is not ours to restart"
    failure = Failure(reason="NotAnswering", message=text, pod=record.pod, time=now.isoformat(timespec="seconds"))
    return EngineStatus(
        index=record.index,
        epoch=epochs.next(),
        url=record.url,
        revision=record.revision,
        facts=record.facts,
        restarts=record.restarts + 1,
        last_failure=failure,
    )


def external_pod(group: ServerGroup, record: EngineStatus, probe: EngineProbe) -> EnginePod:
    facts = probe.facts or record.facts
    return EnginePod(
        name=engine_pod_name(group.name, record.index, record.epoch, 0),
        uid=external_uid(record.url),
        group_uid=group.uid,
        index=record.index,
        epoch=record.epoch,
        rank=0,
        nodes=1,
        revision=layout(facts) if facts is not None else "",
        language_only=False,
        peers=frozenset(),
        url=record.url,
        scheduled=True,
        running_since=None,
        deleting=False,
        trouble=None,
        gate=bool(record.pod_uid),
        external=True,
    )


def wanted_urls(group: ServerGroup) -> list[str]:
    engines = group.spec.external.engines if group.spec.external is not None else []
    return list(dict.fromkeys(canonical_url(engine.url) for engine in engines))


def layout(facts: EngineFacts) -> str:
    """Engines of one layout have one weights checksum."""
    return f"tp{facts.tensor_parallel}-pp{facts.pipeline_parallel}"


def misfit(group: ServerGroup, url: str, probe: EngineProbe, *, pairs: bool) -> tuple[str, str]:
    """(reason, message) why an external engine cannot be used as it is; empty when it can."""
    facts = probe.facts
    if facts is not None and (facts.role in ("Prefill", "Decode")) is not pairs:
        kind = "pairs prefill and decode engines" if pairs else "does not pair"
        return "RoleMismatch", f"it is a {facts.role} engine, but the router of this fleet {kind}"
    expected = model_path(group, url)
    # A label with a version was given by us or by another trainer: where the weights came from then is no question.
    if probe.model_path and parse_label(probe.label) is None and probe.model_path != expected:
        return "ModelMismatch", f"it was started with {probe.model_path}, this fleet has {expected} there"
    return "", ""


def adoptable(probe: EngineProbe, version: int) -> bool:
    """It holds the model as it was started with, which is version 0, and only its label does not say so yet."""
    return version == INITIAL_WEIGHT_VERSION and bool(probe.model_path) and parse_label(probe.label) is None


def model_path(group: ServerGroup, url: str) -> str:
    """Where an engine has the model: its own path, where one is given for its URL."""
    for engine in group.spec.external.engines if group.spec.external is not None else []:
        if canonical_url(engine.url) == url and engine.model_path is not None:
            return engine.model_path
    return group.spec.model.path

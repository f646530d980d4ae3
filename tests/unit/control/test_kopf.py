"""What kopf is used for, and what it is kept from: it delivers events, and never writes, waits or decides."""

from __future__ import annotations

from typing import cast
from urllib.parse import urlsplit

import kopf
import pytest

from rolloutfleet.control.__main__ import liveness_endpoint
from rolloutfleet.control.operator import WATCHED, Operator, configure, registry_for
from rolloutfleet.kube.resources import POD_GROUPS
from rolloutfleet.plan.objects import CHILD_KINDS


def test_kopf_has_handlers_of_events_alone_and_so_adds_no_finalizer_and_no_progress_to_objects() -> None:
    registry = registry_for(cast(Operator, None))
    assert registry._watching.get_all_handlers()
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not others.get_all_handlers(), "a handler of changes, a timer, a daemon or an index"


@pytest.mark.parametrize(("own", "host"), [("0.0.0.0", "0.0.0.0"), ("::", "::")])
def test_the_kubelet_is_answered_at_the_family_of_the_pods_address(own: str, host: str) -> None:
    """kopf listens at the host of this URL alone."""
    assert (urlsplit(liveness_endpoint(own)).hostname, urlsplit(liveness_endpoint(own)).port) == (host, 8080)


def test_whatever_the_operator_makes_is_watched_or_listed_anew() -> None:
    assert {each.resource.kind for each in WATCHED} >= {"RolloutServer", "Node", *CHILD_KINDS}
    assert {resource.kind for resource in POD_GROUPS} == {"PodGroup"}, "listed with every full list"


def test_kopf_waits_for_nobody_for_ever_and_elects_nobody() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    watching, networking = settings.watching, settings.networking
    assert (watching.server_timeout or 0) < (watching.client_timeout or 0) <= 600
    assert 60 < (watching.inactivity_timeout or 0) <= 120, "a stream that says nothing at all is opened anew"
    assert 0 < (networking.connect_timeout or 0) <= (networking.request_timeout or 0) <= 60
    assert settings.execution.max_workers == 2, "no handler needs a thread"

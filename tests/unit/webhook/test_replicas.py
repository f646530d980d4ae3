"""Two replicas of the operator serve the webhook under one certificate, also while one of them renews it."""

from __future__ import annotations

import asyncio
import base64
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest

from rolloutfleet.control.certificates import LIFETIME, Certificate, issue, service_names
from rolloutfleet.control.webhook import WebhookSettings, _load, _refresh
from rolloutfleet.kube.errors import ApiError
from unit.control.cluster import Client, Cluster

SETTINGS = WebhookSettings(namespace="system", agent_image="agent:1")
NAMES = service_names(SETTINGS.service, SETTINGS.namespace)


class Replica:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.client = Client(cluster, name)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def refresh(self) -> None:
        await _refresh(self.tls, SETTINGS, self.client)

    async def begin(self) -> None:
        """As `serve` does: again after a refusal."""
        try:
            await self.refresh()
        except ApiError:
            await self.refresh()


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    webhook: dict[str, Any] = {"name": "inject", "clientConfig": {}}
    metadata = {"name": SETTINGS.configuration}
    cluster.put("MutatingWebhookConfiguration", {"metadata": metadata, "webhooks": [webhook]})
    return cluster


def hold(cluster: Cluster, certificate: Certificate) -> None:
    cluster.put("Secret", {"metadata": {"name": SETTINGS.secret}, "data": certificate.secret_data})


def bundle(cluster: Cluster) -> str:
    configuration = cluster.objects["MutatingWebhookConfiguration", SETTINGS.configuration]
    return base64.b64decode(configuration["webhooks"][0]["clientConfig"]["caBundle"]).decode()


def assert_trusted(authorities: str, serving: ssl.SSLContext) -> None:
    """A whole handshake, in memory."""
    client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cadata=authorities)
    ends = [
        trusting.wrap_bio(client_in, client_out, server_hostname=NAMES[0]),
        serving.wrap_bio(client_out, client_in, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


def test_of_two_that_begin_at_once_both_serve_the_same_certificate(cluster: Cluster) -> None:
    async def scenario() -> None:
        replicas = [Replica(cluster, "a"), Replica(cluster, "b")]
        await asyncio.gather(*(replica.begin() for replica in replicas))
        for replica in replicas:
            assert_trusted(bundle(cluster), replica.tls)

    asyncio.run(scenario())


def test_one_that_still_serves_the_old_certificate_stays_trusted_when_the_other_has_renewed_it(
    cluster: Cluster,
) -> None:
    async def scenario() -> None:
        due = issue(NAMES, datetime.now(UTC) - LIFETIME * 3 / 4)
        hold(cluster, due)
        old, new = Replica(cluster, "a"), Replica(cluster, "b")
        _load(old.tls, due)
        await new.refresh()
        assert cluster.objects["Secret", SETTINGS.secret]["data"] != due.secret_data
        for replica in (old, new):
            assert_trusted(bundle(cluster), replica.tls)

    asyncio.run(scenario())


def test_a_third_renewal_forgets_the_first_authority() -> None:
    first = issue(NAMES, datetime.now(UTC))
    second = issue(NAMES, datetime.now(UTC), trusted=first.authority)
    third = issue(NAMES, datetime.now(UTC), trusted=second.authority)
    assert third.authority.count(b"BEGIN CERTIFICATE") == 2
    assert issue(NAMES, datetime.now(UTC), trusted=b"no pem").authority.count(b"BEGIN CERTIFICATE") == 1


def test_who_read_the_secret_before_it_was_renewed_does_not_publish_the_old_authority(cluster: Cluster) -> None:
    async def scenario() -> None:
        hold(cluster, issue(NAMES, datetime.now(UTC)))
        slow, quick = Replica(cluster, "a"), Replica(cluster, "b")
        renewed = issue(NAMES, datetime.now(UTC))
        asked: list[str] = []

        def overtake(verb: str, kind: str, name: str) -> None:
            if asked[-1:] == ["Secret"]:  # the next call after it was read
                hold(cluster, renewed)
                publish(cluster, renewed)
            asked.append(kind)

        slow.client.before = overtake
        with pytest.raises(ApiError):
            await slow.refresh()
        await quick.refresh()
        assert_trusted(bundle(cluster), quick.tls)
        await slow.refresh()
        assert_trusted(bundle(cluster), slow.tls)

    asyncio.run(scenario())


def publish(cluster: Cluster, certificate: Certificate) -> None:
    configuration = cluster.objects["MutatingWebhookConfiguration", SETTINGS.configuration]
    configuration["webhooks"][0]["clientConfig"]["caBundle"] = base64.b64encode(certificate.authority).decode()
    cluster.put("MutatingWebhookConfiguration", configuration)

"""The client and the lease against a real API server: what only the server decides, no stand-in can show."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.support import Kubectl, eventually
from rolloutfleet.kube import client as client_module
from rolloutfleet.kube.client import (
    LEASE,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    Object,
    Resource,
)
from rolloutfleet.kube.config import Credentials, load_credentials
from rolloutfleet.kube.lease import HeldBy, LeaseHolder

CONFIG_MAP = Resource("", "v1", "configmaps", "ConfigMap")
FIRST, SECOND = "first-manager", "second-manager"


def ask(question: Callable[[KubeApi], Awaitable[Any]], *, credentials: Credentials | None = None) -> Any:
    async def scenario() -> Any:
        api = KubeApi(credentials or load_credentials())
        try:
            return await asyncio.wait_for(question(api), 30)
        finally:
            await api.close()

    return asyncio.run(scenario())


def config_map(namespace: str, name: str = "thing", **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": {"test": "kube-client"}},
        "data": data,
    }


def lease(namespace: str) -> Object:
    return {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": {"name": "lead", "namespace": namespace}}


def with_uid(manifest: Object, uid: str) -> Object:
    return {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}


def test_what_exists_is_not_created_and_what_does_not_is_not_found(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        with pytest.raises(NotFound):
            await api.get(CONFIG_MAP, "thing", namespace=namespace)
        await api.create(CONFIG_MAP, config_map(namespace, a="1"))
        with pytest.raises(AlreadyExists):
            await api.create(CONFIG_MAP, config_map(namespace, a="2"))
        assert (await api.get(CONFIG_MAP, "thing", namespace=namespace))["data"] == {"a": "1"}

    ask(story)


def test_a_field_of_another_manager_is_taken_only_by_force(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        await api.apply(CONFIG_MAP, config_map(namespace, a="1", b="1"), field_manager=FIRST)
        with pytest.raises(Conflict, match=FIRST):
            await api.apply(CONFIG_MAP, config_map(namespace, a="2"), field_manager=SECOND, force=False)
        applied = await api.apply(CONFIG_MAP, config_map(namespace, a="2"), field_manager=SECOND)
        assert applied["data"] == {"a": "2", "b": "1"}
        # What a manager no longer names, and nobody else does, goes.
        released = await api.apply(CONFIG_MAP, config_map(namespace), field_manager=FIRST)
        assert released["data"] == {"a": "2"}

    ask(story)


def test_an_apply_that_names_a_uid_does_not_bring_back_what_was_deleted(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        manifest = config_map(namespace, a="1")
        uid = (await api.apply(CONFIG_MAP, manifest, field_manager=FIRST))["metadata"]["uid"]
        await api.apply(CONFIG_MAP, with_uid(manifest, uid), field_manager=FIRST)
        await api.delete(CONFIG_MAP, "thing", namespace=namespace, uid=uid)
        with pytest.raises(Conflict, match="uid"):
            await api.apply(CONFIG_MAP, with_uid(manifest, uid), field_manager=FIRST)
        with pytest.raises(NotFound):
            await api.get(CONFIG_MAP, "thing", namespace=namespace)

    ask(story)


def test_an_equal_apply_writes_nothing(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        versions = {
            (await api.apply(CONFIG_MAP, config_map(namespace, a="1"), field_manager=FIRST))["metadata"][
                "resourceVersion"
            ]
            for _ in range(3)
        }
        assert len(versions) == 1

    ask(story)


def test_a_deletion_spares_another_life_of_the_object(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        old = await api.create(CONFIG_MAP, config_map(namespace))
        await api.delete(CONFIG_MAP, "thing", namespace=namespace, uid=old["metadata"]["uid"])
        new = await api.create(CONFIG_MAP, config_map(namespace))
        with pytest.raises(Conflict):
            await api.delete(CONFIG_MAP, "thing", namespace=namespace, uid=old["metadata"]["uid"])
        assert (await api.get(CONFIG_MAP, "thing", namespace=namespace))["metadata"]["uid"] == new["metadata"]["uid"]

    ask(story)


def test_an_update_of_an_old_version_is_a_conflict(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        seen = await api.create(CONFIG_MAP, config_map(namespace, a="1"))
        await api.update(CONFIG_MAP, {**seen, "data": {"a": "2"}})
        with pytest.raises(Conflict):
            await api.update(CONFIG_MAP, {**seen, "data": {"a": "3"}})

    ask(story)


def test_both_kinds_of_patch_are_understood_and_a_bad_one_is_invalid(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        await api.create(CONFIG_MAP, config_map(namespace, a="1", b="1"))
        merged = await api.patch(CONFIG_MAP, "thing", {"data": {"b": None, "c": "1"}}, namespace=namespace)
        assert merged["data"] == {"a": "1", "c": "1"}
        guarded = [
            {"op": "test", "path": "/data/a", "value": "1"},
            {"op": "replace", "path": "/data/a", "value": "2"},
        ]
        assert (await api.patch(CONFIG_MAP, "thing", guarded, namespace=namespace))["data"]["a"] == "2"
        with pytest.raises(Invalid):
            await api.patch(CONFIG_MAP, "thing", guarded, namespace=namespace)
        with pytest.raises(Invalid):
            await api.patch(CONFIG_MAP, "thing", {"data": {"not a key": "1"}}, namespace=namespace)

    ask(story)


def test_a_list_goes_on_over_its_chunks_and_selects(
    cluster: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CHUNK", 2)
    names = [f"thing-{number}" for number in range(5)]

    async def story(api: KubeApi) -> None:
        for name in names:
            await api.create(CONFIG_MAP, config_map(namespace, name))
        listed = await api.list(CONFIG_MAP, namespace=namespace, label_selector="test=kube-client")
        assert sorted(item["metadata"]["name"] for item in listed.items) == names
        assert listed.resource_version.isdigit()
        one = await api.list(CONFIG_MAP, namespace=namespace, field_selector="metadata.name=thing-3")
        assert [item["metadata"]["name"] for item in one.items] == ["thing-3"]

    ask(story)


def test_a_watch_goes_on_where_the_list_ended_until_the_server_ends_it(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        await api.create(CONFIG_MAP, config_map(namespace, "before"))
        listed = await api.list(CONFIG_MAP, namespace=namespace, label_selector="test=kube-client")
        await api.create(CONFIG_MAP, config_map(namespace, a="1"))
        await api.patch(CONFIG_MAP, "thing", {"data": {"a": "2"}}, namespace=namespace)
        await api.delete(CONFIG_MAP, "thing", namespace=namespace)
        events = [
            (event.type, event.object["metadata"]["name"])
            async for event in api.watch(
                CONFIG_MAP,
                resource_version=listed.resource_version,
                namespace=namespace,
                label_selector="test=kube-client",
                seconds=1,
            )
            if event.type != "BOOKMARK"
        ]
        assert events == [("ADDED", "thing"), ("MODIFIED", "thing"), ("DELETED", "thing")]

    ask(story)


def test_an_account_without_rights_is_forbidden_and_told_so_by_name(
    kubectl: Kubectl, cluster: Path, namespace: str
) -> None:
    here = kubectl.within(namespace)
    authority = eventually(
        lambda: here("get", "configmap", "kube-root-ca.crt", "--output=jsonpath={.data.ca\\.crt}"), 30, "the CA's map"
    )
    here("create", "serviceaccount", "nobody")
    token = here("create", "token", "nobody").strip()
    nobody = dataclasses.replace(
        load_credentials(), tls=ssl.create_default_context(cadata=authority), token=lambda: token
    )
    with pytest.raises(Forbidden, match=f"system:serviceaccount:{namespace}:nobody"):
        ask(lambda api: api.get(CONFIG_MAP, "thing", namespace=namespace), credentials=nobody)


def contender(api: KubeApi, namespace: str, identity: str) -> LeaseHolder:
    return LeaseHolder(api=api, namespace=namespace, name="lead", identity=identity)


def test_an_empty_lease_passes_from_hand_to_hand_with_rising_numbers(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        await api.create(LEASE, lease(namespace))
        one, two = contender(api, namespace, "one"), contender(api, namespace, "two")
        assert await one.acquire() == 1
        with pytest.raises(HeldBy, match="one"):
            await two.acquire()
        await one.renew()
        await one.release()
        assert await two.acquire() == 2
        assert two.valid
        with pytest.raises(HeldBy, match="two"):
            await one.renew()
        assert not one.valid

    ask(story)


def test_of_many_that_reach_for_one_lease_at_once_exactly_one_leads(cluster: Path, namespace: str) -> None:
    async def story(api: KubeApi) -> None:
        await api.create(LEASE, lease(namespace))
        contenders = [contender(api, namespace, f"pod-{number}") for number in range(8)]
        outcomes = await asyncio.gather(*(each.acquire() for each in contenders), return_exceptions=True)
        assert [outcome for outcome in outcomes if not isinstance(outcome, HeldBy)] == [1]
        assert [each.valid for each in contenders].count(True) == 1
        spec = (await api.get(LEASE, "lead", namespace=namespace))["spec"]
        assert spec["holderIdentity"] == next(each.holder for each in contenders if each.valid)

    ask(story)

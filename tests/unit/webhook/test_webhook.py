"""The webhook answers AdmissionReviews, and its certificate is one that a TLS client trusts."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession, TCPConnector, web

from rolloutfleet.api.names import AGENT_CONTAINER, ANNOTATION_ROLLOUT_SERVERS
from rolloutfleet.control.certificates import (
    LIFETIME,
    RENEW_WHEN_LEFT,
    Certificate,
    issue,
    renewal_due,
    service_names,
)
from rolloutfleet.control.webhook import PATH, WebhookSettings, application, review

IMAGE = "registry/agent:1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def asked(value: str | None = "actor=base", operation: str = "CREATE", **request: Any) -> dict[str, Any]:
    annotations = {} if value is None else {ANNOTATION_ROLLOUT_SERVERS: value}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "train-", "annotations": annotations},
        "spec": {"containers": [{"name": "trainer", "image": "t"}]},
    }
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u-1", "operation": operation, "namespace": "research", "object": pod, **request},
    }


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    answered = review(body, agent_image=IMAGE, pull_policy="Never")
    assert (answered["apiVersion"], answered["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answered["response"]["uid"] == "u-1"
    return dict(answered["response"])


def patched(body: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """The pod with the JSON patch applied: `add` and `replace` of object members are all that is expected."""
    assert response["patchType"] == "JSONPatch"
    pod: dict[str, Any] = deepcopy(body["request"]["object"])
    for operation in json.loads(base64.b64decode(response["patch"])):
        *parents, last = operation["path"].strip("/").split("/")
        target = pod
        for parent in parents:
            target = target[parent]
        assert operation["op"] == "add" or (operation["op"] == "replace" and last in target)
        target[last] = operation["value"]
    return pod


# Reviews


def test_a_created_pod_that_has_a_generate_name_only_is_patched() -> None:
    body = asked()
    response = answer_to(body)
    assert response["allowed"] is True
    pod = patched(body, response)
    assert pod["spec"]["initContainers"][0]["name"] == AGENT_CONTAINER
    assert pod["spec"]["initContainers"][0]["image"] == IMAGE
    assert pod["spec"]["initContainers"][0]["imagePullPolicy"] == "Never"
    assert pod["metadata"]["labels"] == {"rolloutfleet.dev/component": "trainer"}
    assert "name" not in pod["metadata"]


def test_a_pod_that_was_patched_already_is_not_patched_again() -> None:
    body = asked()
    body["request"]["object"] = patched(body, answer_to(body))
    assert answer_to(body) == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize("operation", ["UPDATE", "DELETE", "CONNECT"])
def test_other_operations_than_create_are_allowed_untouched(operation: str) -> None:
    body = asked("actor=", operation)
    if operation != "UPDATE":
        body["request"]["object"] = None
    assert answer_to(body) == {"uid": "u-1", "allowed": True}


def test_a_subresource_is_allowed_untouched() -> None:
    assert answer_to(asked(subResource="ephemeralcontainers")) == {"uid": "u-1", "allowed": True}


def test_a_pod_without_the_annotation_is_allowed_untouched() -> None:
    assert answer_to(asked(None)) == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize("value", ["", "qwen", "actor=", "actor=other-namespace/qwen"])
def test_a_bad_annotation_is_refused_with_its_value_in_the_message(value: str) -> None:
    response = answer_to(asked(value))
    assert response["allowed"] is False
    assert response["status"]["code"] == 422
    assert f"{ANNOTATION_ROLLOUT_SERVERS}: {value!r}" in response["status"]["message"]
    assert "patch" not in response


# The certificate


def test_an_issued_certificate_is_trusted_over_real_tls_under_the_services_name_only(tmp_path: Path) -> None:
    names = service_names("rolloutfleet-webhook", "system")
    certificate = issue(names, datetime.now(UTC))
    (tmp_path / "tls.crt").write_bytes(certificate.certificate)
    (tmp_path / "tls.key").write_bytes(certificate.key)

    async def scenario() -> None:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
        runner = web.AppRunner(application(WebhookSettings(namespace="system", agent_image=IMAGE)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving).start()
        port = runner.addresses[0][1]
        trusting = ssl.create_default_context(cadata=certificate.authority.decode())
        trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
        url = f"https://127.0.0.1:{port}{PATH}"
        try:
            async with ClientSession(connector=TCPConnector(ssl=trusting)) as http:
                async with http.post(url, json=asked(), server_hostname=names[0]) as answered:
                    response = (await answered.json())["response"]
                assert response["allowed"] is True
                assert response["patchType"] == "JSONPatch"
                with pytest.raises(ClientConnectorCertificateError):
                    await http.post(url, json=asked(), server_hostname="other.system.svc")
            stranger = ssl.create_default_context(cadata=issue(names, datetime.now(UTC)).authority.decode())
            async with ClientSession(connector=TCPConnector(ssl=stranger)) as http:
                with pytest.raises(ClientConnectorCertificateError):
                    await http.post(url, json=asked(), server_hostname=names[0])
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_the_api_servers_name_of_the_service_comes_first() -> None:
    assert service_names("hook", "ns") == ["hook.ns.svc", "hook.ns.svc.cluster.local", "hook.ns"]


def test_a_certificate_survives_its_secret() -> None:
    held = issue(["hook.ns.svc"], NOW)
    assert Certificate.from_secret({"data": held.secret_data}) == held
    assert set(held.secret_data) == {"ca.crt", "tls.crt", "tls.key"}


@pytest.mark.parametrize("data", [None, {}, {"tls.crt": "YQ==", "tls.key": "YQ=="}, {"ca.crt": "a", "tls.crt": "a"}])
def test_a_secret_without_all_three_texts_holds_no_certificate(data: dict[str, str] | None) -> None:
    assert Certificate.from_secret({"data": data}) is None


def test_renewal_is_due_when_less_than_a_third_of_the_life_is_left() -> None:
    names = ["hook.ns.svc"]
    held = issue(names, NOW)
    turning_point = NOW + LIFETIME - RENEW_WHEN_LEFT
    assert not renewal_due(held, names, NOW)
    assert not renewal_due(held, names, turning_point - timedelta(minutes=1))
    assert renewal_due(held, names, turning_point + timedelta(minutes=1))
    assert renewal_due(held, names, NOW + 2 * LIFETIME)


def test_renewal_is_due_when_there_is_no_certificate_or_it_is_unreadable_or_names_something_else() -> None:
    held = issue(["hook.ns.svc", "hook.ns"], NOW)
    assert renewal_due(None, ["hook.ns.svc"], NOW)
    assert renewal_due(replace(held, certificate=b"no pem"), ["hook.ns.svc"], NOW)
    assert renewal_due(held, ["hook.elsewhere.svc"], NOW)
    assert not renewal_due(held, ["hook.ns"], NOW)
    assert renewal_due(replace(held, certificate=held.authority), ["hook.ns"], NOW), "names nothing at all"


def test_renewal_is_due_when_the_key_is_not_the_certificates() -> None:
    held = issue(["hook.ns.svc"], NOW)
    assert renewal_due(replace(held, key=issue(["hook.ns.svc"], NOW).key), ["hook.ns.svc"], NOW)
    assert renewal_due(replace(held, key=b"no pem"), ["hook.ns.svc"], NOW)

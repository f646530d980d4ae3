"""The admission webhook: puts the agent into pods that name a RolloutServer.

It is asked about annotated pods only (matchConditions of manifests/base/webhook.yaml), so an outage of the operator
delays new trainers and nobody else. It decides from the request alone and reads nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from rolloutfleet.control.certificates import Certificate, issue, renewal_due, service_names
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.injection import InjectionError, inject

logger = logging.getLogger(__name__)

PATH = "/mutate-pods"
CHECK_SECONDS = 60.0
"""How soon a certificate that another replica renewed is served."""
RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class WebhookSettings:
    namespace: str
    """Of the operator: where the Service and the Secret are."""
    agent_image: str
    pull_policy: str = "IfNotPresent"
    port: int = 8443
    service: str = "rolloutfleet-webhook"
    secret: str = "rolloutfleet-webhook-tls"
    configuration: str = "rolloutfleet"
    certificate_folder: Path | None = None
    """Where cert-manager's Secret is mounted (tls.crt, tls.key); None: the operator issues its own."""


def review(request: Mapping[str, Any], *, agent_image: str, pull_policy: str) -> dict[str, Any]:
    """The response to an AdmissionReview of admission.k8s.io/v1."""
    asked = request["request"]
    response: dict[str, Any] = {"uid": asked["uid"], "allowed": True}
    if asked.get("operation") == "CREATE" and not asked.get("subResource"):
        pod = asked["object"]
        try:
            injected = inject(pod, agent_image=agent_image, pull_policy=pull_policy)
        except InjectionError as error:
            response |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": str(error)}}
        else:
            if injected != pod:
                patch = [
                    {"op": "add", "path": "/metadata/labels", "value": injected["metadata"]["labels"]},
                    {"op": "replace", "path": "/spec", "value": injected["spec"]},
                ]
                response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def application(settings: WebhookSettings) -> web.Application:
    async def mutate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        return web.json_response(review(body, agent_image=settings.agent_image, pull_policy=settings.pull_policy))

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=16 << 20)
    app.add_routes([web.post(PATH, mutate), web.get("/healthz", healthz)])
    return app


async def serve(settings: WebhookSettings, api: kube.KubeApi) -> None:
    """Serve for ever, with a certificate that is looked after; cancelled with the process."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    runner: web.AppRunner | None = None
    try:
        while True:
            try:
                await _refresh(tls, settings, api)
                pause = CHECK_SECONDS
            except (kube.ApiError, OSError, ssl.SSLError) as error:
                logger.warning("webhook certificate: %s", error)
                pause = RETRY_SECONDS
            else:
                if runner is None:
                    runner = web.AppRunner(application(settings), access_log=None)
                    await runner.setup()
                    await web.TCPSite(runner, port=settings.port, ssl_context=tls).start()
                    logger.info("webhook serves on port %d", settings.port)
            await asyncio.sleep(pause)
    finally:
        if runner is not None:
            await runner.cleanup()


async def _refresh(tls: ssl.SSLContext, settings: WebhookSettings, api: kube.KubeApi) -> None:
    """New connections use what was loaded last: no restart for a renewal."""
    if settings.certificate_folder is not None:
        folder = settings.certificate_folder
        tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return
    # In this order: a patch that was made from an older Secret then fails, since the replica that has renewed it
    # writes the configuration after the Secret.
    configuration = await api.get(kube.MUTATING_WEBHOOK, settings.configuration)
    certificate = await _own_certificate(settings, api)
    _load(tls, certificate)
    await _publish(certificate, configuration, settings, api)


def _load(tls: ssl.SSLContext, certificate: Certificate) -> None:
    """The ssl module takes files only."""
    with tempfile.TemporaryDirectory() as name:
        chain, key = Path(name, "tls.crt"), Path(name, "tls.key")
        chain.write_bytes(certificate.certificate)
        key.touch(mode=0o600)
        key.write_bytes(certificate.key)
        tls.load_cert_chain(chain, key)


async def _own_certificate(settings: WebhookSettings, api: kube.KubeApi) -> Certificate:
    """From the Secret, or a new one. Of two replicas at once one writes it; the other is refused and comes again."""
    names = service_names(settings.service, settings.namespace)
    try:
        secret = await api.get(kube.SECRET, settings.secret, namespace=settings.namespace)
    except kube.NotFound:
        secret = None
    held = Certificate.from_secret(secret) if secret else None
    if held is not None and not renewal_due(held, names, datetime.now(UTC)):
        return held
    fresh = issue(names, datetime.now(UTC), trusted=held.authority if held is not None else b"")
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": settings.secret, "namespace": settings.namespace},
        "data": fresh.secret_data,
    }
    if secret is None:
        await api.create(kube.SECRET, manifest)
    else:
        manifest["metadata"]["resourceVersion"] = secret["metadata"]["resourceVersion"]
        await api.update(kube.SECRET, manifest)
    logger.info("webhook certificate issued for %s", ", ".join(names))
    return fresh


async def _publish(
    certificate: Certificate, configuration: kube.Object, settings: WebhookSettings, api: kube.KubeApi
) -> None:
    bundle = base64.b64encode(certificate.authority).decode()
    patch: list[dict[str, Any]] = [
        {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
        for index, webhook in enumerate(configuration["webhooks"])
        if webhook["clientConfig"].get("caBundle") != bundle
    ]
    if patch:
        version = configuration["metadata"]["resourceVersion"]
        patch.insert(0, {"op": "test", "path": "/metadata/resourceVersion", "value": version})
        await api.patch(kube.MUTATING_WEBHOOK, settings.configuration, patch)

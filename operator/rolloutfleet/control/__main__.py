"""`python -m rolloutfleet.control`: run the operator. Every setting is an environment variable of its Deployment."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import kopf
from kopf._core.engines.peering import Identity

from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.metrics import serve as serve_metrics
from rolloutfleet.control.operator import Operator, registry_for
from rolloutfleet.control.webhook import WebhookSettings, serve
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.config import load_credentials
from rolloutfleet.plan.objects import Defaults
from rolloutfleet.transport import AiohttpTransport

LIVENESS = "http://0.0.0.0:8080/healthz"


async def run() -> None:
    namespace = os.environ.get("ROLLOUTFLEET_NAMESPACE") or None
    webhook = webhook_settings()
    metrics = Metrics()
    credentials = load_credentials()
    transport = AiohttpTransport(max_connections=32, keep_seconds=60, tls=credentials.tls)
    operator = Operator(
        api=KubeApi(credentials, transport=transport, observe=metrics.api_answered),
        defaults=Defaults(
            router_image=required("ROLLOUTFLEET_ROUTER_IMAGE"),
            placeholder_image=required("ROLLOUTFLEET_PLACEHOLDER_IMAGE"),
            # Engines get addresses of the family that this pod has.
            bind_address="::" if ":" in os.environ.get("POD_IP", "") else "0.0.0.0",
            image_pull_policy=os.environ.get("ROLLOUTFLEET_IMAGE_PULL_POLICY", "IfNotPresent"),
        ),
        namespace=namespace,
        metrics=metrics,
        services=(
            lambda _: serve_metrics(metrics.registry),
            *((lambda api: serve(webhook, api),) if webhook is not None else ()),
        ),
    )
    await kopf.operator(
        registry=registry_for(operator),
        # kopf would ask for the user's name, which an arbitrary UID does not have.
        identity=Identity(os.environ.get("POD_NAME") or socket.gethostname()),
        standalone=True,
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else [],
        liveness_endpoint=LIVENESS,
    )


def webhook_settings() -> WebhookSettings | None:
    """None outside a cluster: there is no Service through which the API server could call us."""
    own_namespace = os.environ.get("POD_NAMESPACE")
    if not own_namespace:
        return None
    folder = os.environ.get("ROLLOUTFLEET_WEBHOOK_CERTIFICATES")
    return WebhookSettings(
        namespace=own_namespace,
        agent_image=required("ROLLOUTFLEET_AGENT_IMAGE"),
        pull_policy=os.environ.get("ROLLOUTFLEET_IMAGE_PULL_POLICY", "IfNotPresent"),
        certificate_folder=Path(folder) if folder else None,
    )


def required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SystemExit(f"environment variable {name}: missing; the operator's manifest sets it")
    return value


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "kopf.objects"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    asyncio.run(run())


if __name__ == "__main__":
    main()

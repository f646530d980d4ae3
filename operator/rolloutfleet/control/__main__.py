"""`python -m rolloutfleet.control`: run the operator. Every setting is an environment variable of its Deployment."""

from __future__ import annotations

import gc
import logging
import os
import socket
from pathlib import Path

import kopf
import uvloop
from kopf._core.engines.peering import Identity

from rolloutfleet.control.leadership import Leadership, operators_lease
from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.metrics import serve as serve_metrics
from rolloutfleet.control.operator import Operator, registry_for
from rolloutfleet.control.webhook import WebhookSettings, serve
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.config import load_credentials
from rolloutfleet.plan.objects import Defaults

GARBAGE = 20_000
"""Objects between two searches for cycles: a list of pods makes that many at once, and Python's 700 cost 8 % of CPU."""


async def run() -> None:
    namespace = os.environ.get("ROLLOUTFLEET_NAMESPACE") or None
    own_namespace = os.environ.get("POD_NAMESPACE")
    # kopf would ask for the user's name, which an arbitrary UID does not have.
    name = os.environ.get("POD_NAME") or socket.gethostname()
    credentials = load_credentials()
    metrics = Metrics()
    # Of its own: a renewal waits for no connection that reconciles hold.
    unfenced = KubeApi(credentials, max_connections=4, observe=metrics.api_answered)
    leadership = Leadership(operators_lease(unfenced, own_namespace, name) if own_namespace else None)
    webhook = webhook_settings(own_namespace)
    # The kubelet asks at the address that this pod has, and engines get addresses of the same family.
    bind_address = "::" if ":" in os.environ.get("POD_IP", "") else "0.0.0.0"
    operator = Operator(
        api=KubeApi(
            credentials,
            max_connections=40,
            before_write=leadership.require,
            observe=metrics.api_answered,
        ),
        defaults=Defaults(
            router_image=required("ROLLOUTFLEET_ROUTER_IMAGE"),
            placeholder_image=required("ROLLOUTFLEET_PLACEHOLDER_IMAGE"),
            agent_image=required("ROLLOUTFLEET_AGENT_IMAGE"),
            bind_address=bind_address,
            image_pull_policy=os.environ.get("ROLLOUTFLEET_IMAGE_PULL_POLICY", "IfNotPresent"),
        ),
        namespace=namespace,
        leadership=leadership,
        metrics=metrics,
        services=(
            lambda: serve_metrics(metrics.registry),
            *((lambda: serve(webhook, unfenced),) if webhook is not None else ()),
        ),
    )
    await kopf.operator(
        registry=registry_for(operator),
        identity=Identity(name),
        standalone=True,
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else [],
        liveness_endpoint=liveness_endpoint(bind_address),
    )
    await unfenced.close()


def liveness_endpoint(bind_address: str) -> str:
    host = f"[{bind_address}]" if ":" in bind_address else bind_address
    return f"http://{host}:8080/healthz"


def webhook_settings(own_namespace: str | None) -> WebhookSettings | None:
    """None outside a cluster: there is no Service through which the API server could call us."""
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
    for chatter in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):  # the kubelet asks every ten seconds
        logging.getLogger(chatter).setLevel(logging.WARNING)
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)
    uvloop.run(run())


if __name__ == "__main__":
    main()

"""Where the API server is and who we are: from the pod's service account, or from a user's kubeconfig."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

TOKEN_SECONDS = 60.0
"""For which a token that was read serves: the kubelet renews it with a fifth of its hour left."""


class NoCluster(RuntimeError):
    """Neither a service account nor a kubeconfig was found."""


@dataclass(frozen=True)
class Credentials:
    server: str
    """Base URL of the API server."""
    tls: ssl.SSLContext
    token: Callable[[], str | None]
    """Asked for with each request: a pod's token is renewed by its kubelet."""
    namespace: str


def load_credentials(*, kubeconfig: str | None = None, context: str | None = None) -> Credentials:
    """In a pod its service account, unless KUBECONFIG or an argument says otherwise. Raises NoCluster.

    `kubeconfig`: default is KUBECONFIG, else ~/.kube/config. `context`: default is the file's current one.
    """
    named = kubeconfig or context or os.environ.get("KUBECONFIG")
    if not named and (SERVICE_ACCOUNT / "token").exists():
        return _in_cluster()
    return _from_kubeconfig(kubeconfig, context)


def _in_cluster() -> Credentials:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise NoCluster("KUBERNETES_SERVICE_HOST: missing although a service account is mounted")
    bracketed = f"[{host}]" if ":" in host else host
    return Credentials(
        server=f"https://{bracketed}:{port}",
        tls=ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt")),
        token=_mounted_token(),
        namespace=(SERVICE_ACCOUNT / "namespace").read_text().strip(),
    )


def _mounted_token() -> Callable[[], str]:
    read_at, held = 0.0, ""

    def token() -> str:
        nonlocal read_at, held
        if not held or time.monotonic() - read_at > TOKEN_SECONDS:
            read_at, held = time.monotonic(), (SERVICE_ACCOUNT / "token").read_text().strip()
        return held

    return token


def _from_kubeconfig(kubeconfig: str | None, context: str | None) -> Credentials:
    from kubernetes.client import Configuration
    from kubernetes.config import list_kube_config_contexts, load_kube_config
    from kubernetes.config.config_exception import ConfigException

    configuration = Configuration()
    try:
        load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, context=context, client_configuration=configuration
        )
        contexts, active = list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise NoCluster(f"no service account is mounted and no kubeconfig can be used: {error}") from error
    if context:
        active = next(known for known in contexts if known["name"] == context)
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)

    def token() -> str | None:
        # The client library has renamed its key for it.
        keys = ("BearerToken", "authorization")
        header = next(filter(None, map(configuration.get_api_key_with_prefix, keys)), None)
        return str(header).removeprefix("Bearer ") if header else None

    return Credentials(
        server=str(configuration.host).rstrip("/"),
        tls=tls,
        token=token,
        namespace=str(active.get("context", {}).get("namespace") or "default"),
    )

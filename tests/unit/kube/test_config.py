"""Credentials are read from what users have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rolloutfleet.kube import config
from rolloutfleet.kube.config import NoCluster, load_credentials

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://api.example:6443/", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: c, context: {cluster: c, user: u, namespace: research}}]
current-context: c
"""


def test_a_kubeconfig_with_a_token_is_used_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    found = load_credentials()
    assert (found.server, found.token(), found.namespace) == ("https://api.example:6443", "secret", "research")


def test_a_missing_kubeconfig_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "none")
    monkeypatch.setenv("KUBECONFIG", missing)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", missing)
    with pytest.raises(NoCluster):
        load_credentials()


def test_a_mounted_token_is_read_anew_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(config, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(config, "time", SimpleNamespace(monotonic=lambda: now))
    (tmp_path / "token").write_text("first\n")
    token = config._mounted_token()
    assert token() == "first"
    (tmp_path / "token").write_text("second\n")
    now += config.TOKEN_SECONDS - 1
    assert token() == "first"
    now += 2
    assert token() == "second"

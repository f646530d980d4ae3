"""Every sample is taken by the API server as it is, and the operator makes of it what it says.

Images and volumes of the samples are not here, so their pods wait: how many there are, of what shape, and that status
says why they do not run is what can be seen. The sample for CPUs runs for real in the quickstart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.fleets import ready
from e2e.support import Kubectl, eventually

SAMPLES = sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))


def pods_wanted(server: dict[str, Any]) -> int:
    groups = server["spec"].get("groups", [])
    return sum(group.get("replicas", 1) * group["engine"].get("nodes", 1) for group in groups)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_becomes_its_pods_and_says_why_they_do_not_run(
    kubectl: Kubectl, operator: None, namespace: str, sample: Path
) -> None:
    inside = kubectl.within(namespace)
    manifests = [manifest for manifest in yaml.safe_load_all(sample.read_text()) if manifest]
    servers = [manifest for manifest in manifests if manifest["kind"] == "RolloutServer"]
    assert servers
    inside("apply", "--server-side", "--validate=strict", f"--filename={sample}")
    for server in servers:
        name = server["metadata"]["name"]
        labels = f"--selector=rolloutfleet.dev/server={name},rolloutfleet.dev/component=engine"
        eventually(
            lambda labels=labels: inside("get", "pods", labels, "--output=name").split(),  # type: ignore[misc]
            60,
            f"{sample.name}: the pods of {name}",
            accept=lambda pods, server=server: len(pods) == pods_wanted(server),  # type: ignore[misc]
        )
        condition = eventually(
            lambda name=name: ready(inside, name),  # type: ignore[misc]
            30,
            f"{sample.name}: {name} says how it stands",
            accept=lambda found: found.get("reason") not in (None, "Reconciling"),
        )
        assert condition["status"] == "False"
        assert condition["reason"] not in ("InvalidTemplate", "NameTaken"), condition

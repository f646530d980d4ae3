"""Fixtures of the end-to-end tests: they run against the real cluster that KUBECONFIG names, in namespaces of
their own, and only when asked for (`pytest tests/e2e`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Helpers are imported as `e2e.support`, the name under which mypy knows them too.
sys.path.insert(0, str(Path(__file__).parents[1]))

from e2e.fleets import trainer_pod
from e2e.support import Kubectl, KubectlError, eventually, remove_namespace

# Kubernetes looks again at a namespace with pods after half of their longest grace period: 100 s for a router's 200.
NAMESPACE_DELETION_SECONDS = 240.0
FAILED = pytest.StashKey[bool]()


def find_kubectl() -> Path:
    """KUBECTL, or the one on PATH, or the one that tests/cluster built."""
    named = os.environ.get("KUBECTL") or shutil.which("kubectl")
    if named:
        return Path(named)
    built = sorted(Path.home().glob(".cache/rolloutfleet/kubernetes-*/kubectl"))
    if not built:
        pytest.fail("no kubectl: not on PATH, none in ~/.cache/rolloutfleet/kubernetes-*/; set KUBECTL", pytrace=False)
    return built[-1]


def install_operator(kubectl: Kubectl) -> None:
    """The operator of this checkout, with its CRDs, from the overlay for the local cluster."""
    manifests = Path(__file__).parents[2] / "manifests/overlays/local"
    for crd in ("rolloutservers", "servergroups"):
        kubectl("apply", "--server-side", "--force-conflicts", f"--filename={manifests.parents[2]}/crds/{crd}.yaml")
        kubectl("wait", "--for=condition=Established", f"crd/{crd}.rolloutfleet.dev", "--timeout=30s")
    rendered = kubectl("kustomize", str(manifests), "--load-restrictor=LoadRestrictionsNone")
    kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=rendered)
    # Images keep their tag: a pod that runs already may be of an older build.
    kubectl("--namespace=rolloutfleet-system", "rollout", "restart", "deploy/rolloutfleet-operator")
    kubectl("--namespace=rolloutfleet-system", "rollout", "status", "deploy/rolloutfleet-operator", "--timeout=120s")
    probe = trainer_pod("probe", "actor=none", service_account="default")
    eventually(
        lambda: kubectl.within("default").create(probe, options=("--dry-run=server",)), 60, "the webhook answers"
    )


@pytest.fixture(scope="session")
def cluster() -> Path:
    """Path of the kubeconfig of the cluster under test."""
    value = os.environ.get("KUBECONFIG", "")
    if not value:
        pytest.fail(
            "KUBECONFIG is not set: end-to-end tests need a Kubernetes cluster, for example "
            "KUBECONFIG=/var/lib/rolloutfleet-cluster/admin.kubeconfig after `make up`",
            pytrace=False,
        )
    path = Path(value)
    if not path.is_file():
        pytest.fail(f"KUBECONFIG={value}: no such file (one path is wanted, not a list)", pytrace=False)
    return path


@pytest.fixture(scope="session")
def kubectl(cluster: Path) -> Kubectl:
    """kubectl as admin of the cluster under test; without a namespace of its own."""
    return Kubectl(binary=find_kubectl(), kubeconfig=cluster)


@pytest.fixture(scope="session")
def operator(kubectl: Kubectl) -> None:
    install_operator(kubectl)


@pytest.fixture(scope="session")
def vanishing_namespaces(kubectl: Kubectl) -> Iterator[list[str]]:
    """Namespaces whose deletion was asked for; the session does not end before they are gone."""
    names: list[str] = []
    yield names
    if names:
        eventually(
            lambda: kubectl("get", "namespaces", "--ignore-not-found", "--output=name", *names),
            NAMESPACE_DELETION_SECONDS,
            f"namespaces {names} are gone",
            accept=lambda left: not left.strip(),
        )


@pytest.fixture
def namespace(kubectl: Kubectl, vanishing_namespaces: list[str], request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test. What is in it is printed when the test fails."""
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    kubectl("create", "namespace", name)
    try:
        yield name
        if request.node.stash.get(FAILED, False):
            _print_contents(kubectl.within(name))
    finally:
        remove_namespace(kubectl, name)
        vanishing_namespaces.append(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


def _print_contents(kubectl: Kubectl) -> None:
    for arguments in (
        ("get", "rolloutservers,servergroups,pods,services", "--output=wide"),
        ("get", "rolloutservers,servergroups", "--output=yaml"),
        ("get", "events", "--sort-by=.lastTimestamp"),
    ):
        with contextlib.suppress(KubectlError):
            print(f"--- kubectl {' '.join(arguments)}\n{kubectl(*arguments)}")

"""The local cluster itself: it starts, starts again, does what a Kubernetes does, and leaves nothing behind.

These tests start and end the cluster, so they are not part of `make test`; run them with

    ROLLOUTFLEET_CLUSTER_MAY_END=1 pytest tests/cluster

as root, on a machine whose cluster nobody uses. Images must be built (`tests/cluster/cluster images`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).with_name("cluster")
STATE = Path(os.environ.get("ROLLOUTFLEET_CLUSTER", "/var/lib/rolloutfleet-cluster")).resolve()
CACHE = Path(os.environ.get("ROLLOUTFLEET_CACHE", Path.home() / ".cache/rolloutfleet"))
IMAGE = "localhost/rolloutfleet/agent:dev"  # any of ours that has Python
NODES = {"node0", "node1"}
KERNEL_SETTINGS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the cluster needs root")


def run(*command: str, stdin: str | None = None, timeout: float = 120.0) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr or done.stdout}"
    return done.stdout


def cluster(*arguments: str) -> float:
    """Run a verb of tests/cluster/cluster; how many seconds it took."""
    begin = time.monotonic()
    run(str(CLUSTER), *arguments, timeout=900.0)
    return time.monotonic() - begin


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    binary = next(CACHE.glob("kubernetes-*/kubectl"))
    return run(str(binary), f"--kubeconfig={STATE}/admin.kubeconfig", *arguments, stdin=stdin)


def apply(*manifests: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))


def get(*arguments: str) -> Any:
    return json.loads(kubectl("get", *arguments, "--output=json"))


def eventually(accept: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not accept():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def phase(pod: str) -> str:
    return str(get("pod", pod)["status"].get("phase"))


def pod(name: str, *command: str, node: str, gpus: int = 0, labels: dict[str, str] | None = None) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": IMAGE, "command": list(command), "resources": resources}],
        },
    }


def traces() -> dict[str, list[str]]:
    """What of a cluster can be seen on this machine: after `down` as before `up`."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            cgroup = (folder / "cgroup").read_text()
        except OSError:  # ended meanwhile
            continue
        daemon = words[0].rsplit(b"/", 1)[-1].startswith((b"kube", b"etcd", b"coredns", b"containerd"))
        if (daemon and f"{STATE}/".encode() in b" ".join(words)) or ":/rf-node" in cgroup:
            processes.append(b" ".join(words[:4]).decode())
    routes = [line for line in run("ip", "route").splitlines() if line.startswith(("10.244.", "10.89.0."))]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    left_by_containers = ("/run/containerd/s/*", "/run/containerd/runc/*/*", "/var/lib/cni/results/*")
    left_by_kubelets = ("/var/lib/kubelet/*", "/var/log/pods/*", "/var/log/containers/*")
    return {
        "processes": processes,
        "mounts": sorted(m for m in mounts if m.startswith((f"{STATE}/", "/run/netns"))),
        "network namespaces": run("ip", "netns", "list").split(),
        "links": re.findall(r"^\d+: (rf[^:@]*)", run("ip", "-o", "link"), re.MULTILINE),
        "routes": routes,
        "cgroups": sorted(str(p) for p in Path("/sys/fs/cgroup").glob("**/rf-node*")),
        "files": sorted(
            str(p) for pattern in (*left_by_containers, *left_by_kubelets) for p in Path("/").glob(pattern[1:])
        ),
        "iptables": [line for line in run("iptables", "-S").splitlines() if "rolloutfleet" in line],
        "kernel settings": [f"{k}={Path('/proc/sys', k).read_text().strip()}" for k in KERNEL_SETTINGS],
        "state": [str(STATE)] if STATE.exists() else [],
    }


@pytest.fixture(scope="module")
def before() -> Iterator[dict[str, list[str]]]:
    """The traces on a machine without the cluster."""
    if STATE.exists() and os.environ.get("ROLLOUTFLEET_CLUSTER_MAY_END") != "1":
        pytest.fail(f"a cluster is in {STATE}; these tests end it: set ROLLOUTFLEET_CLUSTER_MAY_END=1", pytrace=False)
    cluster("down")
    yield traces()
    cluster("down")


@pytest.fixture
def running(before: dict[str, list[str]]) -> None:
    """The cluster is up, with our images."""
    cluster("up")
    cluster("load-image", str(CACHE / "images/agent.tar"))


@pytest.mark.usefixtures("running")
def test_starting_again_returns_at_once_and_changes_nothing() -> None:
    nodes = {node["metadata"]["uid"] for node in get("nodes")["items"]}
    daemons = (STATE / "pids/etcd").read_text()
    assert cluster("up") < 5.0
    assert {node["metadata"]["uid"] for node in get("nodes")["items"]} == nodes
    assert (STATE / "pids/etcd").read_text() == daemons


@pytest.mark.usefixtures("running")
def test_both_nodes_are_ready_with_eight_gpus_each() -> None:
    for node in get("nodes")["items"]:
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True"
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert {node["metadata"]["name"] for node in get("nodes")["items"]} == NODES


@pytest.mark.usefixtures("running")
def test_a_service_on_one_node_is_reached_by_name_from_the_other() -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    fetch = (
        "import time, urllib.request\n"
        "for attempt in range(100):\n"
        "    try:\n"
        "        print(urllib.request.urlopen('http://web.default.svc.cluster.local', timeout=2).status)\n"
        "        break\n"
        "    except OSError as error:\n"  # the server and its endpoint may be later than this pod
        "        print(error, flush=True)\n"
        "        time.sleep(0.2)\n"
        "else:\n"
        "    raise SystemExit(1)\n"
    )
    serve = ("python3", "-m", "http.server", "8080", "--directory", "/etc")
    apply(
        service,
        pod("web", *serve, node="node0", labels={"app": "web"}),
        pod("client", "python3", "-c", fetch, node="node1"),
    )
    try:
        eventually(
            lambda: phase("client") in ("Succeeded", "Failed"), seconds=60.0, what="the client pod to have ended"
        )
        assert kubectl("logs", "client").splitlines()[-1] == "200"
        assert kubectl("exec", "web", "--", "cat", "/etc/hostname").strip() == "web"
        address = get("pod", "web")["status"]["podIP"]
        with urllib.request.urlopen(f"http://{address}:8080/", timeout=5) as answer:  # from the machine itself
            assert answer.status == 200
    finally:
        kubectl("delete", "pod/web", "pod/client", "service/web", "--now", "--wait=true")


@pytest.mark.usefixtures("running")
def test_gpus_are_counted_by_the_scheduler() -> None:
    wait = ("sleep", "1000")
    apply(pod("all-gpus", *wait, node="node0", gpus=8))
    try:
        eventually(lambda: phase("all-gpus") == "Running", seconds=60.0, what="a pod with 8 GPUs to run")
        apply(pod("one-more", *wait, node="node0", gpus=1))
        eventually(lambda: "Insufficient nvidia.com/gpu" in message("one-more"), seconds=30.0, what="a refusal")
    finally:
        kubectl("delete", "pod/all-gpus", "pod/one-more", "--ignore-not-found", "--now", "--wait=true")


def message(name: str) -> str:
    """Why the scheduler has not placed a pod."""
    return " ".join(c.get("message", "") for c in get("pod", name)["status"].get("conditions", []))


@pytest.mark.usefixtures("running")
def test_ending_it_with_pods_in_it_leaves_nothing(before: dict[str, list[str]]) -> None:
    run_a_pod()
    cluster("down")
    assert traces() == before
    cluster("down")
    assert traces() == before


@pytest.mark.usefixtures("running")
def test_ending_it_after_every_daemon_was_killed_leaves_nothing(before: dict[str, list[str]]) -> None:
    run_a_pod()
    for file in (STATE / "pids").iterdir():
        os.kill(int(file.read_text()), signal.SIGKILL)
    cluster("down")
    assert traces() == before


def test_a_start_killed_half_way_is_cleaned_up_and_can_be_repeated(before: dict[str, list[str]]) -> None:
    cluster("down")
    start = subprocess.Popen([str(CLUSTER), "up"], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        eventually((STATE / "pids/etcd").exists, seconds=60.0, what="etcd to be started")
    finally:
        os.killpg(start.pid, signal.SIGKILL)
        start.wait(timeout=10)
    cluster("up")
    assert {node["metadata"]["name"] for node in get("nodes")["items"]} == NODES
    cluster("down")
    assert traces() == before


def run_a_pod() -> None:
    """So that there are containers, mounts and network namespaces to be left behind."""
    apply(pod("leftover", "sleep", "1000", node="node1"))
    eventually(lambda: phase("leftover") == "Running", seconds=60.0, what="the pod to run")

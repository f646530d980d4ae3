"""`make quickstart`: from a bare machine to trained steps. Says what it does, how long it took, and how to look around.

With KUBECONFIG set, that cluster is used: its nodes need the images and the folders that the example's manifests name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "tests/cluster/cluster"
STATE = Path(os.environ.get("ROLLOUTFLEET_CLUSTER", "/var/lib/rolloutfleet-cluster"))
IMAGES = Path(os.environ["ROLLOUTFLEET_CACHE"]) / "images"
EXAMPLE = ROOT / "docs/examples/grpo"
NAMES = ("operator", "agent", "router", "engine-cpu", "trainer-example")
COLUMNS = ("step", "reward", "weight_version", "oldest_version", "samples", "seconds_train", "seconds_update")
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"\033[1m[{time.monotonic() - BEGAN:4.0f}s]\033[0m {text}", flush=True)


def run(*command: str | Path) -> None:
    if subprocess.run([str(word) for word in command], check=False).returncode:
        sys.exit(f"failed: {' '.join(str(word) for word in command)}")


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(["kubectl", *arguments], input=stdin, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    foreign = os.environ.get("KUBECONFIG")
    if foreign:
        say(f"using the cluster of KUBECONFIG={foreign}")
    else:
        say("tools and SGLang's environment (cold: about 15 minutes; warm: seconds)")
        run("bash", CLUSTER, "tools")
        run("bash", CLUSTER, "engine-env")
        run("bash", CLUSTER, "images")
        run("bash", CLUSTER, "up")
        run("bash", CLUSTER, "load-image", *(IMAGES / f"{name}.tar" for name in NAMES))
        os.environ["KUBECONFIG"] = str(STATE / "admin.kubeconfig")
    os.environ["PATH"] = f"{built_kubectl()}:{os.environ['PATH']}"

    say("operator")
    manifests = kubectl("kustomize", str(ROOT / "manifests/overlays/local"), "--load-restrictor=LoadRestrictionsNone")
    kubectl("apply", "--server-side", "-f", str(ROOT / "crds/rolloutservers.yaml"))
    kubectl("apply", "--server-side", "-f", str(ROOT / "crds/servergroups.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/rolloutservers.rolloutfleet.dev", "--timeout=30s")
    kubectl("apply", "--server-side", "-f", "-", stdin=manifests)
    kubectl("-n", "rolloutfleet-system", "rollout", "status", "deploy/rolloutfleet-operator", "--timeout=120s")

    say("fleet: RolloutServer qwen, two SGLang engines and a router (about 40 s)")
    kubectl("delete", "job", "grpo", "--ignore-not-found")
    kubectl("delete", "ros", "qwen", "--ignore-not-found", "--cascade=foreground")
    clean_weights()
    kubectl("apply", "-f", str(ROOT / "manifests/samples/cpu.yaml"))
    await_serving()

    say("training: a pod that names the fleet (24 steps, about 2 minutes)")
    kubectl("apply", "-f", str(EXAMPLE / "trainer.yaml"))
    steps, summary = follow_training()

    print("\n" + "  ".join(f"{name:>16}" for name in COLUMNS))
    for step in steps:
        print("  ".join(f"{step[name]:>16}" for name in COLUMNS))
    print("\nLook around:")
    print(f"  export KUBECONFIG={os.environ['KUBECONFIG']} PATH={built_kubectl()}:$PATH")
    print("  kubectl get rolloutservers,servergroups,pods")
    print("  kubectl logs job/grpo -c trainer; kubectl logs job/grpo -c rolloutfleet-agent")
    print("  kubectl delete pod -l rolloutfleet.dev/engine-index=0    # and watch it come back with the right weights")
    print("  make down                                                # removes everything\n")
    print(kubectl("get", "rolloutservers,servergroups,pods"))
    print(json.dumps(summary))


def built_kubectl() -> str:
    built = sorted(Path(os.environ["ROLLOUTFLEET_CACHE"]).glob("kubernetes-*/kubectl"))
    return str(built[-1].parent) if built else "/usr/bin"


def clean_weights() -> None:
    """Checkpoints of an earlier run: versions begin anew with a new fleet."""
    weights = STATE / "shared/weights"
    if weights.is_dir():
        run("find", weights, "-mindepth", "1", "-delete")


def await_serving() -> None:
    deadline = time.monotonic() + 300
    told = ""
    while time.monotonic() < deadline:
        server = json.loads(kubectl("get", "ros", "qwen", "-o", "json"))
        status = server.get("status", {})
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        message = f"{ready.get('reason', 'Reconciling')}: {ready.get('message', '')}"
        if message != told:
            told = message
            say(f"  {message}")
        engines = status.get("engines", {})
        if ready.get("status") == "True" and engines.get("routable") == engines.get("desired"):
            return
        time.sleep(1)
    sys.exit("the fleet does not serve after 300 s:\n" + kubectl("get", "rolloutservers,servergroups,pods"))


def follow_training() -> tuple[list[dict[str, float]], dict[str, float]]:
    steps: list[dict[str, float]] = []
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        pods = json.loads(kubectl("get", "pods", "-l", "job-name=grpo", "-o", "json"))["items"]
        pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        phase = pods[-1]["status"]["phase"] if pods else "Pending"
        if phase in ("Running", "Succeeded", "Failed"):
            lines = subprocess.run(
                ["kubectl", "logs", "job/grpo", "-c", "trainer"], text=True, capture_output=True, check=False
            ).stdout.splitlines()
            records = [json.loads(line) for line in lines if line.startswith("{")]
            for record in [record for record in records if "step" in record][len(steps) :]:
                steps.append(record)
                say(f"  step {record['step']}: reward {record['reward']}, weights {record['weight_version']}")
            summary = next((record for record in records if "reward_gain" in record), None)
            if summary is not None:
                return steps, summary
            if phase == "Failed":
                sys.exit("training failed:\n" + ("\n".join(lines[-20:]) or kubectl("describe", "job/grpo")))
        time.sleep(1)
    sys.exit("training did not end within 900 s:\n" + kubectl("get", "rolloutservers,servergroups,pods"))


if __name__ == "__main__":
    main()

"""One chaos run: a fleet under load whose weights change every few seconds, random faults, and the verdict."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.faults import World, inject
from chaos.trainer import safetensors
from chaos.verdict import (
    Expected,
    recreated_without_cause,
    samples_lost_or_doubled,
    versions_back_in_time,
    wrong_weights,
)
from e2e.fleets import (
    SHARED,
    await_routable,
    engine_group,
    engines,
    label_for,
    label_of,
    listed_urls,
    ready,
    rollout_server,
    router_pods,
    stand_in,
    stand_in_code,
    trainer_pod,
)
from e2e.stand_in_engine import expected_tokens
from e2e.support import Kubectl, eventually, remove_namespace
from e2e.watching import PodWatch

SERVER, GROUP = "chaos", "chaos-main"
RECOVERY = {
    "backoff": {"initialSeconds": 1, "maxSeconds": 4, "resetAfterSeconds": 30},
    "healthCheck": {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 2},
    "forceDeleteAfterSeconds": 5,
}
WORKERS = 3
UPDATE_SECONDS = 4.0
CALM_SECONDS = (1.0, 6.0)
"""Between two faults."""


@dataclass(frozen=True)
class Options:
    seed: int
    minutes: float = 5.0
    stand_ins: bool = False
    engines: int = 3
    routers: int = 2
    only: Sequence[str] = ()


@dataclass
class Verdict:
    """`wrong` is empty when all held."""

    wrong: list[str]
    figures: dict[str, Any]


def run(kubectl: Kubectl, options: Options, say: Callable[[str], None]) -> Verdict:
    """In a namespace and a folder of its own, both removed afterwards."""
    name = f"chaos-{uuid.uuid4().hex[:6]}"
    with folder(name, tiny=not options.stand_ins) as weights, namespace(kubectl, name) as inside:
        inside("create", "serviceaccount", "trainer")
        if options.stand_ins:
            stand_in_code(inside)
        inside.apply(fleet(options, name))
        with PodWatch(name) as pods:
            await_routable(inside, SERVER, options.engines)
            inside.apply(loaded_trainer(options, name))
            eventually(lambda: calls(weights), 120, "the trainer has samples")
            expected = expectation(weights, options)
            say(f"load is on; seed {options.seed}")
            world = World(inside, SERVER, pods, random.Random(options.seed), options.stand_ins)
            faults = shake(world, options, say)
            wrong = calm_down(inside, options, weights)
            lines = [line for line in results(weights) if "reference" not in line]
            wrong += samples_lost_or_doubled(lines) + versions_back_in_time(lines) + wrong_weights(lines, expected)
            wrong += recreated_without_cause(pods.seen(), world.broken, causes(inside))
            for line in refusals(lines):
                say(f"update {line['update']}: {line['error']}")
            return Verdict(wrong, figures(lines, faults, pods, options))


def shake(world: World, options: Options, say: Callable[[str], None]) -> Counter[str]:
    done: Counter[str] = Counter()
    ends = time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends:
        name, target = inject(world, options.only)
        done[name] += not target.startswith("nothing")
        say(f"{name}: {target}")
        time.sleep(world.random.uniform(*CALM_SECONDS))
    return done


def calm_down(kubectl: Kubectl, options: Options, weights: Path) -> list[str]:
    """What is wrong with the fleet once it has had time, while the load goes on; then the load ends."""
    patience = 120.0 if options.stand_ins else 400.0
    try:
        await_routable(kubectl, SERVER, options.engines, seconds=patience)
        eventually(lambda: unsettled(kubectl, options), 60, "the fleet has converged", accept=lambda wrong: not wrong)
    except AssertionError as error:
        return [f"not converged: {error}"]
    finally:
        (weights / "stop").touch()
    try:
        eventually(lambda: any("done" in line for line in results(weights)), 240, "the trainer has ended its calls")
        eventually(lambda: mislabelled(kubectl, weights), 60, "all have the last weights", accept=lambda bad: not bad)
    except AssertionError as error:
        return [f"not converged: {error}"]
    return []


def unsettled(kubectl: Kubectl, options: Options) -> list[str]:
    records = engines(kubectl, GROUP)
    found = [f"{record['pod']}: {record['phase']}" for record in records if record["phase"] not in ("Serving", "Held")]
    if len(records) != options.engines:
        found.append(f"{len(records)} engines in status")
    urls = {record.get("url") for record in records}
    routers = router_pods(kubectl, SERVER)
    if len(routers) != options.routers:
        found.append(f"routers {routers}")
    for pod in routers:
        if listed_urls(kubectl, pod) != urls:
            found.append(f"{pod} lists {listed_urls(kubectl, pod)}, engines are at {urls}")
    if not found and ready(kubectl, SERVER).get("status") != "True":
        found.append(f"Ready: {ready(kubectl, SERVER)}")
    return found


def mislabelled(kubectl: Kubectl, weights: Path) -> list[str]:
    """Engines that do not have the last committed version, or whose status does not say so."""
    status = kubectl.json("get", "ros", SERVER)["status"]
    version = ((status.get("training") or {}).get("weights") or {}).get("version", 0)
    known = max((line["update"] for line in results(weights) if "engines" in line), default=0)
    found = [f"status has version {version}, the trainer was told {known}"] if version < known else []
    wanted = label_for(kubectl, SERVER, version)
    for record in engines(kubectl, GROUP):
        label = label_of(kubectl, record["pod"])
        if label != wanted or record.get("weightVersion") != version or record["phase"] != "Serving":
            found.append(f"{record['pod']}: {label} and not {wanted}; status: {record}")
    return found


def expectation(weights: Path, options: Options) -> Expected:
    """What the weights of a version make of a prompt."""
    if options.stand_ins:

        def by_digest(version: int, prompt: Sequence[int], before: Sequence[int], count: int) -> Sequence[int]:
            digest = hashlib.sha256(safetensors(version)).hexdigest() if version else "/models/m0"
            return expected_tokens(digest, prompt, len(before) + count)[len(before) :]

        return by_digest
    references = {line["reference"]: line["groups"] for line in results(weights) if "reference" in line}
    known = {
        (version % 2, str(group["prompt"])): group["samples"][0]["response_tokens"]
        for version, groups in references.items()
        for group in groups
    }
    return lambda version, prompt, before, count: None if before else known[version % 2, str(prompt)][:count]


def causes(kubectl: Kubectl) -> dict[tuple[int, int], str]:
    """Why lives began, by index and epoch, as far as status remembers."""
    return {
        (record["index"], recovery["epoch"]): f"{recovery['reason']} at {recovery['detected']}"
        for record in engines(kubectl, GROUP)
        for recovery in record.get("recoveries", [])
    }


def figures(lines: Sequence[dict[str, Any]], faults: Counter[str], pods: PodWatch, options: Options) -> dict[str, Any]:
    got = [sample for line in lines for group in line.get("groups", ()) for sample in group["samples"]]
    seen = pods.seen()
    return {
        "seed": options.seed,
        "minutes": options.minutes,
        "stand_ins": options.stand_ins,
        "faults": dict(sorted(faults.items())),
        "samples": len(got),
        "samples_retried": sum(sample["attempts"] > 1 for sample in got),
        "samples_of_several_versions": sum(len(sample["weight_versions"]) > 1 for sample in got),
        "calls_that_raised": sum("raised" in line for line in lines),
        "updates_committed": sum("engines" in line for line in lines),
        "updates_refused_or_failed": Counter(line["code"] for line in refusals(lines)),
        "engine_pods": len(seen),
        "longest_sample_s": max((sample["seconds"] for sample in got), default=0.0),
    }


def refusals(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of updates."""
    return [line for line in lines if "update" in line and "error" in line]


def results(weights: Path) -> list[dict[str, Any]]:
    path = weights / "results.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def calls(weights: Path) -> int:
    return sum("got" in line for line in results(weights))


def fleet(options: Options, folder_name: str) -> dict[str, Any]:
    if options.stand_ins:
        group = stand_in("main", "Regular", options.engines)
        group["engine"]["env"] = {"STAND_IN_LOAD_SECONDS": "1.5"}
    else:
        group = engine_group(replicas=options.engines)
    group |= {"recovery": RECOVERY}
    return rollout_server(
        SERVER,
        groups=[group],
        router={"replicas": options.routers},
        service_accounts=("trainer",),
        weights={"mountPath": "/weights", "volume": volume(folder_name)},
    )


def volume(folder_name: str) -> dict[str, Any]:
    return {"hostPath": {"path": f"{SHARED}/weights/{folder_name}", "type": "Directory"}}


def loaded_trainer(options: Options, folder_name: str) -> dict[str, Any]:
    pod = trainer_pod("trainer", f"actor={SERVER}")
    code = Path(__file__).with_name("trainer.py").read_text()
    kind = "stand-in" if options.stand_ins else "tiny"
    (container,) = pod["spec"]["containers"]
    container["command"] = ["python3", "-u", "-c", code, str(WORKERS), str(UPDATE_SECONDS), kind]
    container["volumeMounts"] = [
        {"name": "environment", "mountPath": "/opt/engine", "readOnly": True},
        {"name": "weights", "mountPath": "/weights"},
    ]
    pod["spec"]["volumes"][1] = {"name": "weights", **volume(folder_name)}
    pod["spec"]["nodeName"] = "node0"  # the other is cut off now and then
    return pod


@contextlib.contextmanager
def folder(name: str, *, tiny: bool) -> Iterator[Path]:
    """On both nodes; any user may write."""
    path = Path(SHARED) / "weights" / name
    path.mkdir()
    path.chmod(0o777)
    try:
        if tiny:
            for number in range(2):
                shutil.copytree(f"{SHARED}/models/m{number}", path / f"base{number}")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def namespace(kubectl: Kubectl, name: str) -> Iterator[Kubectl]:
    kubectl("create", "namespace", name)
    try:
        yield kubectl.within(name)
    finally:
        remove_namespace(kubectl, name)


def say_to_stderr(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

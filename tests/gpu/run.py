"""Weight updates and memory with the real SGLang server on one or two GPUs, by the agent's and the trainer library's
own code; one JSON object a line. See README.md.

usage: python -m gpu.run [--device cuda|cpu] [--gpus 2] [--only measure,casualty] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.engines import ROOT, Engine, call

START_SECONDS = 240.0
SCENARIOS = ("mismatch", "measure", "load", "casualty", "die-before", "die-while")


class Stage:
    """Engines, and agents with the fleets that they see."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.cpu = arguments.device == "cpu"
        self.work = Path(arguments.work)
        self.mount = arguments.mount
        self.gpus = arguments.gpus
        self.graphs = arguments.graphs
        self.bucket_mib = [int(size) for size in arguments.bucket_mib.split(",")]
        self.rounds = arguments.rounds
        self.engines: dict[str, Engine] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens: list[list[int]] = []
        self.version = 0

    def tell(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, **values})
        print(line, flush=True)
        with (self.work / "results.jsonl").open("a") as results:
            results.write(line + "\n")

    # Engines

    def launch(self, name: str, port: int, *, model: int, near: bool = False) -> Engine:
        """`near`: on the trainer's GPU, in namespaces of its own, with SGLang's memory saver."""
        gpu = "cpu" if self.cpu else ("0" if near else str(self.gpus - 1))
        options = ["--enable-memory-saver"] if near else []
        if not self.cpu and not self.graphs:
            options += ["--disable-cuda-graph"]
        if not self.cpu:
            # Several engines may share a GPU: all but the one whose memory moves have a small cache.
            options += ["--mem-fraction-static", *(["0.4"] if near else ["0.8", "--max-total-tokens", "65536"])]
        engine = Engine(
            name,
            f"{self.mount}/m{model}",
            port=port,
            gpu=gpu,
            options=options,
            work=self.work,
            apart=near,
        )
        self.engines[name] = engine
        return engine

    def learn(self) -> None:
        """What an engine gives that has loaded the one checkpoint, and one that has loaded the other."""
        one = self.engines["e1"]
        self.tokens, checksums = [one.tokens()], [one.checksum()]
        other = self.engines.get("e2", one)
        if other is one:
            self.load(one, 1)
        self.tokens.append(other.tokens())
        checksums.append(other.checksum())
        self.load(other, 0)
        self.tell("checkpoints", tokens=self.tokens, differ=self.tokens[0] != self.tokens[1], checksums=checksums)

    def load(self, engine: Engine, model: int) -> None:
        answer = call(engine.url, "/update_weights_from_disk", {"model_path": f"{self.mount}/m{model}"})
        assert answer[0] == 200, answer

    # Agents

    def lead(self, name: str, port: int, engines: list[str]) -> None:
        self.describe(name, engines)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"}
        python = os.environ.get("AGENT_PYTHON", sys.executable)
        with (self.work / f"agent-{name}.log").open("w") as log:
            self.agents[name] = subprocess.Popen(
                [python, "-m", "gpu.agent", str(self.work / f"{name}.json"), str(port)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        for _ in range(200):
            if call(f"http://127.0.0.1:{port}", "/healthz", method="GET", seconds=1)[0] == 200:
                return
            time.sleep(0.1)
        raise RuntimeError((self.work / f"agent-{name}.log").read_text()[-3000:])

    def describe(self, name: str, engines: list[str], **phases: str) -> None:
        view = {
            "mount": self.mount,
            "model": f"{self.mount}/m0",
            "checksum": self.engines[engines[0]].checksum() if name not in self.agents else "",
            "engines": [
                {
                    "pod": f"pod-{engine}",
                    "uid": f"uid-{engine}",
                    "url": self.engines[engine].url,
                    "phase": phases.get(engine, "Serving"),
                }
                for engine in engines
            ],
        }
        partial = self.work / "partial"
        partial.write_text(json.dumps(view))
        partial.rename(self.work / f"{name}.json")
        time.sleep(1.5 if name in self.agents else 0)  # the agent looks once a second

    def training(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.work / f"{name}.training.json").read_text())
        return told

    def committed(self, name: str) -> int:
        try:
            return int(self.training(name)["weights"]["version"])
        except FileNotFoundError:
            return 0

    # The trainer

    def trainer(self, scenario: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"}
        environment |= options.pop("environment", {})
        if self.cpu:
            shim = f"{ROOT}/images/engine-cpu/shim"
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{environment['PYTHONPATH']}:{shim}"}
        described = {
            "device": "cpu" if self.cpu else "cuda:0",
            "mount": self.mount,
            "tokens": self.tokens,
            "distributed_agent": "http://127.0.0.1:18091",
            "tensor_agent": "http://127.0.0.1:18092",
            "bucket_mib": self.bucket_mib,
            "rounds": self.rounds,
            "port": 29555,
            "tensor_gpu": 0,
            **options,
        }
        path = self.work / f"trainer-{scenario}.json"
        path.write_text(json.dumps(described))
        with (self.work / f"trainer-{scenario}.log").open("w") as log:
            return subprocess.Popen(
                [os.environ.get("ENGINE_PYTHON", sys.executable), "-m", "gpu.trainer", scenario, str(path)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def lines(self, process: subprocess.Popen[str], scenario: str) -> Any:
        """What the trainer tells, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            self.tell(f"{scenario}: {told.pop('what')}", **told)
            yield json.loads(line)
        if process.wait() not in (0, -signal.SIGKILL):
            log = (self.work / f"trainer-{scenario}.log").read_text()[-3000:]
            self.tell(f"{scenario} FAILED", status=process.returncode, log=log)

    def end(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for engine in self.engines.values():
            engine.kill()


def mismatch(stage: Stage) -> None:
    process = stage.trainer("mismatch", environment={"NCCL_CUMEM_ENABLE": "1"})
    list(stage.lines(process, "mismatch"))
    stage.tell("mismatch: the engine afterwards", ready=call(stage.engines["e1"].url, "/ready", method="GET")[0])


def measure(stage: Stage) -> None:
    process = stage.trainer(
        "measure",
        distributed_engine=stage.engines["e1"].url,
        tensor_engine=stage.engines["e0"].url,
    )
    list(stage.lines(process, "measure"))


def load(stage: Stage) -> None:
    process = stage.trainer("load", distributed_engine=stage.engines["e1"].url, version=stage.committed("far"))
    list(stage.lines(process, "load"))


def casualty(stage: Stage) -> None:
    """e2 stops in the middle of a broadcast and is killed 2 s later; e1 survives."""
    stage.describe("far", ["e1", "e2"])
    process = stage.trainer("casualty", distributed_engine=stage.engines["e1"].url, version=stage.committed("far"))
    assert process.stdin is not None
    killed = 0.0
    for told in stage.lines(process, "casualty"):
        if told["what"] == "stop it":
            stage.engines["e2"].stop_scheduler()
            process.stdin.write("\n")
            process.stdin.flush()
        elif told["what"] == "kill it":
            killed = time.time()
            stage.engines["e2"].kill()
            stage.tell("casualty: killed", took=round(time.time() - killed, 3))
        elif told["what"] == "update" and told["turn"] == 1:
            stage.tell("casualty: from the kill to the end of the update", seconds=round(told["ended"] - killed, 3))
            stage.describe("far", ["e1"])


def die(stage: Stage, name: str, after_seconds: float, watch_seconds: float) -> None:
    """The sender is killed: what the engine can do after that, and for how long not."""
    engine = stage.engines[name]
    stage.describe("far", [name])
    process = stage.trainer(
        "die", distributed_engine=engine.url, version=stage.committed("far"), after_seconds=after_seconds
    )
    died = 0.0
    for told in stage.lines(process, "die"):
        if told["what"] == "dying":
            died = told["at"]
    before = stage.training("far")["weights"]
    while time.time() - died < watch_seconds:
        asked = time.time()
        status, answer = call(engine.url, "/weights_checker", {"action": "checksum"}, seconds=5)
        weights = stage.training("far")["weights"]
        stage.tell(
            "die: seen",
            after_seconds=after_seconds,
            at=round(asked - died, 2),
            took=round(time.time() - asked, 2),
            checksum=status,
            answer=str(answer)[:80],
            phase=weights["phase"],
            committed=weights["version"],
            ping=call(engine.url, "/ping", method="GET", seconds=2)[0],
            ready=call(engine.url, "/ready", method="GET", seconds=2)[0],
            alive=len(engine.members()),
            gpu=_utilization(),
        )
        if status == 200 and weights["phase"] == "Committed":
            break
        time.sleep(4 if status else 0)
    stage.tell("die: status.training", before=before, after=stage.training("far")["weights"])
    if call(engine.url, "/weights_checker", {"action": "checksum"}, seconds=5)[0] == 0:
        # Would leaving the group free it?
        groups = [
            line.split("group_name=")[1].split(",")[0]
            for line in engine.log.read_text().splitlines()
            if "init custom process group" in line
        ]
        left = call(engine.url, "/destroy_weights_update_group", {"group_name": groups[-1]}, seconds=5)
        checksum = call(engine.url, "/weights_checker", {"action": "checksum"}, seconds=5)
        stage.tell("die: after leaving the group", left=left, checksum=str(checksum)[:200])
    else:
        stage.tell("die: the engine goes on", tokens=engine.tokens(), known=stage.tokens)
    began = time.time()
    engine.kill()
    stage.tell("die: engine killed", seconds=round(time.time() - began, 3))


def _utilization() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().replace("\n", " | ")


def play(stage: Stage, only: list[str]) -> None:
    near = [stage.launch("e0", 18100, model=0, near=True)] if "measure" in only else []
    stage.launch("e1", 18110, model=0)
    # On a small machine without a GPU, two engines are enough for what needs no third.
    e2 = None if stage.cpu and near else stage.launch("e2", 18120, model=1)
    started = {engine.name: engine.wait(START_SECONDS) for engine in stage.engines.values()}
    stage.tell("engines serve after", seconds=started, gpus=_utilization())
    stage.learn()
    stage.lead("far", 18091, ["e1"])
    if near:
        stage.lead("near", 18092, ["e0"])
    if "mismatch" in only and not stage.cpu:
        mismatch(stage)
    if "measure" in only:
        measure(stage)
    if "load" in only:
        load(stage)
    if "casualty" in only:
        casualty(stage)
    if "die-while" in only and e2 is not None and e2.process.poll() is not None:
        stage.launch("e3", 18130, model=0)  # it starts while the other is looked at
    if "die-before" in only:
        die(stage, "e1", 0.0, 50.0)
    if "die-while" in only:
        name = "e3" if "e3" in stage.engines else "e2"
        stage.engines[name].wait(START_SECONDS)
        die(stage, name, 0.008, 50.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--graphs", action="store_true", help="engines capture CUDA graphs: a minute more to start")
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--mount", default="/dev/shm/rolloutfleet-gpu", help="folder with the checkpoints m0 and m1")
    parser.add_argument("--work", default="/tmp/rolloutfleet-gpu")
    parser.add_argument("--bucket-mib", default="512,2048")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    unknown = set(only) - set(SCENARIOS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not one of {', '.join(SCENARIOS)}")
    Path(arguments.work).mkdir(parents=True, exist_ok=True)
    stage = Stage(arguments)
    try:
        play(stage, only)
    finally:
        stage.end()


if __name__ == "__main__":
    main()

"""A world in memory that obeys planned actions as Kubernetes, SGLang and the router would.

It lets a property test run a plan to its end, crash after any action, and look at every state in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from rolloutfleet.api.common import EngineFacts, Role
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.api.weight_labels import belongs_elsewhere, fleet_id, weight_label
from rolloutfleet.plan.actions import (
    Action,
    Adopt,
    Apply,
    ApplyStatus,
    CatchUp,
    Continue,
    CreatePod,
    CreatePodGroup,
    DeleteObject,
    DeletePod,
    Deregister,
    Drain,
    Emit,
    PairCheck,
    Register,
    RegisterEncoder,
    Requeue,
    SetGate,
    UnregisterEncoder,
    Verify,
)
from rolloutfleet.plan.failures import Trouble
from rolloutfleet.plan.fleet import plan_fleet
from rolloutfleet.plan.objects import Defaults
from rolloutfleet.plan.observed import (
    EngineProbe,
    Fleet,
    LeaseView,
    Worker,
    engine_pod,
    external_uid,
    is_external,
    pod_group,
    router_pod,
)
from rolloutfleet.plan.revision import group_revision
from rolloutfleet.plan.training import training_of

DEFAULTS = Defaults(router_image="router:1", placeholder_image="pause:1", agent_image="agent:1")
START = datetime(2026, 1, 1, tzinfo=UTC)


def rollout_server(name: str = "qwen", *, replicas: int | None = 2, **spec: Any) -> dict[str, Any]:
    group: dict[str, Any] = {"name": "main", "engine": {"image": "engine:1"}}
    if replicas is not None:
        group["replicas"] = replicas
    return {
        "metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}", "generation": 1},
        "spec": {
            "model": {"path": "/models/m0"},
            "groups": [group],
            "weights": {"volume": {"emptyDir": {}}, "mountPath": "/weights"},
            **spec,
        },
    }


class World:
    def __init__(self, server: dict[str, Any], *, routers: int = 1) -> None:
        self.now = START
        self.server = copy.deepcopy(server)
        self.children: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.weights: dict[str, tuple[str, str]] = {}
        """Label and checksum inside each engine, by pod UID: what is really loaded."""
        self.paused: set[str] = set()
        self.proofs: dict[str, tuple[str, str, str]] = {}
        self.loaded: dict[str, str] = {}
        self.tables: dict[str, dict[str, Worker]] = {f"router-{i}": {} for i in range(routers)}
        self.router_gates: dict[str, bool | None] = dict.fromkeys(self.tables)
        self.lease = LeaseView()
        self.events: list[Emit] = []
        self.writes = 0
        self.created: list[str] = []
        self.gang_apis: frozenset[str] = frozenset()
        self.pod_groups: dict[str, dict[str, Any]] = {}
        self.recorded: set[str] = set()
        """Pods that status has named with their UID: only those can be known to an agent."""
        self._serial = 0
        self.pairs: dict[str, EngineProbe] = {}
        """What requests through pairs have shown, by pod UID."""
        self.stuck: set[str] = set()
        """Pods through which no request of a pair comes."""
        self.running: dict[str, int] = {}
        """Requests in engines, by pod UID."""
        self.aborted: set[str] = set()
        self.create_failures: dict[str, Trouble] = {}
        self.silent: set[str] = set()
        """Engines that run and do not answer."""
        self.closed: set[str] = set()
        """Engines whose server has ended, as seen by a connection."""
        self.unhealthy: dict[str, int] = {}
        """Health checks in a row without a token, by pod UID."""
        self.deaf: dict[str, int] = {}
        """Times in a row that a scheduler did not say what its weights are, by pod UID."""
        self.rechecks: set[str] = set()
        """Engines whose weights are due to be read again."""
        self.nodes: dict[str, bool | None] | None = None
        """Readiness of each node; None as long as nobody has listed them. Pods run on node-INDEX."""
        self.forced: list[str] = []
        """Pods that were removed without the word of their kubelet."""
        self.encoders: dict[str, set[str]] = {}
        """Tables of encoders, by UID of the language engine's pod."""
        self.drained: dict[str, str] = {}
        self.checkpoints = {"/models/m0": "sum-0"}
        self.outside: dict[str, tuple[EngineFacts, str]] = {}
        """What engines that somebody else runs were started as, and with which model, by UID."""

    # What the plan sees

    def fleet(self) -> Fleet:
        routers = tuple(
            router_pod(
                {
                    "metadata": {"name": name, "uid": name},
                    "status": {
                        "podIP": f"10.1.0.{i + 1}",
                        "containerStatuses": [{"name": "router", "state": {"running": {"startedAt": _stamp(START)}}}],
                        "conditions": []
                        if self.router_gates[name] is None
                        else [{"type": "rolloutfleet.dev/Routable", "status": str(self.router_gates[name])}],
                    },
                },
                self.tables[name],
            )
            for i, name in enumerate(self.tables)
        )
        groups = [child for key, child in self.children.items() if key.startswith("ServerGroup/")]
        return Fleet(
            server=RolloutServer.model_validate(self.server),
            groups=tuple(ServerGroup.model_validate(group) for group in groups),
            engine_pods=tuple(engine_pod(pod, self.nodes) for pod in self.pods.values()),
            router_pods=routers,
            probes={
                uid: self._probe(uid)
                for uid in [pod["metadata"]["uid"] for pod in self.pods.values()] + [*self.outside]
            },
            lease=self.lease,
            children=self.children,
            create_failures=self.create_failures,
            gang_apis=self.gang_apis,
            pod_groups={name: pod_group(body) for name, body in self.pod_groups.items()},
        )

    def _engines(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self.pods.values()] + [*self.outside]

    def _probe(self, uid: str) -> EngineProbe:
        if uid not in self.weights or uid in self.silent or uid in self.closed:
            return EngineProbe(answering=False, closed=uid in self.closed, unhealthy=self.unhealthy.get(uid, 0))
        label, _ = self.weights[uid]
        proof = self.proofs.get(uid, ("", "", ""))
        proved = proof[0] == label
        pairs = self.pairs.get(uid, EngineProbe(answering=True))
        return EngineProbe(
            answering=True,
            facts=self.outside[uid][0] if uid in self.outside else self._facts(uid),
            model_path=self.outside[uid][1] if uid in self.outside else "/models/m0",
            paired_with=pairs.paired_with,
            pair_failures=pairs.pair_failures,
            pair_error=pairs.pair_error,
            encoders=self._encoders(uid),
            drained=self.drained.get(uid, ""),
            load=self.running.get(uid, 0),
            unhealthy=self.unhealthy.get(uid, 0),
            deaf=self.deaf.get(uid, 0),
            recheck=uid in self.rechecks,
            paused=uid in self.paused,
            label=label,
            checksum=proof[1] if proved else "",
            read_under=proof[2] if proved else "",
            loaded_under=self.loaded.get(uid, ""),
        )

    def _facts(self, uid: str) -> EngineFacts:
        """As SGLang would say it, from its command line."""
        words = self._pod(uid)["spec"]["containers"][0]["args"]
        flags = dict(zip(words, [*words[1:], ""], strict=True))
        mode = "encoder" if "--encoder-only" in flags else flags.get("--disaggregation-mode", "null")
        port = flags.get("--disaggregation-bootstrap-port")
        return EngineFacts(
            role={"prefill": "Prefill", "decode": "Decode", "encoder": "Encoder"}.get(mode, "Regular"),
            bootstrap_port=int(port) if port else None,
            tensor_parallel=int(flags["--tp-size"]),
            pipeline_parallel=int(flags["--pp-size"]),
            memory_saver="--enable-memory-saver" in flags,
        )

    def _encoders(self, uid: str) -> frozenset[str] | None:
        if is_external(uid) or "--language-only" not in self._pod(uid)["spec"]["containers"][0]["args"]:
            return None
        return frozenset(self.encoders.get(uid, set()))

    def _pod(self, uid: str) -> dict[str, Any]:
        return next(pod for pod in self.pods.values() if pod["metadata"]["uid"] == uid)

    def plan(self) -> list[Action]:
        return plan_fleet(self.fleet(), defaults=DEFAULTS, applied_versions={}, now=self.now)

    # What the plan does

    def perform(self, action: Action) -> None:
        if not isinstance(action, Requeue):
            self.writes += 1
        match action:
            case Apply(manifest=manifest):
                self._apply(copy.deepcopy(dict(manifest)))
            case ApplyStatus(kind="RolloutServer", status=status):
                training = self.server.get("status", {}).get("training")
                self.server["status"] = {**status, **({"training": training} if training else {})}
            case ApplyStatus(name=name, status=status):
                self.children[f"ServerGroup/{name}"]["status"] = dict(status)
                self.recorded |= {engine["pod"] for engine in status["engines"] if engine["podUid"]}
            case CreatePod(manifest=manifest):
                self._create(copy.deepcopy(dict(manifest)))
            case CreatePodGroup(manifest=manifest):
                self._create_pod_group(copy.deepcopy(dict(manifest)))
            case DeletePod(name=name, uid=uid, force=force):
                self.forced += [name] if force else []
                self.delete_pod(name, uid, force=force)
            case DeleteObject(kind="PodGroup", name=name):
                assert not self._gang(name), f"{name} is deleted before its pods"
                del self.pod_groups[name]
            case DeleteObject(kind=kind, name=name):
                self._vanished(f"{kind}/{name}")
            case SetGate(pod=pod, routable=routable):
                self._gate(pod, routable)
            case Register(router=router, url=url, kind=kind):
                self.assert_right_weights(url)
                self.tables[router][url] = Worker(healthy=True, kind=kind, id=self._uid())
                self.assert_pairs_meant(router)
            case Deregister(router=router, url=url, worker_id=worker_id):
                if url in self.tables[router] and self.tables[router][url].id == worker_id:
                    del self.tables[router][url]
            case Verify(pod_uid=uid, training_key=key):
                if uid in self.weights:
                    self.proofs[uid] = (*self.weights[uid], key)
                    self.rechecks.discard(uid)
            case Adopt(pod_uid=uid, version=version, fleet=fleet):
                label, checksum = self.weights[uid]
                proof = self.proofs.get(uid)
                self.weights[uid] = (weight_label(version, fleet), checksum)
                if proof is not None and proof[0] == label:
                    self.proofs[uid] = (weight_label(version, fleet), *proof[1:])
            case CatchUp(pod_uid=uid, path=path, version=version, fleet=fleet, training_key=key):
                if not is_external(uid):
                    workers = self._pod(uid)["spec"].get("initContainers", [])
                    assert action.copied is (bool(workers) and version > 0)
                if uid in self.weights:
                    assert all(self.url(uid) not in table for table in self.tables.values()), "loaded while routed"
                    assert not belongs_elsewhere(self.weights[uid][0], fleet), "loaded into another fleet's engine"
                    self.weights[uid] = (weight_label(version, fleet), self.checkpoints[path])
                    self.proofs[uid] = (*self.weights[uid], key)
                    self.paused.discard(uid)
                    self.loaded[uid] = key
            case Continue(pod_uid=uid):
                self.paused.discard(uid)
            case PairCheck(prefill_uid=prefill, decode_uid=decode):
                broken = {prefill, decode} & self.stuck
                for uid, peer, peers in (
                    (prefill, decode, action.prefill_peers),
                    (decode, prefill, action.decode_peers),
                ):
                    known = self.pairs.get(uid, EngineProbe(answering=True))
                    self.pairs[uid] = known.pair_failed(peer, "stuck") if broken else known.pair_proved(peers)
            case Drain(pod_uid=uid, until=until, abort=abort):
                assert all(self.url(uid) not in table for table in self.tables.values()), "drained while routed"
                if abort:
                    self.running.pop(uid, None)
                    self.aborted.add(uid)
                if not self.running.get(uid):
                    self.drained[uid] = until
                    self.pairs = {other: probe.peer_left(uid) for other, probe in self.pairs.items()}
            case RegisterEncoder(pod_uid=uid, table=table, url=url):
                assert table == self.url(uid).replace(":30000", ":8997")
                self.encoders.setdefault(uid, set()).add(url)
            case UnregisterEncoder(pod_uid=uid, url=url):
                self.encoders[uid].discard(url)
            case Emit():
                self.events.append(action)
            case Requeue():
                pass

    def assert_right_weights(self, url: str) -> None:
        """The product's first promise: an engine enters a table only with the committed weights."""
        training = training_of(self.fleet(), self.now)
        groups = {group.name: group for group in self.fleet().groups}
        offload = any(
            groups[pod["metadata"]["labels"]["rolloutfleet.dev/group"]].spec.offload
            for pod in self.pods.values()
            if self.url(pod["metadata"]["uid"]) == url
        )
        assert not training.holds(offload=offload), "registered while the trainer holds it"
        for uid in self._engines():
            if self.url(uid) == url:
                label, checksum = self.weights[uid]
                assert training.claimed_by(label), f"{url} serves {label}, the fleet has {training.version}"
                expected = self.checkpoints[training.path]
                assert checksum == expected, f"{url} has other weights than its label says"

    def assert_pairs_meant(self, router: str) -> None:
        """Whatever a router lists it pairs: no engine may meet one of another revision by accident."""
        listed = {}
        for pod in self.pods.values():
            if self.url(pod["metadata"]["uid"]) in self.tables[router]:
                seen = engine_pod(pod)
                listed[seen.name] = (seen, self._facts(seen.uid).role)
        revisions = {group_revision(group.spec) for group in self.fleet().groups}
        for one, role in listed.values():
            for other, other_role in listed.values():
                if (role, other_role) == ("Prefill", "Decode"):
                    now = one.revision in revisions and other.revision in revisions
                    meant = one.revision in other.peers or other.revision in one.peers
                    assert now or meant, f"{one.name} and {other.name} pair by accident"

    def _apply(self, manifest: dict[str, Any]) -> None:
        key = f"{manifest['kind']}/{manifest['metadata']['name']}"
        held = self.children.get(key)
        manifest["metadata"]["uid"] = held["metadata"]["uid"] if held else self._uid()
        manifest["metadata"]["generation"] = (held["metadata"]["generation"] + 1) if held else 1
        if held and "status" in held:
            manifest["status"] = held["status"]
        if manifest["kind"] == "ServerGroup":
            manifest["spec"].setdefault("replicas", held["spec"]["replicas"] if held else 1)
        self.children[key] = manifest

    def _create(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods or name in self.create_failures:
            return
        assert name not in self.recorded, f"{name} is created a second time: an epoch was used twice"
        seen = engine_pod({**manifest, "metadata": {**manifest["metadata"], "uid": ""}})
        assert not seen.gang or name.rpartition("-")[0] in self.pod_groups, f"{name} is created before its PodGroup"
        self.created.append(name)
        manifest["metadata"]["uid"] = self._uid()
        manifest["status"] = {"phase": "Pending", "conditions": []}
        self.pods[name] = manifest

    def _create_pod_group(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name not in self.pod_groups:
            assert manifest["apiVersion"] in self.gang_apis, f"{name}: no such API here"
            manifest["metadata"]["uid"] = self._uid()
            self.pod_groups[name] = manifest

    def _gang(self, name: str) -> list[dict[str, Any]]:
        """Pods of a PodGroup."""
        return [pod for key, pod in self.pods.items() if key.rpartition("-")[0] == name and engine_pod(pod).gang]

    def _placed(self, pod: dict[str, Any]) -> bool:
        """Whether the scheduler places a pod: one of a gang only when all of them are there."""
        name = pod["metadata"]["name"].rpartition("-")[0]
        return not engine_pod(pod).gang or len(self._gang(name)) >= self.pod_groups[name]["spec"]["minMember"]

    def _vanished(self, key: str) -> None:
        """Names of a group that is gone may come again, under other UIDs."""
        if key.startswith("ServerGroup/"):
            uid = self.children[key]["metadata"]["uid"]
            for pod in [pod for pod in self.pods.values() if engine_pod(pod).group_uid == uid]:
                self.delete_pod(pod["metadata"]["name"])
            self.recorded = {name for name in self.recorded if not name.startswith(key.split("/")[1])}
            self.pod_groups = {name: body for name, body in self.pod_groups.items() if pod_group(body).group_uid != uid}
        del self.children[key]

    def delete_pod(self, name: str, uid: str = "", *, force: bool = False) -> None:
        pod = self.pods.get(name)
        if pod is not None and uid in ("", pod["metadata"]["uid"]):
            if self.nodes is not None and not self.nodes.get(pod["spec"].get("nodeName", "")) and not force:
                pod["metadata"].setdefault("deletionTimestamp", _stamp(self.now + timedelta(seconds=10)))
                return  # nobody there ends it
            del self.pods[name]
            self.paused.discard(pod["metadata"]["uid"])
            self.weights.pop(pod["metadata"]["uid"], None)

    def _gate(self, name: str, routable: bool) -> None:
        if name in self.router_gates:
            self.router_gates[name] = routable
            return
        if name in self.pods:
            conditions = self.pods[name]["status"]["conditions"]
            conditions[:] = [c for c in conditions if c["type"] != "rolloutfleet.dev/Routable"]
            conditions.append({"type": "rolloutfleet.dev/Routable", "status": str(routable)})

    def _uid(self) -> str:
        self._serial += 1
        return f"uid-{self._serial}"

    # What happens by itself

    def run_pods(self) -> None:
        """Pending pods are scheduled and start; an engine loads the model's checkpoint when all its ranks run."""
        for pod in self.pods.values():
            serial, status = int(pod["metadata"]["uid"].split("-")[1]), pod["status"]
            if status["phase"] == "Pending" and self._placed(pod):
                status["phase"] = "Running"
                pod["spec"]["nodeName"] = f"node-{engine_pod(pod).index}"
                status["podIP"] = f"10.0.{serial // 250}.{serial % 250 + 1}"
                scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _stamp(self.now)}
                status["conditions"].append(scheduled)
                status["containerStatuses"] = [
                    {"name": "engine", "state": {"running": {"startedAt": _stamp(self.now)}}}
                ]
                if pod["metadata"]["labels"]["rolloutfleet.dev/role"] == "Placeholder":
                    continue
                for uid in self._ready_leaders(pod):
                    words = self._pod(uid)["spec"]["containers"][0]["args"]
                    label = words[words.index("--weight-version") + 1]
                    self.weights[uid] = (label, self.checkpoints["/models/m0"])

    def _ready_leaders(self, pod: dict[str, Any]) -> list[str]:
        """Rank 0 of the pod's engine, if this pod was the last that was missing."""
        mine = engine_pod(pod)
        life = [
            engine_pod(other)
            for other in self.pods.values()
            if other["status"]["phase"] == "Running"
            and (engine_pod(other).group_uid, engine_pod(other).index, engine_pod(other).epoch)
            == (mine.group_uid, mine.index, mine.epoch)
        ]
        return [other.uid for other in life if other.rank == 0] if len(life) == mine.nodes else []

    def crash_pod(self, name: str, *, message: str = "ValueError: boom") -> None:
        pod = self.pods[name]
        self.paused.discard(pod["metadata"]["uid"])
        self.weights.pop(pod["metadata"]["uid"], None)
        pod["status"]["phase"] = "Failed"
        pod["status"]["containerStatuses"] = [
            {"name": "engine", "state": {"terminated": {"exitCode": 137, "message": message}}}
        ]

    def start_outside(self, url: str, *, role: Role = "Regular", model: str = "/models/m0", **facts: Any) -> None:
        """Somebody starts an engine of their own."""
        shape = {"tensor_parallel": 1, "pipeline_parallel": 1, "memory_saver": False, **facts}
        known = EngineFacts.model_validate({"role": role, **shape})
        self.outside[external_uid(url)] = (known, model)
        self.weights[external_uid(url)] = ("default", self.checkpoints.get(model, "sum-other"))

    def stop_outside(self, url: str) -> None:
        self.weights.pop(external_uid(url), None)
        self.proofs.pop(external_uid(url), None)
        self.loaded.pop(external_uid(url), None)

    def url(self, uid: str) -> str:
        if is_external(uid):
            return uid.removeprefix("external:")
        for pod in self.pods.values():
            if pod["metadata"]["uid"] == uid and pod["status"].get("podIP"):
                return f"http://{pod['status']['podIP']}:30000"
        return ""

    def settle(self, *, limit: int = 60, between: Callable[[], None] = lambda: None, patient: bool = True) -> int:
        """Run plans until one asks for nothing; the number of rounds. Fails when it never ends.

        Patient: a plan that only waits for a moment gets it.
        """
        for round_number in range(limit):
            plan = self.plan()
            actions = [action for action in plan if not isinstance(action, Requeue)]
            if not actions and (not plan or not patient):
                return round_number
            self.now += timedelta(seconds=sum(a.seconds for a in plan if isinstance(a, Requeue)) if not actions else 0)
            for action in actions:
                self.perform(action)
                between()
            self.run_pods()
            self.now += timedelta(seconds=1)
        raise AssertionError(f"not settled after {limit} rounds; still asks for {actions}")

    def commit(
        self,
        version: int,
        path: str,
        checksum: str,
        *,
        outcomes: dict[str, str] | None = None,
        measured: bool = True,
    ) -> None:
        """What the agent writes when an update ends; engines are as it says."""
        self.checkpoints[path] = checksum
        verdicts = []
        for name, pod in self.pods.items():
            uid = pod["metadata"]["uid"]
            if uid not in self.weights:
                continue
            outcome = (outcomes or {}).get(name, "Committed")
            verdicts.append({"pod": name, "uid": uid, "outcome": outcome})
            if outcome == "Committed":
                self.weights[uid] = (self.label(version), checksum)
                self.paused.discard(uid)
        before = self.server.get("status", {}).get("training", {}).get("weights", {})
        self.server.setdefault("status", {})["training"] = {
            "holder": "trainer",
            "fence": 1,
            "weights": {
                "phase": "Committed",
                "version": version,
                "path": path,
                "transaction": before.get("transaction", 0) + 1,
                "checksums": [
                    {
                        "group": child["metadata"]["name"],
                        "revision": next((e["revision"] for e in child["status"]["engines"]), ""),
                        "checksum": checksum,
                    }
                    for key, child in self.children.items()
                    if key.startswith("ServerGroup/")
                ]
                if measured
                else [],
                "engines": verdicts,
            },
        }

    def begin_update(self, target: int, *, seconds: float = 60) -> None:
        weights = self.server.get("status", {}).get("training", {}).get("weights", {})
        weights = {"version": 0, "transaction": 0, **weights}
        weights |= {
            "phase": "Updating",
            "targetVersion": target,
            "transaction": weights["transaction"] + 1,
            "deadline": _stamp(self.now + timedelta(seconds=seconds)),
        }
        self.server.setdefault("status", {})["training"] = {"holder": "trainer", "fence": 1, "weights": weights}
        self.lease = LeaseView(holder="trainer", fence=1, expires_at=self.now + timedelta(seconds=15))
        self.paused |= set(self.weights)

    def engine_names(self) -> list[str]:
        return sorted(self.pods)

    def label(self, version: int) -> str:
        """What engines of this fleet call these weights."""
        return weight_label(version, fleet_id(self.server["metadata"]["uid"]))

    def listed(self) -> set[str]:
        return set.intersection(*(set(table) for table in self.tables.values())) if self.tables else set()

    def listed_by(self, router: str) -> set[str]:
        return set(self.tables[router])

    def group_status(self, group: str = "main") -> dict[str, Any]:
        status: dict[str, Any] = self.children[f"ServerGroup/qwen-{group}"].get("status", {})
        return status

    def ready(self) -> tuple[str, str]:
        condition = next(c for c in self.server["status"]["conditions"] if c["type"] == "Ready")
        return condition["status"], condition["reason"]

    def router_set(self) -> dict[str, Any]:
        (found,) = (child for key, child in self.children.items() if key.startswith("ReplicaSet/"))
        return found

    def uid(self, pod: str) -> str:
        return str(self.pods[pod]["metadata"]["uid"])

    def address(self, pod: str) -> str:
        return self.url(self.uid(pod))

    def spec(self, group: str = "main") -> dict[str, Any]:
        """The group as the user wrote it, to be changed."""
        found: dict[str, Any] = next(g for g in self.server["spec"]["groups"] if g["name"] == group)
        return found


class Crash(Exception):
    """The operator's process ends here."""


def crashed_behind_each_action(start: World, *, limit: int = 60) -> Iterator[tuple[str, World]]:
    """Worlds in which the operator died behind the k-th action of what `start` leads to, for every k, and another one
    has gone on from there; each with where it died."""
    undisturbed = copy.deepcopy(start)
    undisturbed.settle(limit=limit)
    total = undisturbed.writes - start.writes
    for k in range(1, total + 1):
        world, left = copy.deepcopy(start), k

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash

        try:
            world.settle(limit=limit, between=count)
        except Crash:
            world.proofs.clear()  # what the process knew dies with it
        world.settle(limit=limit)
        yield f"after a crash behind action {k} of {total}", world


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


__all__ = ["DEFAULTS", "World", "crashed_behind_each_action", "rollout_server"]

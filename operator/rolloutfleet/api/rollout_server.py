"""RolloutServer: one model behind one router; what a trainer refers to by name."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rolloutfleet.api.common import (
    Colocation,
    Conditions,
    DrainSeconds,
    EngineSpec,
    ExternalSpec,
    ModelSpec,
    RecoverySpec,
    RollingUpdate,
    RouterArguments,
    WeightsSpec,
)
from rolloutfleet.api.memory import TrainingMemory
from rolloutfleet.api.names import DERIVED_NAME_BUDGET, EXTERNAL_GROUP, server_group_name
from rolloutfleet.api.schema import Column, Kind, ListMap, ListSet, Model, Opaque, Resource, Rule


class RouterSpec(Model):
    """The sglang-router in front of the engines."""

    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Each replica keeps its own tables and prefix tree."""
    policy: Literal["cache_aware", "round_robin", "random", "manual"] = "cache_aware"
    """power_of_two is missing because a router with it does not start before it knows two engines."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Default: the router image that the operator was installed with."""
    args: RouterArguments = {}
    """More flags for sglang-router, without dashes."""


class GroupSpec(Model):
    """A group of equal engines; becomes a ServerGroup."""

    rules = (
        Rule("has(self.engine.image) || self.role == 'Placeholder'", "engine.image: required"),
        Rule(
            "self.role != 'Placeholder' || (!self.offload && self.engine.args.size() == 0)",
            "role Placeholder: runs no engine, so offload and engine.args mean nothing; remove them",
        ),
        Rule(
            "self.role != 'Encoder' || (!self.offload && self.engine.nodes == 1)",
            "role Encoder: SGLang's encoders run in one pod and cannot release their memory; "
            "engine.nodes must be 1 and offload false",
        ),
        Rule(
            "!has(self.colocation) || !(self.role in ['Encoder', 'Placeholder'])",
            "colocation: for engines that trade memory or weights with a trainer; roles Encoder and Placeholder do not",
        ),
        Rule(
            "!has(self.colocation) || !has(self.colocation.resourceClaim) || !has(self.replicas) || "
            "self.replicas <= 1 || self.colocation.resourceClaim.contains('{index}') || "
            "(has(self.colocation.request) && self.colocation.request.contains('{index}'))",
            "colocation.request, or resourceClaim: must contain {index} for several replicas, since all of them would "
            "take the first GPU",
        ),
        Rule(
            "!has(self.colocation) || !has(self.colocation.resourceClaim) || self.engine.nodes == 1 || "
            "self.colocation.resourceClaim.contains('{rank}')",
            "colocation.resourceClaim: must contain {rank} for an engine of several nodes, since a claim's GPUs are on "
            "one node",
        ),
        Rule(
            "!has(self.colocation) || self.rollingUpdate.maxSurge == 0",
            "rollingUpdate.maxSurge: must be 0 with colocation, since one engine more finds no GPUs of the trainer's",
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", max_length=40)]
    role: Literal["Regular", "Prefill", "Decode", "Encoder", "Placeholder"] = "Regular"
    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Engines. Left out, the ServerGroup's scale belongs to an autoscaler or `kubectl scale`; it begins with 1."""
    engine: EngineSpec
    offload: bool = False
    """Start engines with SGLang's memory saver, so that the trainer may release and resume their memory."""
    colocation: Colocation | None = None
    """Set, if only to {}: the group runs on the trainer's GPUs."""
    template: Annotated[dict[str, Any], Opaque(fields=("metadata", "spec"))] | None = None
    """Pod template (metadata, spec) laid over the operator's by strategic merge: volumes, tolerations, ..."""
    recovery: RecoverySpec = RecoverySpec()
    rolling_update: RollingUpdate = RollingUpdate()
    drain_timeout_seconds: DrainSeconds = 300
    """How long an engine that is replaced or scaled away may finish its requests; then they are aborted, and the
    agent completes them elsewhere."""


class TrainersSpec(Model):
    """Who may lead this fleet."""

    service_accounts: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]],
        Field(max_length=32),
        ListSet(),
    ] = []
    """Service accounts of this namespace. The operator gives them a Role for this one fleet."""


def _equal_in_pairs(flag: str) -> Rule:
    """SGLang's decode side refuses, or misreads, the KV cache of a prefill engine with another value."""

    def value(group: str) -> str:
        return f"('{flag}' in {group}.engine.args ? {group}.engine.args['{flag}'] : '')"

    return Rule(
        "self.groups.all(g, !(g.role in ['Prefill', 'Decode']) || self.groups.all(h, "
        f"!(h.role in ['Prefill', 'Decode']) || {value('g')} == {value('h')}))",
        f"groups: engine.args[{flag}] must be the same in all Prefill and Decode groups, since they share a KV cache",
    )


def _of_pairs(condition: str) -> str:
    """CEL: what must hold of every Prefill group `p` and every Decode group `d`."""
    return f"self.groups.all(p, p.role != 'Prefill' || self.groups.all(d, d.role != 'Decode' || ({condition})))"


_TENSOR = ("p.engine.tensorParallel", "d.engine.tensorParallel")
_SPLITS_ATTENTION = " || ".join(
    f"'{flag}' in {group}.engine.args" for group in "pd" for flag in ("dp-size", "data-parallel-size", "attn-dp-size")
)


class RolloutServerSpec(Model):
    """What is wanted."""

    rules = (
        Rule(
            "self.groups.all(g, self.groups.exists_one(h, h.name == g.name))",
            "groups: every name may be used once",
        ),
        Rule(
            "self.groups.size() > 0 || has(self.external)",
            "groups: at least one group is needed, or external.engines",
        ),
        Rule(
            f"!has(self.external) || self.groups.all(g, g.name != '{EXTERNAL_GROUP}')",
            f"groups: the name {EXTERNAL_GROUP} belongs to the engines of spec.external",
        ),
        Rule(
            "self.groups.exists(g, g.role == 'Prefill') == self.groups.exists(g, g.role == 'Decode')",
            "groups: role Prefill needs a group of role Decode, and Decode one of role Prefill",
        ),
        Rule(
            "!(self.groups.exists(g, g.role == 'Prefill') && self.groups.exists(g, g.role == 'Regular'))",
            "groups: role Regular beside Prefill and Decode would never get a request, since the router pairs; "
            "make a RolloutServer of its own for it",
        ),
        Rule(
            "!self.groups.exists(g, g.role == 'Encoder') || "
            "self.groups.exists(g, g.role == 'Regular' || g.role == 'Prefill')",
            "groups: role Encoder serves engines of a group of role Regular or Prefill, and there is none",
        ),
        Rule(
            _of_pairs(f"{_TENSOR[0]} % {_TENSOR[1]} == 0 || {_TENSOR[1]} % {_TENSOR[0]} == 0 || {_SPLITS_ATTENTION}"),
            "groups: of engine.tensorParallel in Prefill and Decode groups one must be a multiple of the other: "
            "SGLang hands the KV cache from whole ranks to whole ranks",
        ),
        Rule(
            _of_pairs("d.engine.pipelineParallel == 1 || d.engine.pipelineParallel == p.engine.pipelineParallel"),
            "groups: engine.pipelineParallel of a Decode group must be 1 or that of the Prefill groups (SGLang 0.5.23)",
        ),
        Rule(
            "!has(self.weights) || !has(self.weights.localCopy) || "
            "self.groups.all(g, g.engine.nodes == 1 || !(g.role in ['Regular', 'Prefill', 'Decode']))",
            "weights.localCopy: engines of several pods load from one path in all of them, and only rank 0's pod would "
            "have the copy; leave it out, or set engine.nodes to 1",
        ),
        Rule(
            "!has(self.weights) || !has(self.weights.localCopy) || !has(self.external)",
            "weights.localCopy: engines of spec.external have no worker of ours beside them; make two RolloutServers",
        ),
        _equal_in_pairs("page-size"),
        _equal_in_pairs("kv-cache-dtype"),
        _equal_in_pairs("disaggregation-transfer-backend"),
    )

    model: ModelSpec
    update_weights: bool = True
    """False: frozen weights (a reward or reference model); updates are refused."""
    router: RouterSpec = RouterSpec()
    groups: Annotated[list[GroupSpec], Field(max_length=16), ListMap(("name",))] = []
    external: ExternalSpec | None = None
    """Engines that somebody else runs, beside the groups or in their place."""
    weights: WeightsSpec | None = None
    """Without it weights cannot be updated, and `training` stays at version 0."""
    trainers: TrainersSpec = TrainersSpec()


Transport = Literal["", "disk", "delta", "distributed", "tensor"]


class WeightsPhase(StrEnum):
    """Where the weight update stands."""

    UPDATING = "Updating"
    COMMITTED = "Committed"


class EngineVerdict(Model):
    """What an update did to one engine."""

    pod: Annotated[str, Field(max_length=253)]
    """Pod of rank 0."""
    uid: Annotated[str, Field(max_length=64)] = ""
    """Its UID, which one life of one engine has: a ServerGroup that was made anew gives out its names again."""
    outcome: Literal["Committed", "Failed", "Unreachable"]
    """Committed: when the update ended, this engine held `version` (the old one, if the update failed), by
    checksum. Anything else: it is taken out of the routers until its weights are proved or loaded anew."""
    message: Annotated[str, Field(max_length=512)] = ""


class GroupChecksum(Model):
    """Checksum of the committed weights in one group's layout."""

    group: Annotated[str, Field(max_length=63)]
    """Name of the ServerGroup."""
    revision: Annotated[str, Field(max_length=64)]
    """Revision of the engines that were measured: another one may have another layout."""
    checksum: Annotated[str, Field(max_length=128)]


class TrainingWeights(Model):
    """The weights that the trainer wants served. Absent: version 0, from spec.model.path."""

    phase: WeightsPhase
    version: Annotated[int, Field(ge=0)]
    """The committed version: what every routable engine has."""
    path: Annotated[str, Field(max_length=1024)] = ""
    """Checkpoint of the committed version, as engines see it; empty for version 0, and where the trainer sent tensors
    and named none: engines that come back then wait for the next update."""
    transport: Transport = ""
    """How the committed version came, or while Updating the next one."""
    checksums: Annotated[tuple[GroupChecksum, ...], Field(max_length=32), ListMap(("group", "revision"))] = ()
    transaction: Annotated[int, Field(ge=0)] = 0
    """Counts updates begun, successful or not: what was known about engines' weights before is void."""
    target_version: Annotated[int, Field(ge=0)] | None = None
    """While Updating: the version that is being sent."""
    target_path: Annotated[str, Field(max_length=1024)] = ""
    deadline: Annotated[str, Field(max_length=64)] = ""
    """While Updating: RFC 3339 time after which the operator restores the fleet."""
    engines: Annotated[tuple[EngineVerdict, ...], Field(max_length=2048), ListMap(("pod",))] = ()
    """Verdicts of the last update."""


class LastUpdate(Model):
    """The weight update that ended last, committed or not."""

    version: Annotated[int, Field(ge=0)]
    """That was to be committed."""
    transport: Transport
    committed: bool
    transaction: Annotated[int, Field(ge=0)]
    finished_at: Annotated[str, Field(max_length=64)]
    seconds: Annotated[dict[str, float], Field(max_length=16)] = {}
    """By phase: pause, load, verify; paused: that engines stood still; total. Up to the commit."""
    bytes: Annotated[int, Field(ge=0)] = 0
    """Sent to each engine by the trainer; 0 where engines read a checkpoint."""
    engines: Annotated[int, Field(ge=0)]
    """That took part."""
    fell_out: Annotated[int, Field(ge=0)]
    """Of those: ended without provably holding the version that was committed, or kept."""


class TrainingStatus(Model):
    """The agent's subtree: written by the agent that holds the Lease, read by the operator."""

    rules = (
        Rule(
            "!has(oldSelf.fence) || self.fence > oldSelf.fence || (self.fence == oldSelf.fence && "
            "(!has(oldSelf.sequence) || self.sequence >= oldSelf.sequence))",
            "fence, sequence: later ones are there: another agent leads, or this is an earlier write that comes late",
        ),
    )

    holder: Annotated[str, Field(max_length=253)] = ""
    """Pod that leads the fleet."""
    fence: Annotated[int, Field(ge=0)] = 0
    """Number of the leader's term, by the Lease, when this was written; a smaller one is a late writer."""
    sequence: Annotated[int, Field(ge=0)] = 0
    """Number of the write within the term; a smaller one is a late write of the same writer."""
    weights: TrainingWeights | None = None
    last_update: LastUpdate | None = None
    memory: TrainingMemory | None = None


class GroupSummary(Model):
    """One group in figures."""

    name: Annotated[str, Field(max_length=63)]
    replicas: int = 0
    ready: int = 0
    routable: int = 0


class EngineCounts(Model):
    """All engines in figures."""

    desired: int = 0
    ready: int = 0
    """Answering."""
    routable: int = 0
    stale: int = 0
    """Answering with weights that are not (known to be) the fleet's."""
    failed: int = 0


class RouterStatus(Model):
    """Where requests go."""

    url: Annotated[str, Field(max_length=512)] = ""
    replicas: int = 0
    ready: int = 0
    """Replicas whose worker table is complete."""


class WeightsStatus(Model):
    """Which weights serve."""

    version: Annotated[int, Field(ge=0)] | None = None
    """The committed version."""
    path: Annotated[str, Field(max_length=1024)] = ""
    skew: Annotated[int, Field(ge=0)] = 0
    """How many versions the engine that is furthest behind is behind, of those that answer; by their labels."""


class RolloutServerStatus(Model):
    """What is observed. Every field but `training` is the operator's."""

    observed_generation: int = 0
    conditions: Conditions = ()
    router: RouterStatus | None = None
    groups: Annotated[tuple[GroupSummary, ...], Field(max_length=17)] = ()
    engines: EngineCounts | None = None
    weights: WeightsStatus | None = None
    training: TrainingStatus | None = None


class RolloutServer(Resource):
    """One model behind one router, served by groups of SGLang engines; what a trainer refers to by name."""

    rules = (
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name: letters, digits and '-', beginning with a letter, since Services are named after it",
        ),
        Rule(
            "self.metadata.name.size() <= 40",
            "metadata.name: at most 40 characters, so that the names of router pods derived from it fit",
        ),
        Rule(
            f"self.spec.groups.all(g, self.metadata.name.size() + 1 + g.name.size() <= {DERIVED_NAME_BUDGET})",
            f"spec.groups[].name: NAME-GROUP may have at most {DERIVED_NAME_BUDGET} characters, so that the pod "
            "names derived from it (NAME-GROUP-INDEX-eEPOCH-rRANK) fit 63",
        ),
        Rule(
            f"!has(self.spec.external) || self.metadata.name.size() + {1 + len(EXTERNAL_GROUP)} "
            f"<= {DERIVED_NAME_BUDGET}",
            f"metadata.name: with spec.external at most {DERIVED_NAME_BUDGET - 1 - len(EXTERNAL_GROUP)} characters, "
            f"since NAME-{EXTERNAL_GROUP} may have {DERIVED_NAME_BUDGET}",
        ),
    )
    kind_info: ClassVar[Kind] = Kind(
        name="RolloutServer",
        plural="rolloutservers",
        singular="rolloutserver",
        short_names=("ros",),
        columns=(
            Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
            Column("Engines", ".status.engines.desired", type="integer"),
            Column("Routable", ".status.engines.routable", type="integer"),
            Column("Weights", ".status.weights.version", type="integer"),
            Column("Skew", ".status.weights.skew", type="integer"),
            Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
            Column("Trainer", ".status.training.holder", priority=1),
            Column("Router", ".status.router.url", priority=1),
            Column("Message", '.status.conditions[?(@.type=="Ready")].message', priority=1),
            Column("Age", ".metadata.creationTimestamp", type="date"),
        ),
    )

    spec: RolloutServerSpec
    status: RolloutServerStatus = RolloutServerStatus()

    @property
    def server_groups(self) -> list[str]:
        """Names of the ServerGroups that belong to it."""
        names = [group.name for group in self.spec.groups] + ([EXTERNAL_GROUP] if self.spec.external else [])
        return [server_group_name(self.name, name) for name in names]

"""What can be known of an update before anything is paused: who may send it, which version it is, and whether its
tensors are those of the served model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from rolloutfleet.agent.errors import AgentError, conflict, invalid
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.volume import unreadable
from rolloutfleet.api.agent import TensorMeta, UpdateOptions
from rolloutfleet.api.rollout_server import Transport
from rolloutfleet.engine.checkpoint import (
    Checkpoint,
    Quantization,
    differences,
    missing,
    quantization,
    read_checkpoint,
    unfit,
)
from rolloutfleet.engine.errors import CheckpointError
from rolloutfleet.engine.versions import is_delta

logger = logging.getLogger(__name__)

DIFFERENCES_SHOWN = 5
DIFFERENCES_TOLD = 100
QUANTISING_FLAGS = ("quantization", "torchao-config")
RELOADABLE = Quantization("fp8", by_blocks=True)
MOVING_NAMES = frozenset({"latest", "newest", "current", "last"})
ONE_FOLDER = "write each version into a folder of its own, named when it is complete, and never change it"


def target_version(fleet: Fleet, options: UpdateOptions) -> int:
    """Raises AgentError when the fleet's weights may not be changed, or not to this version."""
    server = fleet.connected()
    if not server.spec.update_weights:
        raise conflict("Frozen", f"RolloutServer {server.name} has updateWeights: false; its weights never change")
    committed = fleet.committed_version
    target = options.version if options.version is not None else committed + 1
    if target <= committed and not options.rollback:
        raise conflict(
            "VersionNotNewer",
            f"version {target} is not newer than the committed version {committed}; the next one is {committed + 1}, "
            "and rollback=True goes back on purpose",
        )
    memory = fleet.training.memory
    if memory is not None and "weights" in memory.tags:
        raise conflict("WeightsReleased", "the engines' weights are offloaded: onload the tag weights first")
    return target


def refuse_layouts(fleet: Fleet, transport: Transport) -> None:
    """Raises AgentError for engines that cannot take weights this way."""
    _refuse_not_reloadable(fleet)
    if transport not in ("distributed", "tensor"):
        return
    for group, engine in fleet.trained_engines():
        shape = engine.facts or group.spec.engine
        if shape is not None and shape.pipeline_parallel > 1:
            raise conflict(
                "UnsupportedLayout",
                f"{group.name} has {shape.pipeline_parallel} pipeline stages, and SGLang takes tensors from a "
                "trainer into one only; update it from disk",
            )
        if transport == "tensor" and group.spec.engine is not None and group.spec.engine.nodes > 1:
            raise conflict(
                "UnsupportedLayout",
                f"an engine of {group.name} spans {group.spec.engine.nodes} pods, which share no memory with one "
                "trainer; use the distributed transport or disk",
            )


def _refuse_not_reloadable(fleet: Fleet) -> None:
    """Raises AgentError for engines that make something else of a checkpoint while they load it.

    FP8 by tensor ended the scheduler (run once, 0.5.16, from disk): SGLang transposes such weights and drops their
    loaders. FP8 by blocks was right by each transport (docs/guides/weight-updates-gpu.md). Of other kinds none has run:
    they are refused until one has. That is stricter than it need be: 0.5.23 can restore some of them before it loads
    (restore_weights_before_loading, of compressed-tensors' WNA16 experts).
    """
    try:
        served = quantization(Path(fleet.connected().spec.model.path))
    except (CheckpointError, OSError):
        served = None  # the engines' alone to read
    for group in fleet.groups:
        args = group.spec.engine.args if group.spec.engine is not None else {}
        if args.get("load-format") == "flash_rl":  # which is made for it
            continue
        flag = next((flag for flag in QUANTISING_FLAGS if flag in args), None)
        if flag is not None and not (flag == "quantization" and served):  # which says what the checkpoint says itself
            raise conflict(
                "NotReloadable",
                f"{group.name} has engine.args.{flag}: {args[flag]}: SGLang quantises while it loads, and cannot load "
                f"again; serve a checkpoint that is quantised itself ({RELOADABLE}, without this argument), or set "
                "engine.args.load-format: flash_rl",
            )
        _refuse_quantised(f"{group.name} serves {fleet.connected().spec.model.path}", served)


def _refuse_quantised(what: str, quantized: Quantization | None) -> None:
    if quantized not in (None, RELOADABLE):
        raise conflict(
            "NotReloadable",
            f"{what}, which is quantised ({quantized}): not known to be loaded again by SGLang, whose scheduler "
            f"may end; serve one that is not quantised, or is {RELOADABLE} (config.json: weight_block_size)",
        )


def checkpoint_folder(fleet: Fleet, path: str) -> Path:
    """Raises AgentError unless `path` is a folder of the volume that engines see, by a name that is meant to stay.

    Engines read it now, and those that come back later read it again: what it names must never change.
    """
    server = fleet.connected()
    if server.spec.weights is None:
        raise conflict("NoWeightsVolume", f"RolloutServer {server.name} has no spec.weights: engines see no checkpoint")
    mount = PurePosixPath(server.spec.weights.mount_path)
    folder = PurePosixPath(path)
    if ".." in folder.parts or not folder.is_relative_to(mount) or folder == mount:
        raise invalid("PathOutsideVolume", f"path {path}: must be a folder below {mount}")
    if folder.name.lower() in MOVING_NAMES:
        raise invalid("MutablePath", f"path {path}: a name for whatever is newest; {ONE_FOLDER}")
    link = next((part for part in (folder, *folder.parents) if part != mount and Path(part).is_symlink()), None)
    if link is not None and link.is_relative_to(mount):
        raise invalid("MutablePath", f"path {path}: {link} is a symbolic link; {ONE_FOLDER}")
    return Path(folder)


def compare_checkpoint(fleet: Fleet, path: Path) -> bool:
    """True if the checkpoint has the served model's tensors, False if nobody here can compare it.

    Raises AgentError when it has others.
    """
    spec = fleet.connected().spec.weights
    mount = Path(spec.mount_path) if spec is not None else None
    if mount is None or not mount.is_dir():
        logger.warning("%s is not mounted in the agent: the checkpoint cannot be checked before the pause", mount)
        return False
    try:
        if is_delta(path) and (spec is None or spec.local_copy is None):
            raise conflict("NoLocalCopy", f"path {path}: a delta, which needs spec.weights.localCopy in {fleet.name}")
        new = read_checkpoint(path)
        quantized = quantization(path)
    except (CheckpointError, OSError) as error:
        raise unreadable(str(path), error) from error
    _refuse_quantised(f"path {path}", quantized)
    reference = served_checkpoint(fleet)
    if reference is None:
        return False
    _refuse(f"path {path}", reference, differences(reference, new))
    return True


def compare_tensors(reference: Checkpoint | None, tensors: Iterable[TensorMeta]) -> None:
    """Raises AgentError for a tensor that the served model does not have in this shape."""
    if reference is not None:
        _refuse("tensors", reference, unfit(reference, {entry.name: tuple(entry.shape) for entry in tensors}))


def compare_whole(reference: Checkpoint | None, sent: Collection[str]) -> None:
    """Raises AgentError unless every tensor of the served model is among them."""
    if reference is not None:
        _refuse("tensors", reference, missing(reference, sent))


def served_checkpoint(fleet: Fleet) -> Checkpoint | None:
    """The checkpoint that the engines hold or held, if this container sees one."""
    weights = fleet.training.weights
    for path in (weights.path if weights else "", fleet.connected().spec.model.path):
        try:
            if path:
                return read_checkpoint(Path(path))
        except (CheckpointError, OSError):
            continue
    return None


def _refuse(what: str, reference: Checkpoint, wrong: list[str]) -> None:
    if wrong:
        raise AgentError(
            "BadCheckpoint",
            f"{what}: differs from the served model {reference.path} in {len(wrong)} tensors: "
            f"{'; '.join(wrong[:DIFFERENCES_SHOWN])}",
            status=422,
            details=wrong[:DIFFERENCES_TOLD],
        )

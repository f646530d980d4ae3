"""Why a pod does not run: one reason a cause, naming the pod and what is missing.

Reasons keep the words of Kubernetes where it has one, since those are what an SRE searches for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutfleet.api.names import ENGINE_CONTAINER

MESSAGE_LIMIT = 400
"""Characters of a message that status keeps."""
LOG_LIMIT = 1024
"""Characters of a dead engine's log that status keeps."""


@dataclass(frozen=True)
class Trouble:
    """What keeps a pod from running. `ended`: this pod will not run again; otherwise it heals by itself."""

    reason: str
    message: str
    ended: bool = False
    log: str = ""
    """The end of what the container wrote."""


_WAITING_REASONS = {"ErrImagePull": "ImagePullBackOff"}  # the kubelet alternates between the two
_HARMLESS_WAITING = frozenset({"ContainerCreating", "PodInitializing", ""})
_EXCEPTION_LINE = re.compile(r"^(?:\[[^]]*\]\s*)?(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_PARSER_LINE = re.compile(r"^.*: error: .*")
_EXIT_LIKE = re.compile(r"^(?:Systemd|System)?Exit\b")


def pod_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """The cause that explains this pod best, or None while it does what it should."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded"):
        return _ended(status)
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Trouble(condition.get("reason") or "Unschedulable", shorten(condition.get("message") or ""))
    containers = status.get("containerStatuses") or []
    if not any(c["name"] == ENGINE_CONTAINER and (c.get("state") or {}).get("running") for c in containers):
        # While the engine runs, what its sidecars do is no trouble of its own.
        containers = (status.get("initContainerStatuses") or []) + containers
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason", "") not in _HARMLESS_WAITING:
            reason = _WAITING_REASONS.get(waiting["reason"], waiting["reason"])
            detail = waiting.get("message") or "no message"
            return Trouble(reason, shorten(f"container {container['name']}: {detail}"))
    for container in containers:
        terminated = (container.get("state") or {}).get("terminated")
        if terminated and container["name"] == ENGINE_CONTAINER:
            return _terminated(terminated)
    return None


def disruption(pod: Mapping[str, Any]) -> Trouble | None:
    """Who ends this pod although it did nothing wrong: an eviction, a preemption, a lost node (KEP-3329)."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return Trouble(condition.get("reason") or "Disrupted", shorten(condition.get("message") or ""), ended=True)
    return None


_REFUSALS = (
    ("no PriorityClass", "PriorityClassNotFound"),
    ("service account", "ServiceAccountNotFound"),
    ("exceeded quota", "QuotaExceeded"),
    ("violates PodSecurity", "PodSecurityViolation"),
)


def refusal(reason: str, message: str) -> Trouble:
    """Why the API server takes no pod: its own reason says only Forbidden or Invalid, its message names the cause."""
    for words, cause in _REFUSALS:
        if words in message:
            return Trouble(cause, shorten(message))
    return Trouble(f"Pod{reason or 'Refused'}", shorten(message))


def _ended(status: Mapping[str, Any]) -> Trouble:
    if status.get("reason"):  # Evicted, NodeLost, Preempting, UnexpectedAdmissionError, ...
        return Trouble(status["reason"], shorten(status.get("message") or ""), ended=True)
    containers = (status.get("containerStatuses") or []) + (status.get("initContainerStatuses") or [])
    ended = [(c, c["state"]["terminated"]) for c in containers if (c.get("state") or {}).get("terminated")]
    for container, terminated in ended:
        if container["name"] == ENGINE_CONTAINER:
            return _terminated(terminated)
    for container, terminated in ended:
        if terminated.get("exitCode"):
            trouble = _terminated(terminated)
            return Trouble(trouble.reason, shorten(f"container {container['name']}: {trouble.message}"), ended=True)
    return Trouble("EngineExited", "the pod ended and no container status tells why", ended=True)


def _terminated(terminated: Mapping[str, Any]) -> Trouble:
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        log = (terminated.get("message") or "")[-LOG_LIMIT:]
        return Trouble("OOMKilled", f"killed for memory (exit code {code})", ended=True, log=log)
    if terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        return Trouble(terminated["reason"], shorten(terminated.get("message") or ""), ended=True)
    log = terminated.get("message") or ""
    cause = cause_in_log(log)
    text = f"exit code {code}" + (f": {cause}" if cause else "")
    return Trouble("EngineExited", shorten(text), ended=True, log=log[-LOG_LIMIT:])


def cause_in_log(tail: str) -> str:
    """The line of a log's tail that names the cause: the argument parser's or the first exception's, else the last.

    The first exception is the cause; those printed after it (`During handling of...`, broken pipes of sibling
    processes) are its consequences.
    """
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    for pattern in (_PARSER_LINE, _EXCEPTION_LINE):
        for line in lines:
            if pattern.match(line) and not _EXIT_LIKE.match(line):
                return line
    return lines[-1] if lines else ""


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"

"""One reason a cause, with the line that names it."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.plan.failures import MESSAGE_LIMIT, cause_in_log, pod_trouble, refusal


def pod(phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str = "because") -> list[dict[str, Any]]:
    return [{"name": "engine", "state": {"waiting": {"reason": reason, "message": message}}}]


def terminated(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "engine", "state": {"terminated": state}}]


@pytest.mark.parametrize(
    ("observed", "reason", "ended"),
    [
        (pod(containerStatuses=waiting("ErrImagePull")), "ImagePullBackOff", False),
        (pod(containerStatuses=waiting("ImagePullBackOff")), "ImagePullBackOff", False),
        (pod(containerStatuses=waiting("CreateContainerConfigError")), "CreateContainerConfigError", False),
        (
            pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2"}]),
            "Unschedulable",
            False,
        ),
        (pod("Failed", reason="Evicted", message="disk"), "Evicted", True),
        (pod("Failed", containerStatuses=terminated(exitCode=137, reason="OOMKilled")), "OOMKilled", True),
        (pod("Failed", containerStatuses=terminated(exitCode=1, message="ValueError: x")), "EngineExited", True),
        (pod("Succeeded", containerStatuses=terminated(exitCode=0)), "EngineExited", True),
        (pod("Running", containerStatuses=terminated(exitCode=1)), "EngineExited", True),
        (
            pod("Failed", containerStatuses=terminated(exitCode=128, reason="StartError", message="exec")),
            "StartError",
            True,
        ),
    ],
)
def test_each_cause_has_its_reason(observed: dict[str, Any], reason: str, ended: bool) -> None:
    trouble = pod_trouble(observed)
    assert trouble is not None
    assert (trouble.reason, trouble.ended) == (reason, ended)


def test_a_pod_on_its_normal_way_has_no_trouble() -> None:
    assert pod_trouble(pod(containerStatuses=waiting("ContainerCreating"))) is None
    assert pod_trouble(pod("Running", containerStatuses=[{"name": "engine", "state": {"running": {}}}])) is None


def test_the_argument_parsers_line_is_the_cause() -> None:
    log = "usage: launch_server.py [-h]\nlaunch_server.py: error: argument --attention-backend: invalid choice: 'x'\n"
    assert cause_in_log(log).endswith("invalid choice: 'x'")


def test_the_first_exception_is_the_cause_and_not_those_that_follow_from_it() -> None:
    log = (
        "Traceback (most recent call last):\n  File 'a', line 1\nOSError: /models/none is not a folder\n"
        "During handling of the above exception, another exception occurred:\nBrokenPipeError: gone\nkilled\n"
    )
    assert cause_in_log(log) == "OSError: /models/none is not a folder"


def test_a_log_without_exception_gives_its_last_line_and_messages_stay_short() -> None:
    assert cause_in_log("a\nb\n\n") == "b"
    trouble = pod_trouble(pod("Failed", containerStatuses=terminated(exitCode=1, message="ValueError: " + "x" * 9000)))
    assert trouble is not None
    assert len(trouble.message) <= MESSAGE_LIMIT


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "p" is forbidden: no PriorityClass with name none was found', "PriorityClassNotFound"),
        ('pods "p" is forbidden: error looking up service account ns/none', "ServiceAccountNotFound"),
        ('pods "p" is forbidden: exceeded quota: gpus', "QuotaExceeded"),
        ('pods "p" is forbidden: violates PodSecurity "restricted:latest"', "PodSecurityViolation"),
        ('pods "p" is forbidden: something else', "PodForbidden"),
    ],
)
def test_a_refusal_of_the_api_server_is_told_by_its_cause(message: str, reason: str) -> None:
    assert refusal("Forbidden", message).reason == reason

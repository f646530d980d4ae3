"""A blocking client of the agent in the same pod.

FleetError
├── AgentUnreachable   no agent answers: is the pod annotated, and the agent's container up?
├── NotReady           the fleet does not serve (yet): missing, starting, led by another trainer's agent
└── Refused            the agent refused the request or could not do it; `code` and `details` say why
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rolloutfleet.api.agent import (
    ErrorAnswer,
    FleetView,
    Generate,
    Generated,
    MemoryRequest,
    MemoryResult,
    MemoryTag,
    SamplingParams,
    UpdateResult,
    UpdateWeights,
)
from rolloutfleet.api.names import AGENT_PORT
from rolloutfleet.api.samples import SampleGroup

URL_VARIABLE = "ROLLOUTFLEET_AGENT_URL"
CALL_SECONDS = 30.0
DETAILS_SHOWN = 3
"""Causes of a refusal, for example an engine each, that its text names; `details` has them all."""
GRACE_SECONDS = 90.0
"""What an operation may take beyond its own time-out: the agent always ends it by resuming the fleet."""
LONG_POLL_SECONDS = 20.0

Answer = TypeVar("Answer", bound=BaseModel)


class FleetError(Exception):
    def __init__(self, message: str, *, code: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.details = list(details)


class AgentUnreachable(FleetError):
    pass


class NotReady(FleetError):
    pass


class Refused(FleetError):
    pass


@contextmanager
def _bad_request_refused() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise Refused(str(error), code="BadRequest") from error


def connect(role: str = "actor", *, url: str | None = None) -> Fleet:
    """The fleet that the pod's annotation names for `role`. Nothing is asked yet: see `Fleet.wait_ready`."""
    return Fleet(role, url=url or os.environ.get(URL_VARIABLE) or f"http://127.0.0.1:{AGENT_PORT}")


class Fleet:
    """One RolloutServer. Not for several threads at once, but any process of the pod may have one."""

    def __init__(self, role: str, *, url: str) -> None:
        self.role = role
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=CALL_SECONDS)

    def close(self) -> None:
        self._http.close()

    def view(self) -> FleetView:
        """Which engines there are, where they stand, which weights are committed, who leads."""
        return self._call("GET", f"/v1/servers/{self.role}", FleetView)

    @property
    def weight_version(self) -> int:
        """The committed version."""
        version = self.view().weight_version
        if version is None:
            raise NotReady(f"{self.role}: the RolloutServer is not there yet", code="NotReady")
        return version

    def wait_ready(self, *, engines: int = 1, timeout: float = 1800.0) -> FleetView:
        """Until `engines` engines serve and this pod leads the fleet; `timeout` in seconds. Raises NotReady."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            wait = min(left, LONG_POLL_SECONDS)
            path = f"/v1/servers/{self.role}/ready?routable={engines}&timeout={wait:.1f}"
            try:
                return self._call("GET", path, FleetView, seconds=wait + CALL_SECONDS)
            except (NotReady, AgentUnreachable):
                if left <= wait:
                    raise

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int = 1, timeout: float = 600.0, **sampling: Any
    ) -> list[SampleGroup]:
        """`n` samples of each prompt (token ids), in the order of the prompts.

        `sampling`: fields of SamplingParams, for example temperature, max_new_tokens. Samples that could not be
        finished within `timeout` seconds have status aborted, those that an engine refused have status failed.
        """
        with _bad_request_refused():
            request = Generate(
                prompts=[list(prompt) for prompt in prompts],
                n=n,
                sampling_params=SamplingParams.model_validate(sampling),
                timeout_seconds=timeout,
            )
        path = f"/v1/servers/{self.role}/generate"
        return self._call("POST", path, Generated, body=request, seconds=timeout + GRACE_SECONDS).groups

    def update_weights(
        self, path: str | os.PathLike[str], *, version: int | None = None, timeout: float = 300.0
    ) -> UpdateResult:
        """Load a checkpoint into every engine and commit it as `version` (default: the next one).

        When this returns, every engine that answers requests has these weights; engines that fell out are named in
        the result and brought up to date by the operator. Raises Refused: then the old version still serves.
        """
        with _bad_request_refused():
            request = UpdateWeights(path=os.fspath(path), version=version, timeout_seconds=timeout)
        address = f"/v1/servers/{self.role}/update-weights"
        return self._call("POST", address, UpdateResult, body=request, seconds=timeout + GRACE_SECONDS)

    def offload(self, *tags: MemoryTag, timeout: float = 120.0) -> MemoryResult:
        """Release engine memory (default: all of it). Running requests are aborted; generation waits for onload."""
        return self._memory("offload", tags, timeout)

    def onload(self, *tags: MemoryTag, timeout: float = 120.0) -> MemoryResult:
        """Resume what was released (default: all). Weights come back empty: update them before the last tag."""
        return self._memory("onload", tags, timeout)

    def _memory(self, verb: str, tags: Sequence[MemoryTag], timeout: float) -> MemoryResult:
        named = {"tags": list(tags)} if tags else {}
        with _bad_request_refused():
            request = MemoryRequest.model_validate({**named, "timeout_seconds": timeout})
        path = f"/v1/servers/{self.role}/{verb}"
        return self._call("POST", path, MemoryResult, body=request, seconds=timeout + GRACE_SECONDS)

    def _call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: BaseModel | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Answer:
        content = body.model_dump_json(exclude_none=True) if body is not None else None
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            response = self._http.request(
                method, path, content=content, headers=headers, timeout=httpx.Timeout(seconds, connect=5.0)
            )
        except httpx.HTTPError as error:
            raise AgentUnreachable(
                f"{method} {self._http.base_url}{path}: {type(error).__name__} {error}; is the pod annotated with "
                "rolloutfleet.dev/rollout-servers, and its container rolloutfleet-agent up?",
                code="AgentUnreachable",
            ) from error
        if response.is_success:
            try:
                return answer.model_validate_json(response.content)
            except ValidationError as error:
                raise Refused(f"{method} {path}: not the agent's answer: {error}", code="Http") from error
        try:
            told = ErrorAnswer.model_validate_json(response.content).error
        except ValidationError:
            raise Refused(f"{method} {path}: {response.status_code} {response.text[:300]}", code="Http") from None
        kind = NotReady if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else Refused
        causes = "".join(f"\n  {detail}" for detail in told.details[:DETAILS_SHOWN])
        raise kind(f"{told.code}: {told.message}{causes}", code=told.code, details=told.details)

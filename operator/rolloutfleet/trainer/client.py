"""A blocking client of the agent in the same pod."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from typing_extensions import Unpack

from rolloutfleet.api.agent import (
    ErrorAnswer,
    FleetView,
    Generate,
    Generated,
    MemoryRequest,
    MemoryResult,
    MemoryTag,
    PauseMode,
    SamplingParams,
    UpdateResult,
    UpdateWeights,
)
from rolloutfleet.api.collection import Collection, Evaluate, Evaluated
from rolloutfleet.api.names import AGENT_PORT
from rolloutfleet.api.samples import SampleGroup
from rolloutfleet.api.samples_view import SamplesView
from rolloutfleet.trainer.collecting import SampleCollection
from rolloutfleet.trainer.errors import AgentUnreachable, NotReady, Refused
from rolloutfleet.trainer.sending import Senders, SendingOptions, send
from rolloutfleet.trainer.tensors import Tensors

URL_VARIABLE = "ROLLOUTFLEET_AGENT_URL"
CALL_SECONDS = 30.0
DETAILS_SHOWN = 3
"""Causes of a refusal, for example an engine each, that its text names; `details` has them all."""
GRACE_SECONDS = 90.0
"""What an operation may take beyond its own time-out: the agent always ends it by resuming the fleet."""
LONG_POLL_SECONDS = 20.0

Answer = TypeVar("Answer", bound=BaseModel)


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
        self._senders = Senders()

    def close(self) -> None:
        self._senders.close()
        self._http.close()

    def view(self) -> FleetView:
        """Which engines there are, where they stand, which weights are committed, who leads."""
        return self.call("GET", "", FleetView)

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
            path = f"ready?routable={engines}&timeout={wait:.1f}"
            try:
                return self.call("GET", path, FleetView, seconds=wait + CALL_SECONDS)
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
        return self.call("POST", "generate", Generated, body=request, seconds=timeout + GRACE_SECONDS).groups

    def collect(self, *, trainer: str | None = None, **fields: Any) -> SampleCollection:
        """Have samples collected for a training run: `fields` are those of rolloutfleet.api.collection.Collection.

        `trainer`: name of this life of the trainer, the same in all of its processes and in no other life. Default: a
        new one, for a trainer of one process. Raises Refused: then nothing is collected.
        """
        with _bad_request_refused():
            asked = Collection.model_validate({"trainer": trainer or uuid.uuid4().hex, **fields})
        collection = SampleCollection(self, asked)
        collection.begin()
        return collection

    def evaluate(self, *, timeout: float = 3600.0, **fields: Any) -> Evaluated:
        """Sample a data set once: `fields` are those of rolloutfleet.api.collection.Evaluate."""
        with _bad_request_refused():
            asked = Evaluate.model_validate({"timeout_seconds": timeout, **fields})
        return self.call("POST", "collection/evaluate", Evaluated, body=asked, seconds=timeout + GRACE_SECONDS)

    def update_weights(
        self,
        weights: str | os.PathLike[str] | Tensors,
        *,
        version: int | None = None,
        rollback: bool = False,
        pause_mode: PauseMode = "Retract",
        timeout: float = 300.0,
        **sending: Unpack[SendingOptions],
    ) -> UpdateResult:
        """Give every engine these weights and commit them as `version` (default: the next one).

        `weights`: a checkpoint's folder that engines see, or tensors that are sent from here (trainer/sending.py has
        the options, for example transport="distributed").

        When this returns, every engine that answers requests has these weights; engines that fell out are named in
        the result and brought up to date by the operator. Raises Refused: then the old version still serves.
        """
        options = {"version": version, "rollback": rollback, "pause_mode": pause_mode, "timeout_seconds": timeout}
        if not isinstance(weights, str | os.PathLike):
            return send(self, self._senders, weights, options, sending)
        if sending:
            raise Refused(f"{', '.join(sending)}: only for tensors, and weights is a path", code="BadRequest")
        with _bad_request_refused():
            request = UpdateWeights.model_validate({**options, "path": os.fspath(weights)})
        return self.call("POST", "update-weights", UpdateResult, body=request, seconds=timeout + GRACE_SECONDS)

    def observed(self, *, samples: int = 0) -> SamplesView:
        """What the agent's page shows: rewards by step, throughput, staleness, drops; and of the samples that ended
        last as many as asked for."""
        return self.call("GET", f"samples.json?limit={samples}", SamplesView)

    @contextmanager
    def offloaded(self, *tags: MemoryTag, timeout: float = 120.0) -> Iterator[MemoryResult]:
        """Engine memory is the trainer's inside of the block, and is given back when it ends, however it ends."""
        released = self.offload(*tags, timeout=timeout)
        try:
            yield released
        finally:
            self.onload(*tags, timeout=timeout)

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
        return self.call("POST", verb, MemoryResult, body=request, seconds=timeout + GRACE_SECONDS)

    def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: BaseModel | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Answer:
        """One request of the agent about this fleet; `path` below /v1/servers/ROLE. From any thread."""
        content = self.ask(method, path, body=body, seconds=seconds)
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise Refused(f"{method} {path}: not the agent's answer: {error}", code="Http") from error

    def ask(self, method: str, path: str, *, body: BaseModel | None = None, seconds: float = CALL_SECONDS) -> bytes:
        """As `call`, with the answer as it comes."""
        path = f"/v1/servers/{self.role}/{path}".rstrip("/")
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
            return response.content
        try:
            told = ErrorAnswer.model_validate_json(response.content).error
        except ValidationError:
            raise Refused(f"{method} {path}: {response.status_code} {response.text[:300]}", code="Http") from None
        kind = NotReady if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else Refused
        causes = "".join(f"\n  {detail}" for detail in told.details[:DETAILS_SHOWN])
        raise kind(f"{told.code}: {told.message}{causes}", code=told.code, details=told.details)

"""A judge behind HTTP, asked as slime's `remote_rm` asks: POST {prompt, response, label}, answered by the reward."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

import aiohttp

from rolloutfleet.agent.plugins.errors import PluginError, PluginRaised, PluginTimeout, WrongAnswer
from rolloutfleet.agent.plugins.kinds import Kind, checked
from rolloutfleet.api.samples import Sample
from rolloutfleet.engine.http import CONNECT_SECONDS, Http

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.2, 10.0
TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class RemoteReward:
    def __init__(self, url: str, *, http: Http, timeout_seconds: float = 60.0, at_once: int = 64) -> None:
        """`timeout_seconds`: for all attempts at one sample, without the wait for one of the `at_once` places."""
        self._url, self._http, self._seconds = url, http, timeout_seconds
        self._places = asyncio.Semaphore(at_once)

    async def __call__(self, sample: Sample) -> float | dict[str, float]:
        """Tokens and metadata are sent too, for judges that want them. Raises PluginError."""
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
            "prompt_tokens": sample.prompt_tokens,
            "response_tokens": sample.response_tokens,
        }
        async with self._places:
            deadline, pause = time.monotonic() + self._seconds, FIRST_PAUSE_SECONDS
            why: PluginError | None = None
            while (left := deadline - time.monotonic()) > 0:
                try:
                    return await self._once(body, sample, left)
                except _TryAgain as again:
                    if why is None or time.monotonic() < deadline:  # an attempt that was cut short says less
                        why = PluginTimeout(f"{self._url}: no reward in {self._seconds:g} s; {again}")
                await asyncio.sleep(min(pause * random.uniform(0.5, 1), max(deadline - time.monotonic(), 0)))  # noqa: S311
                pause = min(pause * 2, LAST_PAUSE_SECONDS)
            raise why or PluginTimeout(f"{self._url}: no answer in {self._seconds:g} s")

    async def _once(self, body: Mapping[str, object], sample: Sample, seconds: float) -> float | dict[str, float]:
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        try:
            answer = await self._http.ask("POST", self._url, body=body, timeout=limit, headers=None)
        except (aiohttp.ClientError, OSError) as error:  # aiohttp's time-outs are among them
            raise _TryAgain(f"{type(error).__name__} {error}".rstrip()) from error
        except ValueError as error:
            raise PluginRaised(f"{self._url}: {error}") from error
        if answer.status in TRY_AGAIN:
            raise _TryAgain(f"{answer.status} {answer.text[:200]}")
        if answer.status >= 300:
            raise PluginRaised(f"{self._url}: {answer.status} {answer.text[:500]}")
        try:
            reward: float | dict[str, float] = checked(Kind.REWARD, answer.json(), [sample])
        except WrongAnswer as wrong:
            raise WrongAnswer(f"{self._url}: {wrong.message}") from wrong
        return reward


class _TryAgain(Exception):
    pass

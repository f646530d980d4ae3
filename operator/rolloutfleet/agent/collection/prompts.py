"""From claimed numbers to samples that can be begun: the row of the data set, its tokens, and what is kept of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolloutfleet.agent.collection.judging import Judge
from rolloutfleet.agent.data.source import Prompts
from rolloutfleet.agent.store.ledger import Claim, PromptId
from rolloutfleet.api.data import Prompt
from rolloutfleet.api.samples import Sample

TOO_LONG = "prompt_too_long"


@dataclass(frozen=True)
class Work:
    claim: Claim
    prompt: Prompt
    samples: list[Sample]
    dropped: str = ""
    """Why nothing is to be made of it."""


class WorkSource:
    def __init__(self, prompts: Prompts, *, judge: Judge, n: int, max_prompt_tokens: int | None) -> None:
        self._prompts, self._judge, self._n, self._most = prompts, judge, n, max_prompt_tokens

    async def work(self, claims: Sequence[Claim], kept: Mapping[PromptId, Sequence[Sample]]) -> list[Work]:
        """Raises DataError, PluginError, AgentError."""
        rows = await asyncio.to_thread(lambda: [self._prompts.get(*claim.id) for claim in claims])
        tokens = await self._tokens(rows)
        return [
            self._work(claim, row, ids, kept.get(claim.id, ()))
            for claim, row, ids in zip(claims, rows, tokens, strict=True)
        ]

    async def _tokens(self, rows: Sequence[Prompt]) -> list[list[int]]:
        texts = [row.prompt for row in rows if not _is_tokens(row)]
        made = iter(await self._judge.tokenize(texts) if texts else [])
        return [[int(token) for token in row.prompt] if _is_tokens(row) else next(made) for row in rows]  # type: ignore[arg-type]

    def _work(self, claim: Claim, row: Prompt, tokens: list[int], kept: Sequence[Sample]) -> Work:
        if self._most is not None and len(tokens) > self._most:
            return Work(claim, row, [], dropped=TOO_LONG)
        found = {sample.index: sample for sample in kept if sample.rollout_id is None}
        samples = [found.get(index) or self._fresh(claim.id, row, tokens, index) for index in range(self._n)]
        return Work(claim, row, samples)

    def _fresh(self, id: PromptId, row: Prompt, tokens: list[int], index: int) -> Sample:
        return Sample(
            epoch=id.epoch,
            group_index=id.prompt,
            index=index,
            session_id=uuid.uuid4().hex,
            prompt=None if _is_tokens(row) else row.prompt,
            label=row.label,
            metadata=row.metadata,
            prompt_tokens=tokens,
        )


def _is_tokens(row: Prompt) -> bool:
    return isinstance(row.prompt, list) and isinstance(row.prompt[0], int)

"""The tokenizer of a collection, as the agent calls it: a real one of transformers, in the process of plug-ins. Run by
tests/run.sh, see test_checkpoints.py."""

from __future__ import annotations

import asyncio
import json
import tempfile
import unittest
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rolloutfleet.agent.collection.judging import Judge
from rolloutfleet.agent.plugins.errors import PluginError
from rolloutfleet.api.collection import Judging
from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan
from rolloutfleet.engine.http import Http

UNICODE = Path(__file__).parents[1] / "unit/data/unicode.jsonl"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved_tokenizer(folder: Path) -> Any:
    """Byte-level BPE with merges, as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [UNICODE.read_text("ascii"), *["what is nineteen plus twenty-three"] * 9],
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **named).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def texts() -> list[str]:
    rows = [json.loads(line) for line in UNICODE.read_text("ascii").splitlines() if "lone-" not in line]
    return [text for row in rows for text in (row["prompt"], row["label"])]


def with_judge(folder: Path | str, ask: Callable[[Judge], Coroutine[Any, Any, Any]]) -> Any:
    async def story() -> Any:
        http = Http(max_connections=1)
        judge = Judge(Judging(), tokenizer=str(folder), generate_seconds=60, http=http)
        try:
            await judge.load()
            return await ask(judge)
        finally:
            await judge.close()
            await http.close()

    return asyncio.run(story())


def answered(tokens: list[int], text: str = "") -> Sample:
    return Sample(
        prompt_tokens=[1],
        response_tokens=tokens,
        response=text,
        rollout_log_probs=[-0.5] * len(tokens),
        weight_versions=[VersionSpan(version=0, start=0, end=len(tokens))],
        status=SampleStatus.COMPLETED,
    )


class Tokenizing(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.tokenizer = saved_tokenizer(cls.folder)

    def test_texts_come_back_as_they_were_whatever_they_are_of(self) -> None:
        plain = [text for text in texts() if "<|" not in text]
        self.assertGreater(len(plain), 12)

        async def there_and_back(judge: Judge) -> list[str]:
            tokens = await judge.tokenize(plain)
            self.assertEqual(tokens, [self.tokenizer.encode(text) for text in plain])
            self.assertLess(sum(map(len, tokens)), sum(len(text.encode()) for text in plain), "with merges")
            parts = [await judge.trajectory([answered(ids)]) for ids in tokens]
            return [part.response for (part,) in parts]

        self.assertEqual(with_judge(self.folder, there_and_back), plain)

    def test_messages_become_the_models_own_prompt_with_the_beginning_of_the_answer(self) -> None:
        messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "e\u0301 \U0001f600?"}]
        (ids,) = with_judge(self.folder, lambda judge: judge.tokenize([messages]))
        whole = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        self.assertEqual(self.tokenizer.decode(ids), whole + "<|im_start|>assistant\n")
        self.assertEqual(ids.count(self.tokenizer.convert_tokens_to_ids("<|im_start|>")), 3)

    def test_a_special_token_ends_a_response_and_is_no_text_of_it(self) -> None:
        tokens = [*self.tokenizer.encode("forty-two"), self.tokenizer.eos_token_id]
        (sample,) = with_judge(self.folder, lambda judge: judge.trajectory([answered(tokens)]))
        self.assertEqual((sample.response, sample.response_tokens), ("forty-two", tokens))

    def test_half_a_character_at_the_end_of_a_truncated_response_is_shown_as_such(self) -> None:
        tokens = self.tokenizer.encode("\U0001f9ee")
        self.assertGreater(len(tokens), 1)
        (sample,) = with_judge(self.folder, lambda judge: judge.trajectory([answered(tokens[:-1])]))
        self.assertTrue(sample.response.endswith("\ufffd"), sample.response)

    def test_text_that_an_engine_has_given_is_kept(self) -> None:
        (sample,) = with_judge(self.folder, lambda judge: judge.trajectory([answered([5, 6], "as it said")]))
        self.assertEqual(sample.response, "as it said")

    def test_a_folder_without_a_tokenizer_is_told(self) -> None:
        with self.assertRaisesRegex(PluginError, "nothing-here"):
            with_judge(self.folder / "nothing-here", lambda judge: judge.tokenize(["a"]))


if __name__ == "__main__":
    unittest.main()

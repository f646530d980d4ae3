"""The plug-in behind `tokenizer`: Hugging Face's, in the processes of plug-ins, since transformers is a large import
and need not be there. Functions of the kinds TOKENIZE and DETOKENIZE."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any


def tokenize(folder: str, prompts: Sequence[Any]) -> list[list[int]]:
    """Texts as they are, with the special tokens of the tokenizer; messages through its chat template, with the
    beginning of the answer."""
    tokenizer = _tokenizer(folder)
    return [_ids(tokenizer, prompt) for prompt in prompts]


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)


def detokenize(folder: str, responses: Sequence[Sequence[int]]) -> list[str]:
    return list(_tokenizer(folder).batch_decode(responses, skip_special_tokens=True))


@functools.lru_cache(maxsize=8)
def _tokenizer(folder: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"tokenizer {folder}: transformers is not there ({error}). Run the agent from the trainer's image, or give "
            "a folder with it in plugin_folders; or tokenize the prompts of the data set beforehand"
        ) from error
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

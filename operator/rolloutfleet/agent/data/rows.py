"""From a row of a data set to a prompt, or why it is none."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from rolloutfleet.api.data import DataSource, Prompt


def to_prompt(row: Any, source: DataSource) -> Prompt:
    """Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is an object with fields, this is {_kind(row)}")
    if source.input_key not in row:
        raise ValueError(f"{source.input_key}: missing; the row has {', '.join(map(str, row)) or 'no fields'}")
    prompt = row[source.input_key]
    problem = _no_prompt(prompt)
    if problem:
        raise ValueError(f"{source.input_key}: {problem}")
    label, metadata = row.get(source.label_key), row.get(source.metadata_key)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueError(f"{source.metadata_key}: an object with fields is needed, this is {_kind(metadata)}")
    missing = [key for key in source.multimodal_keys if key not in row]
    if missing:
        raise ValueError(f"{missing[0]}: missing")
    media = {key: _base64(row[key]) for key in source.multimodal_keys}
    for name, value in (
        (source.input_key, prompt),
        (source.label_key, label),
        (source.metadata_key, metadata),
        *media.items(),
    ):
        _check(value, name)
    return Prompt.model_construct(  # checked above: pydantic would take five times as long for a large data set
        prompt=prompt, label=label, metadata=dict(metadata or {}), multimodal_inputs=media
    )


def _no_prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "" if prompt else "it is empty"
    if not isinstance(prompt, list):
        return f"a text, messages or token ids are needed, this is {_kind(prompt)}"
    if not prompt:
        return "it is empty"
    if all(isinstance(message, Mapping) for message in prompt):
        return "" if all("role" in message for message in prompt) else "a message has no role"
    if all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return ""
    return "a list of messages or of token ids is needed"


def _check(value: Any, name: str) -> None:
    """What JSON, UTF-8 and a database bear; so nothing breaks after the work was done."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: half of a surrogate pair, {value[error.start]!r}, is no text") from error
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name}: the key {key!r} is no text")
            _check(key, name)
            _check(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for inner in value:
            _check(inner, name)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name}: {value} is not finite")
    elif value is not None and not isinstance(value, bool | int):
        raise ValueError(f"{name}: {_kind(value)} is no JSON")


def _base64(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, list):
        return [_base64(inner) for inner in value]
    if isinstance(value, Mapping):
        return {key: _base64(inner) for key, inner in value.items()}
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"

"""A sample as bytes, in the store and on the way to the trainer: what is long as arrays, the rest as JSON, and a
checksum over both.

Layout, little-endian: checksum of the rest (u32), length of the JSON (u32), JSON, prompt tokens (i32), response tokens
(i32), log-probs (f32, or f64 where f32 would change one), loss mask (a byte a token; left out where all are 1).
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from typing import Any

from pydantic import ValidationError

from rolloutfleet.api.samples import Sample


class DamagedSample(Exception):
    """What was read is not what was written."""


_HEAD = struct.Struct("<II")
_ARRAYS = {"prompt_tokens", "response_tokens", "rollout_log_probs", "loss_mask"}


def encode(sample: Sample) -> bytes:
    """Raises OverflowError for a token id of more than 31 bits."""
    log_probs = array("f", sample.rollout_log_probs)
    if log_probs.tolist() != sample.rollout_log_probs:
        log_probs = array("d", sample.rollout_log_probs)
    masked = 0 in sample.loss_mask
    header: dict[str, Any] = {
        "sample": sample.model_dump(mode="json", exclude_defaults=True, exclude=_ARRAYS),
        "prompt": len(sample.prompt_tokens),
        "response": len(sample.response_tokens),
        "log_probs": log_probs.typecode,
        "masked": masked,
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    parts = [_little(array("i", sample.prompt_tokens)), _little(array("i", sample.response_tokens)), _little(log_probs)]
    if masked:
        parts.append(bytes(sample.loss_mask))
    body = struct.pack("<I", len(text)) + text + b"".join(parts)
    return struct.pack("<I", zlib.crc32(body)) + body


def decode(payload: bytes) -> Sample:
    """Raises DamagedSample."""
    try:
        checksum, length = _HEAD.unpack_from(payload)
        if zlib.crc32(payload[4:]) != checksum:
            raise DamagedSample("a sample is damaged: its checksum is wrong")
        at = _HEAD.size + length
        header = json.loads(payload[_HEAD.size : at])
        fields = header["sample"]
        layout = [
            ("prompt_tokens", "i", header["prompt"]),
            ("response_tokens", "i", header["response"]),
            ("rollout_log_probs", header["log_probs"], header["response"]),
        ]
        if header["masked"]:
            layout.append(("loss_mask", "B", header["response"]))
        for name, typecode, count in layout:
            values = array(typecode)
            end = at + count * values.itemsize
            values.frombytes(payload[at:end])
            if sys.byteorder == "big":
                values.byteswap()
            fields[name], at = values.tolist(), end
        return Sample.model_validate(fields)
    except (struct.error, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DamagedSample(f"a sample cannot be read: {type(error).__name__} {error}") from error


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()

"""The HTTP API of the worker in an engine's pod, on the pod's address. JSON, snake_case."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class CopyVersion(BaseModel):
    """POST /v1/copies: bring the pod's own copy to this version. Repeating it is harmless; one at a time runs.

    Refused with 404: a folder that is needed is not there (any more); 422: it is no version, or damaged; 507: the
    pod's volume is full; 500: it cannot be read or written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Folder of the version, full or delta, on the weights volume."""


class LocalCopy(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str
    """Folder of a full checkpoint that the engine loads."""
    version: int | None
    """As the folder's index calls it; None of a checkpoint without an index."""
    delta: bool
    """The version is one."""
    deltas: int
    """That were applied; 0: it was there already, or copied whole."""
    bytes_read: int
    """From the weights volume."""
    seconds: float

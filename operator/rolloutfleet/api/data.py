"""A data set, as the trainer names it, and what a row of it becomes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rolloutfleet.api.samples import Part


class DataSource(BaseModel):
    """Unknown fields are refused: a misspelled one would be silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(min_length=1)]
    """A file of JSON lines (.jsonl) or Parquet, a folder of Parquet files, or a folder that Hugging Face datasets
    wrote with save_to_disk. `path@[a:b]` are rows a to b, as Python counts them."""
    input_key: str = "prompt"
    """Field of the prompt: a text, messages, or token ids."""
    label_key: str = "label"
    metadata_key: str = "metadata"
    multimodal_keys: list[str] = []
    """Fields that go to the engine with the prompt, for example images; bytes become base64."""
    shuffle: bool = True
    seed: int = 42
    """Epoch n is shuffled with seed + n, in slime's order."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """skip: rows that cannot be used are left out and counted."""


class Prompt(Part):
    prompt: str | list[dict[str, JsonValue]] | list[int]
    label: JsonValue = None
    metadata: dict[str, JsonValue] = {}
    multimodal_inputs: dict[str, JsonValue] = {}

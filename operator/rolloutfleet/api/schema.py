"""The vocabulary in which our models say what JSON Schema has no word for: CEL rules, list keys, columns.

Each mark puts its `x-kubernetes-*` extension into pydantic's JSON schema; `crdgen` makes the result structural.
Objects read from the API server may come from a newer version, so reading ignores fields that it does not know;
what users write is checked by the API server (pruning, and `fieldValidation=Strict`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

VALIDATIONS = "x-kubernetes-validations"
LIST_TYPE = "x-kubernetes-list-type"
LIST_MAP_KEYS = "x-kubernetes-list-map-keys"
MAP_TYPE = "x-kubernetes-map-type"
PRESERVE_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


@dataclass(frozen=True)
class Rule:
    """A CEL rule of `x-kubernetes-validations`; the message names the field and what would be right."""

    cel: str
    message: str

    def as_validation(self) -> dict[str, str]:
        return {"rule": self.cel, "message": self.message}

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        return {**schema, VALIDATIONS: [*schema.get(VALIDATIONS, []), self.as_validation()]}


@dataclass(frozen=True)
class ListMap:
    """The list is a map by these keys: server-side apply merges it item by item."""

    keys: tuple[str, ...]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core), LIST_TYPE: "map", LIST_MAP_KEYS: list(self.keys)}


@dataclass(frozen=True)
class ListSet:
    """The list holds each value once."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core), LIST_TYPE: "set"}


@dataclass(frozen=True)
class Opaque:
    """A piece of another API (a pod template, a volume source): kept whole, checked where it is used.

    It has one owner (`x-kubernetes-map-type: atomic`), so that two appliers do not mix two volume sources into one.
    """

    fields: tuple[str, ...] = ()
    """Where given, the only fields at its top, each an object; any other is an unknown field."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        kept = {"type": "object", PRESERVE_UNKNOWN: True}
        inside = {"properties": {field: dict(kept) for field in self.fields}} if self.fields else kept
        schema = {key: value for key, value in handler(core).items() if key != "additionalProperties"}
        return {**schema, "type": "object", **inside, MAP_TYPE: "atomic"}


@dataclass(frozen=True)
class Column:
    """A printer column. Those with priority 1 show with `-o wide` only."""

    name: str
    json_path: str
    type: str = "string"
    priority: int = 0
    description: str = ""


@dataclass(frozen=True)
class Scale:
    """Paths of the scale subresource."""

    spec: str
    status: str
    selector: str


@dataclass(frozen=True)
class Kind:
    """How a model appears in the API: names, columns, subresources."""

    name: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    scale: Scale | None = None
    categories: tuple[str, ...] = ("rollout",)


class Model(BaseModel):
    """Base of everything in the API: camelCase on the wire, unknown fields ignored on reading."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.rules:
            schema[VALIDATIONS] = [rule.as_validation() for rule in cls.rules]
        return schema

    def dump(self) -> dict[str, Any]:
        """As JSON for the API server: camelCase, absent where None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Resource(Model):
    """A custom resource: metadata stays a raw mapping, since Kubernetes owns its schema."""

    kind_info: ClassVar[Kind]

    metadata: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", ""))

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def generation(self) -> int:
        return int(self.metadata.get("generation", 0))

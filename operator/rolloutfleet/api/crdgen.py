"""Writes the CustomResourceDefinitions: `python -m rolloutfleet.api.crdgen DIR`.

pydantic's JSON schema is not what apiextensions.k8s.io/v1 takes: it has `$ref`, null arms and titles, and misses the
extensions of Kubernetes. The marks of `schema` add those; this module makes the rest a structural schema and refuses
what it cannot express. It also refuses what only the API server would notice, when it estimates the cost of CEL
rules: a string, list or map without a bound below a rule.

`crds/` is committed; a test generates anew and compares. Only the command itself needs PyYAML.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rolloutfleet.api.names import GROUP, VERSION
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.schema import (
    LIST_MAP_KEYS,
    LIST_TYPE,
    MAP_TYPE,
    PRESERVE_UNKNOWN,
    VALIDATIONS,
    Column,
    Kind,
    Resource,
)
from rolloutfleet.api.server_group import ServerGroup

RESOURCES: tuple[type[Resource], ...] = (RolloutServer, ServerGroup)

MAX_CRD_BYTES = 250_000
"""Client-side `kubectl apply` keeps the object in an annotation, and annotations end at 262,144 bytes."""

JsonSchema = dict[str, Any]

_KEPT = (
    "type",
    "format",
    "enum",
    "default",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "nullable",
    LIST_TYPE,
    LIST_MAP_KEYS,
    MAP_TYPE,
    PRESERVE_UNKNOWN,
    VALIDATIONS,
)
_HANDLED = ("$ref", "$defs", "anyOf", "const", "title", "description", "properties", "items", "additionalProperties")
_STANDARD_FIELDS: Mapping[str, JsonSchema] = {
    "apiVersion": {"description": "Version of the schema of this object.", "type": "string"},
    "kind": {"description": "Kind of this object.", "type": "string"},
    "metadata": {"type": "object"},
}


class SchemaError(ValueError):
    """A model says something that a CRD cannot; the text names the field."""


def crd(resource: type[Resource]) -> dict[str, Any]:
    """The CustomResourceDefinition of one resource, as the API server takes it."""
    kind = resource.kind_info
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in kind.columns],
        "schema": {"openAPIV3Schema": structural_schema(resource)},
        "subresources": _subresources(kind),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": list(kind.short_names),
                "categories": list(kind.categories),
            },
            "versions": [version],
        },
    }


def structural_schema(resource: type[Resource]) -> JsonSchema:
    """The schema of a whole object. Defaults are kept in spec only: status holds what was observed, no more."""
    raw = resource.model_json_schema(by_alias=True, mode="validation")
    schema = _structural(raw, definitions=raw.get("$defs", {}), path=resource.kind_info.name, entered=())
    properties = schema["properties"]
    schema["properties"] = {**_STANDARD_FIELDS, "spec": properties["spec"]}
    if "status" in properties:
        schema["properties"]["status"] = _without_defaults(properties["status"])
    schema["required"] = ["spec"]
    problems = [
        *unbounded_below_rules(schema, path=resource.kind_info.name),
        *_bad_list_maps(schema, path=resource.kind_info.name),
    ]
    if problems:
        raise SchemaError("; ".join(problems))
    return schema


def _structural(
    node: JsonSchema, *, definitions: Mapping[str, JsonSchema], path: str, entered: tuple[str, ...]
) -> JsonSchema:
    node, entered = _inlined(node, definitions=definitions, path=path, entered=entered)
    unknown = sorted(set(node) - set(_KEPT) - set(_HANDLED))
    if unknown:
        raise SchemaError(f"{path}: {', '.join(unknown)} cannot be said in a CRD; write a CEL rule instead")

    schema: JsonSchema = {}
    if "description" in node:
        schema["description"] = _one_line_paragraphs(node["description"])
    schema |= {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        schema["enum"] = [node["const"]]
    if schema.get("default", ...) is None:
        del schema["default"]
    for validation in schema.get(VALIDATIONS, []):
        if "\n" in validation["message"]:
            raise SchemaError(f"{path}: the message of rule {validation['rule']!r} has a line break")

    def inner(child: JsonSchema, step: str) -> JsonSchema:
        return _structural(child, definitions=definitions, path=path + step, entered=entered)

    if "properties" in node:
        schema["properties"] = {name: inner(child, f".{name}") for name, child in node["properties"].items()}
        if "default" in schema:
            _require_nested_defaults(schema, path)
            # Spelled out: the API server checks a default against CEL rules before it fills the defaults inside.
            schema["default"] = {
                name: child["default"] for name, child in schema["properties"].items() if "default" in child
            }
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = inner(node["additionalProperties"], ".*")
    elif schema.get("type") == "object" and not schema.get(PRESERVE_UNKNOWN) and "metadata" not in path:
        raise SchemaError(f"{path}: a mapping of anything; mark it Opaque, or give its values a type")
    if "items" in node:
        schema["items"] = inner(node["items"], "[]")
    if "type" not in schema:
        raise SchemaError(f"{path}: has no type of its own; one field an alternative and a CEL rule can say it")
    return schema


def _inlined(
    node: JsonSchema, *, definitions: Mapping[str, JsonSchema], path: str, entered: tuple[str, ...]
) -> tuple[JsonSchema, tuple[str, ...]]:
    """Without `$ref` and null arms. What stands beside a `$ref` (a field's description) wins over what it names."""
    while "$ref" in node or "anyOf" in node:
        beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
        if "anyOf" in node:
            arms = [arm for arm in node["anyOf"] if arm.get("type") != "null"]
            if len(arms) != 1:
                raise SchemaError(f"{path}: a union; one field an alternative and a CEL rule can say it")
            target = arms[0]
        else:
            name = node["$ref"].removeprefix("#/$defs/")
            if name in entered:
                raise SchemaError(f"{path}: {name} contains itself; a CRD cannot be recursive")
            entered = (*entered, name)
            target = definitions[name]
        rules = [*target.get(VALIDATIONS, []), *beside.pop(VALIDATIONS, [])]
        node = {**target, **beside, **({VALIDATIONS: rules} if rules else {})}
    return node, entered


def _require_nested_defaults(schema: JsonSchema, path: str) -> None:
    """`default: {}` is filled by the defaults inside; that says what the model's own default says only if all of
    its fields are defaulted, and to nothing but their own defaults."""
    written = schema["default"]
    for name, child in schema["properties"].items():
        if name in written and written[name] not in (None, child.get("default")):
            raise SchemaError(f"{path}.{name}: its default differs from the one in {path}; give it only there")
        if name in schema.get("required", ()):
            raise SchemaError(f"{path}.{name}: is required, so {path} cannot be defaulted")


def unbounded_below_rules(schema: JsonSchema, *, path: str, below_rule: bool = False) -> Iterator[str]:
    """Strings, lists and maps that a CEL rule can reach and that have no upper bound."""
    below_rule = below_rule or VALIDATIONS in schema
    if below_rule:
        kind = schema.get("type")
        if kind == "string" and not {"maxLength", "enum"} & set(schema):
            yield f"{path}: a CEL rule reaches this string; give it max_length"
        if kind == "array" and "maxItems" not in schema:
            yield f"{path}: a CEL rule reaches this list; give it max_length"
        if kind == "object" and "additionalProperties" in schema and "maxProperties" not in schema:
            yield f"{path}: a CEL rule reaches this map; give it max_length"
    for step, child in _children(schema):
        if path.count(".") == 0 and step in (".apiVersion", ".kind", ".metadata"):
            continue  # the API server bounds these itself
        yield from unbounded_below_rules(child, path=path + step, below_rule=below_rule)


def _bad_list_maps(schema: JsonSchema, *, path: str) -> Iterator[str]:
    for key in schema.get(LIST_MAP_KEYS, []):
        item = schema["items"]
        field = item.get("properties", {}).get(key)
        if field is None:
            yield f"{path}: the key {key} of this list is not a field of its items"
        elif key not in item.get("required", ()) and "default" not in field:
            yield f"{path}[].{key}: the key of a list must be required or have a default"
        elif field["type"] in ("object", "array"):
            yield f"{path}[].{key}: the key of a list must be a string, a number or a truth value"
    for step, child in _children(schema):
        yield from _bad_list_maps(child, path=path + step)


def _children(schema: JsonSchema) -> Iterator[tuple[str, JsonSchema]]:
    for name, child in schema.get("properties", {}).items():
        yield f".{name}", child
    if "items" in schema:
        yield "[]", schema["items"]
    if isinstance(schema.get("additionalProperties"), dict):
        yield ".*", schema["additionalProperties"]


def _without_defaults(schema: JsonSchema) -> JsonSchema:
    bare = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in bare:
        bare["properties"] = {name: _without_defaults(child) for name, child in bare["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(bare.get(key), dict):
            bare[key] = _without_defaults(bare[key])
    return bare


def _one_line_paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _column(column: Column) -> dict[str, Any]:
    written: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.json_path}
    if column.priority:
        written["priority"] = column.priority
    if column.description:
        written["description"] = column.description
    return written


def _subresources(kind: Kind) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale is not None:
        subresources["scale"] = {
            "specReplicasPath": kind.scale.spec,
            "statusReplicasPath": kind.scale.status,
            "labelSelectorPath": kind.scale.selector,
        }
    return subresources


def rendered() -> dict[str, str]:
    """File name -> YAML text, for each resource."""
    import yaml

    class WithoutAliases(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    files = {}
    for resource in RESOURCES:
        name = f"{resource.kind_info.plural}.yaml"
        text = yaml.dump(crd(resource), Dumper=WithoutAliases, sort_keys=False, width=110, allow_unicode=True)
        if len(text.encode()) > MAX_CRD_BYTES:
            raise SchemaError(f"{name}: {len(text.encode())} bytes; more than {MAX_CRD_BYTES} cannot be applied")
        files[name] = f"# Generated from operator/rolloutfleet/api by `make generate`; do not edit.\n{text}"
    return files


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m rolloutfleet.api.crdgen DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

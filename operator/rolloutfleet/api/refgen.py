"""Writes the API reference: `python -m rolloutfleet.api.refgen FILE`. From the same schemas as the CRDs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rolloutfleet.api.crdgen import RESOURCES, JsonSchema, structural_schema
from rolloutfleet.api.names import API_VERSION
from rolloutfleet.api.schema import PRESERVE_UNKNOWN, VALIDATIONS

HEAD = f"""# API reference
`{API_VERSION}`. Generated from operator/rolloutfleet/api by `make generate`; do not edit.
"""


def reference() -> str:
    parts = [HEAD]
    for resource in RESOURCES:
        kind = resource.kind_info
        schema = structural_schema(resource)
        parts.append(f"\n## {kind.name}\n{schema.get('description', '')}\n")
        parts.append(f"\nShort name `{', '.join(kind.short_names)}`, category `{', '.join(kind.categories)}`.\n")
        for section in ("spec", "status"):
            parts.append(f"\n### {kind.name}.{section}\n| field | type | default | meaning |\n|---|---|---|---|\n")
            parts += [f"| {' | '.join(row)} |\n" for row in _rows(schema["properties"][section], section)]
        rules = sorted({rule["message"] for rule in _rules(schema)})
        if rules:
            parts.append(f"\n### Rules of {kind.name}\n" + "".join(f"- {rule}\n" for rule in rules))
    return "".join(parts)


def _rows(schema: JsonSchema, path: str) -> Iterator[tuple[str, str, str, str]]:
    required = set(schema.get("required", ()))
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = "" if "default" not in child else f"`{json.dumps(child['default'])}`"
        kind = _kind(child) + (", required" if name in required else "")
        yield f"`{here}`", kind, default if len(default) < 40 else "(those inside)", _cell(child.get("description", ""))
        yield from _rows(child, here)
        if "items" in child:
            yield from _rows(child["items"], f"{here}[]")


def _kind(schema: JsonSchema) -> str:
    if "enum" in schema:
        return " \\| ".join(str(value) for value in schema["enum"])
    if schema.get(PRESERVE_UNKNOWN):
        return "any object"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_kind(schema['additionalProperties'])}"
    bounds = [f"{schema[key]}" if key in schema else "" for key in ("minimum", "maximum")]
    return str(schema["type"]) + (f" {bounds[0]}..{bounds[1]}" if any(bounds) else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rules(schema: JsonSchema) -> Iterator[dict[str, str]]:
    yield from schema.get(VALIDATIONS, [])
    for child in schema.get("properties", {}).values():
        yield from _rules(child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _rules(schema[key])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")

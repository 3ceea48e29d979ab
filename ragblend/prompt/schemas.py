"""JSON schemas of answers and tools: whether a schema allows objects only. Depends on JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describes_object(schema: Any) -> bool:
    """Return True if a JSON schema allows objects only. A `$ref` to a place outside of the schema counts as an object.

    >>> describes_object({"type": "array"}), describes_object({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {}}}})
    (False, True)
    """
    return _is_object(schema, schema, ())


def _is_object(part: Any, whole: Mapping[str, Any], followed: tuple[str, ...]) -> bool:
    """Return True if `part` of the schema `whole` allows objects only. `followed`: the references that led to it."""
    if not isinstance(part, Mapping):
        return False
    reference = part.get("$ref")
    if isinstance(reference, str):
        target: Any = whole
        for name in filter(None, reference.removeprefix("#").split("/")):
            target = target.get(name) if isinstance(target, Mapping) else None
        return target is None or (reference not in followed and _is_object(target, whole, (*followed, reference)))
    if "type" in part:
        return part["type"] in ("object", ["object"])
    if alternatives := part.get("anyOf") or part.get("oneOf"):
        return all(_is_object(each, whole, followed) for each in alternatives)
    return "properties" in part or any(_is_object(each, whole, followed) for each in part.get("allOf") or ())

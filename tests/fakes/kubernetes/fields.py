"""Field sets of server-side apply: who owns what, and how an applied configuration merges with what
is there.

A set is a trie in the form of `managedFields[].fieldsV1`: keys `f:<field>`, `k:<item keys>`,
`v:<set member>`; an empty node is a field that belongs to the set, and `.` marks a list item
itself. Nothing here is changed in place. (Kubernetes: "Server-Side Apply", structured-merge-diff.)
"""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.schema import ANY, Schema

Json = dict[str, Any]
FieldSet = dict[str, Any]


def field_set(value: Any, schema: Schema) -> FieldSet:
    """The fields that `value` names."""
    if isinstance(value, dict) and not schema.atomic and schema.form in ("object", "map"):
        return {
            f"f:{key}": field_set(below, schema.field(key) or ANY) for key, below in value.items()
        }
    if isinstance(value, dict) and schema.form == "any" and not schema.atomic:
        return {f"f:{key}": field_set(below, ANY) for key, below in value.items()}
    if isinstance(value, list) and _is_granular(schema):
        if schema.list_type == "set":
            return {schema.key_of(item): {} for item in value}
        return {schema.key_of(item): {".": {}, **field_set(item, schema.items)} for item in value}
    return {}


def _is_granular(schema: Schema) -> bool:
    return schema.form == "list" and schema.list_type in ("map", "set")


def merged(live: Any, config: Any, schema: Schema) -> Any:
    """`config` laid over `live`."""
    if isinstance(live, dict) and isinstance(config, dict) and not schema.atomic:
        result = dict(live)
        for key, below in config.items():
            result[key] = (
                merged(live[key], below, schema.field(key) or ANY) if key in live else below
            )
        return result
    if isinstance(live, list) and isinstance(config, list) and _is_granular(schema):
        items = {schema.key_of(item): item for item in live}
        for item in config:
            key = schema.key_of(item)
            items[key] = (
                merged(items[key], item, schema.items)
                if key in items and schema.list_type == "map"
                else item
            )
        return list(items.values())
    return config


def changed(old: Any, new: Any, schema: Schema) -> FieldSet | None:
    """The fields that differ between two values; None = none."""
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict) and not schema.atomic and (old or new):
        found: FieldSet = {}
        for key in old.keys() | new.keys():
            inner = schema.field(key) or ANY
            if key not in new:
                found[f"f:{key}"] = field_set(old[key], inner)
            elif key not in old:
                found[f"f:{key}"] = field_set(new[key], inner)
            elif (below := changed(old[key], new[key], inner)) is not None:
                found[f"f:{key}"] = below
        return found or None
    if isinstance(old, list) and isinstance(new, list) and _is_granular(schema):
        before = {schema.key_of(item): item for item in old}
        after = {schema.key_of(item): item for item in new}
        found = {}
        for key in before.keys() | after.keys():
            if key in before and key in after:
                below = changed(before[key], after[key], schema.items)
                if below is not None:
                    found[key] = below
            else:
                found[key] = (
                    {".": {}, **field_set(before.get(key, after.get(key)), schema.items)}
                    if schema.list_type == "map"
                    else {}
                )
        return found or None
    return {}


def union(one: FieldSet, other: FieldSet) -> FieldSet:
    """Fields in either."""
    if not one or not other:  # an empty node is the field itself: whatever lies below it is its own
        return one or other
    result = dict(one)
    for key, below in other.items():
        result[key] = union(result[key], below) if key in result else below
    return result


def minus(one: FieldSet, other: FieldSet) -> FieldSet | None:
    """Fields of `one` that are not in `other`; None = nothing is left. A field's parts are not the
    field: they stay."""
    if not one:
        return None if not other or "." in other else one
    if not other:
        return {key: below for key, below in one.items() if key != "."} or None
    result: FieldSet = {}
    for key, below in one.items():
        if key not in other:
            result[key] = below
        elif (rest := minus(below, other[key])) is not None:
            result[key] = rest
    return result or None


def common(one: FieldSet, other: FieldSet) -> FieldSet | None:
    """Fields in both; None = none. A field that is one value in one set and has parts in the other
    counts as shared."""
    if not one or not other:
        return one or other
    result: FieldSet = {}
    for key, below in one.items():
        if key != "." and key in other and (shared := common(below, other[key])) is not None:
            result[key] = shared
    return result or None


def without(value: Any, gone: FieldSet, schema: Schema) -> Any:
    """`value` less the fields of `gone`; what became empty by that goes too (None = all of it)."""
    if not gone:
        return None
    if isinstance(value, dict):
        return _less_fields(value, gone, schema)
    if isinstance(value, list) and _is_granular(schema):
        kept = []
        for item in value:
            below = gone.get(schema.key_of(item))
            if below is None:
                kept.append(item)
            elif below and "." not in below:
                kept.append(without(item, below, schema.items) or item)
        return kept or None
    return value


def _less_fields(value: Json, gone: FieldSet, schema: Schema) -> Json | None:
    result = {}
    for key, below in value.items():
        mark = gone.get(f"f:{key}")
        if mark is None:
            result[key] = below
        elif mark and (rest := without(below, mark, schema.field(key) or ANY)) is not None:
            result[key] = rest
    return result or None


def paths(fields: FieldSet, prefix: str = "") -> list[str]:
    """Readable paths: `.spec.template.spec.containers[name="user"].image`."""
    found = []
    for key, below in fields.items():
        if key == ".":
            continue
        text = f"{prefix}.{key[2:]}" if key.startswith("f:") else f"{prefix}[{_item(key)}]"
        found += paths(below, text) if any(k != "." for k in below) else [text]
    return found


def _item(key: str) -> str:
    return (
        key[2:].strip("{}").replace('":', "=").replace('"', "", 1)
        if key.startswith("k:")
        else "=" + key[2:]
    )

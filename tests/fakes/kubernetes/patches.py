"""The patches that are not server-side apply: JSON patch (RFC 6902), merge patch (RFC 7386),
strategic merge."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.cleaning import copied
from tests.fakes.kubernetes.problems import Refused
from tests.fakes.kubernetes.schema import ANY, Schema

Json = dict[str, Any]


def merge_patch(live: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return copied(patch)
    result = dict(live) if isinstance(live, dict) else {}
    for key, below in patch.items():
        if below is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), below)
    return result


def strategic_merge(live: Any, patch: Any, schema: Schema) -> Any:
    """As a merge patch, but lists with a merge key merge by item; `$patch: delete|replace` and
    `$deleteFromPrimitiveList/x` work."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace":
            return {key: copied(below) for key, below in patch.items() if key != "$patch"}
        return _merge_fields(live if isinstance(live, dict) else {}, patch, schema)
    if isinstance(patch, list) and schema.merge_key is not None and isinstance(live, list):
        return _merge_items(live, patch, schema)
    return copied(patch)


def _merge_fields(live: Json, patch: Json, schema: Schema) -> Json:
    result = dict(live)
    for key, below in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            result[name] = [item for item in result.get(name, ()) if item not in below]
        elif key.startswith("$setElementOrder/") or key == "$retainKeys":
            continue
        elif below is None:
            result.pop(key, None)
        else:
            result[key] = strategic_merge(result.get(key), below, schema.field(key) or ANY)
    return result


def _merge_items(live: list[Any], patch: list[Any], schema: Schema) -> list[Any]:
    key = schema.merge_key
    if not key:
        return [*live, *(item for item in patch if item not in live)]
    items = {item.get(key): item for item in live}
    for item in patch:
        if item.get("$patch") == "delete":
            items.pop(item.get(key), None)
        else:
            items[item.get(key)] = strategic_merge(items.get(item.get(key)), item, schema.items)
    return list(items.values())


def json_patch(live: Json, operations: Any) -> Json:
    """RFC 6902. Raises Refused: 400 for a patch that is none, 422 for one that does not fit, 422
    for a failed test."""
    if not isinstance(operations, list):
        raise Refused(400, "json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    result = copied(live)
    for one in operations:
        try:
            result = _operation(result, one)
        except (KeyError, IndexError, ValueError, TypeError) as e:
            raise Refused(
                422, f"the server rejected our request due to an error in our request: {one}: {e}"
            ) from e
    return result  # type: ignore[no-any-return]


def _operation(document: Any, one: Json) -> Any:
    how, path = one["op"], _pointer(one["path"])
    if how == "test":
        if _at(document, path) != one.get("value"):
            raise Refused(
                422,
                f"the server rejected our request due to an error in our request: testing "
                f"{one['path']} failed",
            )
    elif how in ("add", "replace"):
        return _set(document, path, copied(one["value"]), replace=how == "replace")
    elif how == "remove":
        _take(document, path)
    elif how in ("move", "copy"):
        source = _pointer(one["from"])
        value = _take(document, source) if how == "move" else copied(_at(document, source))
        return _set(document, path, value, replace=False)
    else:
        raise ValueError(f"unknown operation {how!r}")
    return document


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is not a JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _set(document: Any, path: list[str], value: Any, *, replace: bool) -> Any:
    if not path:
        return value
    parent, last = _at(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        place = len(parent) if last == "-" else int(last)
        parent[place : place + (1 if replace else 0)] = [value]
    elif replace and last not in parent:
        raise KeyError(last)
    else:
        parent[last] = value
    return document


def _take(document: Any, path: list[str]) -> Any:
    parent, last = _at(document, path[:-1]), path[-1]
    return parent.pop(int(last)) if isinstance(parent, list) else parent.pop(last)

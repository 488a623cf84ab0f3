"""Whether an object in the cluster is what was wanted. Whatever the API server and its webhooks
added is none of our business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differences(wanted: Any, there: Any, path: str = "") -> Iterator[str]:
    """Paths of what is wanted and not so: missing keys and other values. Lists are equal in length,
    and are compared place by place."""
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            yield path
            return
        for key, value in wanted.items():
            where = f"{path}.{key}" if path else str(key)
            if key in there:
                yield from differences(value, there[key], where)
            elif value not in ({}, [], None, ""):  # empty ones are left out on the way
                yield where
    elif isinstance(wanted, list):
        if not isinstance(there, list) or len(there) != len(wanted):
            yield path
            return
        for index, (one, other) in enumerate(zip(wanted, there, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif wanted != there:
        yield path


def is_as_wanted(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether nothing of it has to be written."""
    return next(differences(wanted, there), None) is None

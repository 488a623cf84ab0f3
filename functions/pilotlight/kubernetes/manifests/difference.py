"""Compares an object in the cluster with its manifest, ignoring fields that the API server and its
webhooks added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differences(wanted: Any, there: Any, path: str = "") -> Iterator[str]:
    """Paths of wanted fields that are missing or have other values. Lists must have the same length
    and are compared element by element."""
    if isinstance(wanted, Mapping):
        if not isinstance(there, Mapping):
            yield path
            return
        for key, value in wanted.items():
            where = f"{path}.{key}" if path else str(key)
            if key in there:
                yield from differences(value, there[key], where)
            elif value not in ({}, [], None, ""):  # the API server omits empty ones
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
    """Whether the object needs no update."""
    return next(differences(wanted, there), None) is None

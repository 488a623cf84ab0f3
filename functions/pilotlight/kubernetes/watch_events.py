"""Converts watch events and listings to changes relative to the known state. Pure.

Invariant: a consumer that applies every change in order has, after each SYNCED, exactly the objects
of the cluster; no change is delivered twice, even after reconnects, new listings and repeated
events. Identity is (namespace, name); a new uid under an old name is a DELETED and an ADDED."""

from __future__ import annotations

import json
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import Any, Literal

Object = dict[str, Any]
Key = tuple[str, str]
ChangeType = Literal["SYNCED", "ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class WatchChange:
    """One change. `object`: the current object; for DELETED the last one, for SYNCED (the listing
    is complete) empty."""

    type: ChangeType
    object: Object

    @property
    def key(self) -> Key:
        """(namespace or "", name)."""
        return key_of(self.object)


def key_of(item: Mapping[str, Any]) -> Key:
    """(namespace or "", name) of an object."""
    meta = item.get("metadata") or {}
    return str(meta.get("namespace") or ""), str(meta.get("name") or "")


def version_of(item: Mapping[str, Any]) -> str:
    """The object's resourceVersion, or ""."""
    return str((item.get("metadata") or {}).get("resourceVersion") or "")


class ResourceVersions:
    """The objects that a watch has seen. Owner: one watch; no lock needed."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}

    def __repr__(self) -> str:
        return f"<ResourceVersions {len(self._objects)}>"

    def listed(self, items: Iterable[Object]) -> list[WatchChange]:
        """The changes of a complete listing; objects missing from it are DELETED."""
        fresh = {key_of(item): item for item in items}
        gone = [
            WatchChange("DELETED", item) for key, item in self._objects.items() if key not in fresh
        ]
        changes = gone + [change for item in fresh.values() for change in self._differences(item)]
        self._objects = fresh
        return changes

    def happened(self, type: str, item: Object) -> list[WatchChange]:
        """The changes of one event; none if the object is already known."""
        key = key_of(item)
        if type == "DELETED":
            known = self._objects.pop(key, None)
            return [] if known is None else [WatchChange("DELETED", item)]
        changes = self._differences(item)
        self._objects[key] = item
        return changes

    def _differences(self, item: Object) -> list[WatchChange]:
        known = self._objects.get(key_of(item))
        if known is None:
            return [WatchChange("ADDED", item)]
        if _uid(known) != _uid(item):
            return [WatchChange("DELETED", known), WatchChange("ADDED", item)]
        if version_of(known) == version_of(item):
            return []
        return [WatchChange("MODIFIED", item)]


class JsonLines:
    """Splits a byte stream into JSON documents, one per line; an incomplete line is never
    delivered."""

    def __init__(self, *, most_bytes: int = 32 * 1024 * 1024) -> None:
        """`most_bytes`: limit of one line; etcd's limit of an object is 1.5 MiB."""
        self._rest = bytearray()
        self._most_bytes = most_bytes

    def feed(self, piece: bytes) -> Iterator[Object]:
        """Yield the documents that are now complete.

        Raises:
            ValueError: a line is not a JSON object, or too long.
        """
        self._rest += piece
        if b"\n" not in piece:
            if len(self._rest) > self._most_bytes:
                raise ValueError(f"a line of a watch exceeds {self._most_bytes} bytes")
            return
        *whole, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in whole:
            if line.strip():
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("a line of a watch is not a JSON object")
                yield value


def _uid(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("uid") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A consistent listing of one kind; a watch can continue from `resource_version`."""

    items: tuple[Object, ...]
    resource_version: str

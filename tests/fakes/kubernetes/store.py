"""Objects in memory, their versions, and the events of each change.

Owner: the server's event loop; everything is synchronous, so no lock is needed. Stored objects are
never changed in place: a reader may keep what it got."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Key = tuple[str, str]
"""(group, plural)."""
Place = tuple[str, str]
"""(namespace or "", name)."""
HISTORY = 20_000
"""Events kept for watches that start at an older version."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object and its bytes on the wire."""

    body: Json
    data: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One change: `kind` is ADDED, MODIFIED or DELETED; `before` is what was there until now."""

    version: int
    kind: str
    place: Place
    now: Stored
    before: Stored | None


class Store:
    """All objects.

    Attributes:
        version: of the newest change, over all kinds.
        oldest: watches and continued lists from before this version get 410.
    """

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 0
        self._objects: dict[Key, dict[Place, Stored]] = {}
        self._history: dict[Key, deque[Event]] = {}
        self._listeners: dict[Key, list[Callable[[Event], None]]] = {}
        self._owned: dict[str, set[tuple[Key, Place]]] = {}
        self._uids: dict[str, tuple[Key, Place]] = {}

    def __repr__(self) -> str:
        count = sum(len(found) for found in self._objects.values())
        return f"<Store version={self.version} objects={count}>"

    def get(self, key: Key, place: Place) -> Stored | None:
        """The object, or None."""
        return self._objects.get(key, {}).get(place)

    def all(self, key: Key, namespace: str | None = None) -> list[tuple[Place, Stored]]:
        """Objects of one kind by namespace and name; `namespace` None = everywhere."""
        found = self._objects.get(key, {})
        if namespace is None:
            return sorted(found.items())
        return sorted((place, stored) for place, stored in found.items() if place[0] == namespace)

    def put(self, key: Key, place: Place, body: Json) -> Stored:
        """Keep `body`, which gets the next version."""
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        stored = Stored(body, json.dumps(body, separators=(",", ":")).encode())
        objects = self._objects.setdefault(key, {})
        before = objects.get(place)
        objects[place] = stored
        self._index(key, place, before, stored)
        self._publish(
            key,
            Event(self.version, "ADDED" if before is None else "MODIFIED", place, stored, before),
        )
        return stored

    def remove(self, key: Key, place: Place, last: Json | None = None) -> Stored:
        """Forget an object; its last state (`last`, if it differs from what is stored) goes out
        with a version of its own."""
        before = self._objects[key].pop(place)
        self.version += 1
        body = dict(last or before.body)
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self.version)}
        stored = Stored(body, json.dumps(body, separators=(",", ":")).encode())
        self._index(key, place, before, None)
        self._publish(key, Event(self.version, "DELETED", place, stored, before))
        return stored

    def owned_by(self, uid: str) -> list[tuple[Key, Place]]:
        """What names this object as an owner."""
        return sorted(self._owned.get(uid, ()))

    def find(self, uid: str) -> tuple[Key, Place] | None:
        """Where the object with this uid is; None = nowhere."""
        return self._uids.get(uid)

    def everything_in(self, namespace: str) -> Iterator[tuple[Key, Place]]:
        """All objects in a namespace."""
        for key, objects in list(self._objects.items()):
            for place in [place for place in objects if place[0] == namespace]:
                yield key, place

    def since(self, key: Key, version: int) -> list[Event]:
        """Events after `version`, oldest first."""
        return [event for event in self._history.get(key, ()) if event.version > version]

    def is_too_old(self, version: int) -> bool:
        """Whether events after `version` may be forgotten already."""
        return version < self.oldest

    def compact(self) -> None:
        """Forget all history: every version before the present one is too old from now on."""
        self.oldest = self.version
        self._history.clear()

    def listen(self, key: Key, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with each event of a kind; returns what ends that."""
        listeners = self._listeners.setdefault(key, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    def _publish(self, key: Key, event: Event) -> None:
        history = self._history.setdefault(key, deque())
        history.append(event)
        if len(history) > HISTORY:
            self.oldest = max(self.oldest, history.popleft().version)
        for listener in list(self._listeners.get(key, ())):
            listener(event)

    def _index(self, key: Key, place: Place, before: Stored | None, now: Stored | None) -> None:
        if now is not None:
            self._uids[now.body["metadata"]["uid"]] = (key, place)
        elif before is not None:
            self._uids.pop(before.body["metadata"]["uid"], None)
        old, new = _owners(before), _owners(now)
        for uid in old - new:
            self._owned[uid].discard((key, place))
        for uid in new - old:
            self._owned.setdefault(uid, set()).add((key, place))


def _owners(stored: Stored | None) -> set[str]:
    if stored is None:
        return set()
    return {reference["uid"] for reference in stored.body["metadata"].get("ownerReferences") or ()}

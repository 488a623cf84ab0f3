"""Get, list and watch."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.fakes.kubernetes import selectors
from tests.fakes.kubernetes.faults import Faults
from tests.fakes.kubernetes.kinds import Resource
from tests.fakes.kubernetes.problems import Refused, not_found
from tests.fakes.kubernetes.store import Event, Place, Store, Stored

Json = dict[str, Any]
BOOKMARK_S = 60.0
WATCH_S = 1800.0
"""How long a watch lives that does not say (a real server takes a random time above this)."""


class Reader:
    """Reads from a store. Owner: the server's event loop."""

    def __init__(self, store: Store, faults: Faults) -> None:
        self._store = store
        self._faults = faults
        self.bookmark_s = BOOKMARK_S
        self._watches: set[Watch] = set()

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def get(self, resource: Resource, namespace: str, name: str) -> Stored:
        """Raises Refused 404."""
        stored = self._store.get(resource.key, (namespace, name))
        if stored is None:
            raise not_found(resource.plural, resource.group, name)
        return stored

    def select(self, resource: Resource, query: Mapping[str, str]) -> selectors.Match | None:
        """The request's selectors as one test. Raises Refused 400."""
        labels = selectors.label_match(query.get("labelSelector", ""))
        return selectors.both(
            labels, selectors.field_match(query.get("fieldSelector", ""), resource.plural)
        )

    def list(self, resource: Resource, namespace: str | None, query: Mapping[str, str]) -> bytes:
        """The list's document. Raises Refused: 410 for a version that is too old."""
        match = self.select(resource, query)
        version, start = self._store.version, None
        asked = _version(query)
        if asked > version:
            raise Refused(
                504,
                f"Too large resource version: {asked}, current: {version}",
                details={"retryAfterSeconds": 1},
            )
        if asked and query.get("resourceVersionMatch") == "Exact" and self._store.is_too_old(asked):
            raise Refused(410, f"The resourceVersion for the provided list is too old: {asked}")
        if query.get("continue"):
            version, start = self._continued(query["continue"])
        found = self._store.all(resource.key, namespace)
        items = [
            (place, one)
            for place, one in found
            if (match is None or match(one.body)) and (start is None or place > start)
        ]
        metadata: Json = {"resourceVersion": str(version)}
        limit = int(query.get("limit") or 0)
        if limit and len(items) > limit:
            metadata["remainingItemCount"] = len(items) - limit
            items = items[:limit]
            metadata["continue"] = _token(version, items[-1][0])
        head = {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
        }
        return (
            json.dumps(head).encode()[:-1]
            + b', "items": ['
            + b",".join(one.data for _, one in items)
            + b"]}"
        )

    def _continued(self, token: str) -> tuple[int, Place]:
        try:
            version, namespace, name = json.loads(base64.urlsafe_b64decode(token))
        except (binascii.Error, ValueError) as e:
            raise Refused(400, "continue key is not valid") from e
        if self._store.is_too_old(version):
            raise Refused(
                410,
                "The provided continue parameter is too old to display a consistent list result.",
            )
        return version, (namespace, name)

    def watch(self, resource: Resource, namespace: str | None, query: Mapping[str, str]) -> Watch:
        """A watch that is already listening. Raises Refused 410 where the faults say so."""
        asked = _version(query)
        too_old = bool(asked) and self._store.is_too_old(asked)
        if too_old and self._faults.watch_gone_as_status:
            raise Refused(
                410, f"too old resource version: {asked} ({self._store.oldest})", reason="Gone"
            )
        watch = Watch(self, self._store, (resource, namespace), self.select(resource, query), query)
        if too_old:
            watch.expire()
        else:
            watch.begin(asked)
        self._watches.add(watch)
        return watch

    def forget(self, watch: Watch) -> None:
        """It is over."""
        self._watches.discard(watch)

    def expire_watches(self) -> None:
        """410 into every open watch."""
        for watch in list(self._watches):
            watch.expire()

    def life_s(self, query: Mapping[str, str]) -> tuple[float, bool]:
        """How long a watch may live, and whether its end is a cut connection."""
        wanted = float(query.get("timeoutSeconds") or WATCH_S)
        cut = self._faults.cut_watches_every_s
        return (cut, True) if cut is not None and cut < wanted else (wanted, False)


class Watch:
    """One watch: an async iterator of lines. `was_cut`: the connection is to be cut at the end."""

    def __init__(
        self,
        reader: Reader,
        store: Store,
        scope: tuple[Resource, str | None],
        match: selectors.Match | None,
        query: Mapping[str, str],
    ) -> None:
        self._reader = reader
        self._store = store
        self._resource, self._namespace = scope
        self._match = match
        self._bookmarks = query.get("allowWatchBookmarks") in ("true", "1", "True")
        self._initial = query.get("sendInitialEvents") in ("true", "True")
        self._life_s, self._cuts = reader.life_s(query)
        self._lines: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._over = False
        self.was_cut = False
        self._stop = store.listen(self._resource.key, self._seen)

    def begin(self, version: int) -> None:
        """From this version; 0 = with what is there."""
        if version and not self._initial:
            for event in self._store.since(self._resource.key, version):
                self._seen(event)
            return
        for _, stored in self._store.all(self._resource.key, self._namespace):
            if self._match is None or self._match(stored.body):
                self._say("ADDED", stored.data)
        if self._initial and self._bookmarks:
            self._bookmark({"k8s.io/initial-events-end": "true"})

    def expire(self) -> None:
        """End with 410."""
        status = Refused(410, f"too old resource version: ({self._store.oldest})").document()
        self._say("ERROR", json.dumps(status).encode())
        self._over = True

    def close(self) -> None:
        """The client is gone, or the server."""
        self._over = True
        self._wake.set()
        self._stop_listening()

    def _stop_listening(self) -> None:
        stop, self._stop = self._stop, lambda: None
        stop()
        self._reader.forget(self)

    def _seen(self, event: Event) -> None:
        if self._namespace is not None and event.place[0] != self._namespace:
            return
        kind = event.kind
        if self._match is not None:
            now = event.kind != "DELETED" and self._match(event.now.body)
            before = event.before is not None and self._match(event.before.body)
            if not now and not before:
                return
            kind = "DELETED" if not now else ("MODIFIED" if before else "ADDED")
        self._say(kind, event.now.data)

    def _say(self, kind: str, data: bytes) -> None:
        self._lines.append(b'{"type":"%s","object":%s}\n' % (kind.encode(), data))
        self._wake.set()

    def _bookmark(self, annotations: Mapping[str, str] | None = None) -> None:
        metadata: Json = {"resourceVersion": str(self._store.version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = dict(annotations)
        body = {
            "kind": self._resource.kind,
            "apiVersion": self._resource.api_version,
            "metadata": metadata,
        }
        self._say("BOOKMARK", json.dumps(body).encode())

    async def lines(self) -> AsyncIterator[bytes]:
        """Events as they come, joined where there are several, until the watch's time is over."""
        end = time.monotonic() + self._life_s
        try:
            while not (self._over and not self._lines):
                if self._lines:
                    joined = b"".join(self._lines)
                    self._lines.clear()
                    yield joined
                    continue
                rest_s = end - time.monotonic()
                if rest_s <= 0:
                    self.was_cut = self._cuts
                    if self._bookmarks and not self._cuts:
                        self._bookmark()
                        yield self._lines.popleft()
                    return
                await self._wait(min(rest_s, self._reader.bookmark_s))
        finally:
            self._stop_listening()

    async def _wait(self, longest_s: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(longest_s):
                await self._wake.wait()
        except TimeoutError:
            if self._bookmarks and longest_s >= self._reader.bookmark_s:
                self._bookmark()


def _version(query: Mapping[str, str]) -> int:
    text = query.get("resourceVersion") or "0"
    if not text.isdigit():
        raise Refused(400, f'Invalid value: "{text}": resourceVersion: Invalid value')
    return int(text)


def _token(version: int, place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps([version, *place]).encode()).decode()

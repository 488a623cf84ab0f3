"""What all controllers share: a view of the cluster that watches keep, and a queue of things to
look at again."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import aiohttp

from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import AlreadyExists, ClusterError, NotFound
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.watch_events import WatchChange
from tests.fakes.kubernetes.raw import RawClient

Json = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name)."""
log = logging.getLogger(__name__)
AGAIN_S = 0.1
SYNC_S = 30.0


class View:
    """Everything of some kinds. Owner: the event loop; a context manager."""

    def __init__(self, cluster: Cluster, raw: RawClient, kinds: Iterable[Kind]) -> None:
        self.cluster = cluster
        self._raw = raw
        self._reflectors = {kind: Reflector(cluster, kind) for kind in kinds}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for reflector in self._reflectors.values():
            await self._stack.enter_async_context(reflector)
        for reflector in self._reflectors.values():
            await reflector.wait_synced(SYNC_S)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._stack.aclose()

    def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """The object, as it was last seen."""
        return self._reflectors[kind].get(name, namespace)

    def items(self, kind: Kind, namespace: str | None = None) -> Sequence[Json]:
        """Objects, as they were last seen."""
        return self._reflectors[kind].items(namespace)

    def on(self, kind: Kind, listener: Callable[[Json], None]) -> None:
        """Call `listener` with each object that comes, changes or goes; with those that are there,
        too."""
        self._reflectors[kind].subscribe(
            lambda change: listener(change.object) if change.type != "SYNCED" else None
        )
        for item in self._reflectors[kind].items():
            listener(item)

    def changes(self, kind: Kind, listener: Callable[[WatchChange], None]) -> None:
        """As `on`, with what happened to it."""
        self._reflectors[kind].subscribe(listener)

    async def create(self, manifest: Json) -> Json | None:
        """Make an object; None: somebody has."""
        try:
            return await self.cluster.create(manifest)
        except AlreadyExists:
            return None

    async def patch(self, kind: Kind, item: Json, body: Json, *, subresource: str = "") -> None:
        """Merge into an object; one that is gone is no matter."""
        metadata = item["metadata"]
        try:
            await self.cluster.patch(
                kind, metadata["name"], metadata.get("namespace"), body, subresource=subresource
            )
        except NotFound:
            pass

    async def bind(self, namespace: str, name: str, target: Json) -> bool:
        """Give a pod its node; False: it has none yet (one that is gone, or has one, is no
        matter)."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        try:
            answer = await self._raw.ask(
                "POST", path, {"target": target, "metadata": {"name": name}}
            )
        except (aiohttp.ClientError, TimeoutError):
            return False
        return answer.status in (201, 404, 409)

    async def set_status(self, kind: Kind, item: Json, status: Json) -> None:
        """Write the status, where it differs. Conditions keep the time since which they are as they
        are."""
        old = item.get("status") or {}
        status = {
            **status,
            "conditions": _dated(
                old.get("conditions") or (), status.get("conditions") or (), now()
            ),
        }
        if any(old.get(key) != value for key, value in status.items()):
            await self.patch(kind, item, {"status": status}, subresource="status")


def now() -> str:
    """The time as Kubernetes writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _dated(old: Sequence[Json], new: Sequence[Json], at: str) -> list[Json]:
    known = {one["type"]: one for one in old}
    found = []
    for one in new:
        before = known.get(one["type"], {})
        since = (
            before.get("lastTransitionTime", at) if before.get("status") == one["status"] else at
        )
        found.append({**one, "lastTransitionTime": since})
    return found


class Controller:
    """A queue of keys and one worker. What fails is looked at again a little later. Owner: the
    event loop."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._queue: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._queue)} to look at>"

    async def reconcile(self, namespace: str, name: str) -> None:
        """Bring one thing to what it should be."""
        raise NotImplementedError

    def enqueue(self, item: Json) -> None:
        """Look at this object."""
        metadata = item["metadata"]
        self.look_at((metadata.get("namespace", ""), metadata["name"]))

    def enqueue_owner(self, kind: str) -> Callable[[Json], None]:
        """Look at the owner of that kind."""

        def listener(item: Json) -> None:
            for owner in item["metadata"].get("ownerReferences") or ():
                if owner["kind"] == kind:
                    self.look_at((item["metadata"].get("namespace", ""), owner["name"]))

        return listener

    def look_at(self, key: Key) -> None:
        """Look at this key soon."""
        self._queue[key] = None
        self._wake.set()

    def later(self, key: Key, seconds: float) -> None:
        """Look at this key after a while."""
        if key in self._timers:
            self._timers[key].cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.look_at, key)

    async def run(self) -> None:
        """Work, for ever."""
        try:
            while True:
                while self._queue:
                    key = next(iter(self._queue))
                    del self._queue[key]
                    try:
                        await self.reconcile(*key)
                    except ClusterError as e:
                        log.info("again controller=%s key=%s error=%s", type(self).__name__, key, e)
                        self.later(key, AGAIN_S)
                self._wake.clear()
                await self._wake.wait()
        finally:
            for timer in self._timers.values():
                timer.cancel()


def owned(kind: Kind, owner_kind: Kind, owner: Json, name: str, **metadata: Any) -> Json:
    """The beginning of an object that belongs to another in the same namespace."""
    its = owner["metadata"]
    reference = {
        "apiVersion": owner_kind.api_version,
        "kind": owner_kind.kind,
        "name": its["name"],
        "uid": its["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    found = {
        "name": name,
        "namespace": its["namespace"],
        "ownerReferences": [reference],
        **metadata,
    }
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": found}


def condition(kind: str, status: bool | None, reason: str = "", message: str = "") -> Json:
    """One condition; None = unknown."""
    found: Json = {"type": kind, "status": "Unknown" if status is None else str(status)}
    return (
        found | ({"reason": reason} if reason else {}) | ({"message": message} if message else {})
    )


def condition_of(item: Mapping[str, Any] | None, kind: str) -> Json:
    """A condition of an object; {} = it has none."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def controlled_by(item: Json, owner: Json) -> bool:
    """Whether `owner` controls it."""
    references = item["metadata"].get("ownerReferences") or ()
    return any(
        one.get("controller") and one["uid"] == owner["metadata"]["uid"] for one in references
    )

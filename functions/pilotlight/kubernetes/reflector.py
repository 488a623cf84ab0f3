"""A local cache of one kind, updated by a watch, for the reconciler, the activators and the
autoscaler.

    async with Reflector(cluster, POD, selector="pilotlight.dev/function-id") as pods:
        await pods.wait_synced(30)
        pods.store.get("embed-abc", "fn-acme")

Reads make no call. While the API server is unreachable, the cache keeps its last state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from pilotlight.core.threads import cancel_and_wait
from pilotlight.kubernetes.errors import ClusterError, ClusterUnreachable
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import Key, Object, WatchChange, key_of

if TYPE_CHECKING:
    from pilotlight.kubernetes.cluster import Cluster

__all__ = ["Index", "Reflector", "Store", "WatchChange", "key_of"]

logger = logging.getLogger(__name__)

Index = Callable[[Object], Iterable[str]]
_AGAIN_S = 15.0  # between attempts while a right or a kind is missing, which an operator must add


class Store:
    """Objects by (namespace, name) and by indexes. Written only by its Reflector and read in the
    same event loop, so no lock is needed."""

    def __init__(self, indexes: Mapping[str, Index] | None = None) -> None:
        """`indexes`: name → the values under which an object is found with `by`."""
        self._indexes = dict(indexes or {})
        self._objects: dict[Key, Object] = {}
        self._found: dict[str, dict[str, dict[Key, None]]] = {name: {} for name in self._indexes}

    def __repr__(self) -> str:
        return f"<Store {len(self._objects)}>"

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None."""
        return self._objects.get((namespace or "", name))

    def items(self, namespace: str | None = None) -> Sequence[Object]:
        """All objects, or those of a namespace, in the order of arrival."""
        return [
            item
            for (where, _), item in self._objects.items()
            if namespace is None or where == namespace
        ]

    def by(self, index: str, value: str) -> Sequence[Object]:
        """Objects that the index has under `value`."""
        return [self._objects[key] for key in self._found[index].get(value, ())]

    def apply(self, change: WatchChange) -> None:
        """Apply one change."""
        if change.type == "SYNCED":
            return
        key = change.key
        old = self._objects.pop(key, None) if change.type == "DELETED" else self._objects.get(key)
        if old is not None:
            self._unfile(key, old)
        if change.type != "DELETED":
            self._objects[key] = change.object
            self._file(key, change.object)

    def _file(self, key: Key, item: Object) -> None:
        for name, values in self._indexes.items():
            for value in values(item):
                self._found[name].setdefault(value, {})[key] = None

    def _unfile(self, key: Key, item: Object) -> None:
        for name, values in self._indexes.items():
            for value in values(item):
                keys = self._found[name].get(value, {})
                keys.pop(key, None)
                if not keys:
                    self._found[name].pop(value, None)


class Reflector:
    """Keeps a `Store` up to date. A context manager that runs its own task; or run `run()` in
    yours."""

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        *,
        namespace: str | None = None,
        selector: str = "",
        indexes: Mapping[str, Index] | None = None,
        on_change: Callable[[WatchChange], None] | None = None,
    ) -> None:
        """Arguments of the watch as in `Cluster.watch`.

        Args:
            on_change: called in the event loop after the store has a change (including SYNCED); it
                must not block.
        """
        self.store = Store(indexes)
        self.kind = kind
        self.error: ClusterError | None = None
        self._cluster = cluster
        self._namespace, self._selector = namespace, selector
        self._listeners: list[Callable[[WatchChange], None]] = (
            [on_change] if on_change is not None else []
        )
        self._synced = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = (
            "synced" if self.is_synced else f"waiting ({self.error})" if self.error else "waiting"
        )
        return f"<Reflector {self.kind} {len(self.store)} {state}>"

    @property
    def is_synced(self) -> bool:
        """Whether the store has been complete at least once."""
        return self._synced.is_set()

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None."""
        return self.store.get(name, namespace)

    def items(self, namespace: str | None = None) -> Sequence[Object]:
        """All objects, or those of a namespace."""
        return self.store.items(namespace)

    def by(self, index: str, value: str) -> Sequence[Object]:
        """Objects that an index has under `value`."""
        return self.store.by(index, value)

    def subscribe(self, listener: Callable[[WatchChange], None]) -> Callable[[], None]:
        """Call `listener` for every further change; returns a function that unsubscribes it."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until the store has been complete once.

        Raises:
            ClusterError: it was not within `timeout_s`; with the cause if known.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            raise self.error or ClusterUnreachable(
                f"no listing of {self.kind} within {timeout_s:g} s"
            ) from None

    async def run(self) -> None:
        """Watch the kind until cancelled. If a right or the kind is missing, wait for it."""
        while True:
            try:
                async with contextlib.aclosing(self._watch()) as changes:
                    async for change in changes:
                        self._apply(change)
            except ClusterError as error:
                self.error = error
                logger.warning("watch refused kind=%s error=%s", self.kind, error)
                await self._cluster.pause(_AGAIN_S)

    def _watch(self) -> AsyncGenerator[WatchChange, None]:
        return self._cluster.watch(self.kind, self._namespace, self._selector)

    def _apply(self, change: WatchChange) -> None:
        self.store.apply(change)
        if change.type == "SYNCED":
            self.error = None
            self._synced.set()
        for listener in tuple(self._listeners):
            listener(change)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name=f"reflector {self.kind}")
        self._task.add_done_callback(_report)
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("reflector died task=%s", task.get_name(), exc_info=error)

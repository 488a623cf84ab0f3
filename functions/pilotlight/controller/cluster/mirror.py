"""What is there of ours in the cluster: caches of every kind that we apply, kept by watches, so that comparing costs no call.

A watch lags behind our own writes. What a write answered is remembered until the cache has caught up, so nothing is written twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from pilotlight.cluster import kinds, names
from pilotlight.cluster.api import Cluster
from pilotlight.cluster.changes import Change, Object, version_of
from pilotlight.cluster.kinds import Kind
from pilotlight.cluster.watch import Reflector

KINDS: tuple[Kind, ...] = (
    kinds.NAMESPACE,
    kinds.SERVICE_ACCOUNT,
    kinds.NETWORK_POLICY,
    kinds.LIMIT_RANGE,
    kinds.RESOURCE_QUOTA,
    kinds.SECRET,
    kinds.CONFIG_MAP,
    kinds.POD_DISRUPTION_BUDGET,
    kinds.SERVICE,
    kinds.REVISION,
)
_FUNCTION = "function"


class Mirror:
    """Ours, of every kind. A context manager. Owner: one event loop."""

    def __init__(self, cluster: Cluster, *, on_change: Callable[[Kind, Change], None]) -> None:
        selector = f"{names.MANAGED_BY}={names.manager_of(cluster.settings)}"
        self._written: dict[tuple[Kind, str, str], Object] = {}
        self._on_change = on_change
        self._reflectors = {
            kind: Reflector(cluster, kind, selector=selector, indexes={_FUNCTION: _functions}, on_change=self._listener(kind))
            for kind in KINDS
        }
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Mirror {', '.join(repr(one) for one in self._reflectors.values())}>"

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        for reflector in self._reflectors.values():
            await self._stack.enter_async_context(reflector)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._stack.aclose()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until everything was listed once. Raises ClusterError: why that does not happen."""
        await asyncio.gather(*(reflector.wait_synced(timeout_s) for reflector in self._reflectors.values()))

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The newest that we know of an object; None = it is not there, or not ours."""
        cached = self._reflectors[kind].get(name, namespace)
        written = self._written.get((kind, namespace or "", name))
        if written is not None and (cached is None or is_older(cached, written)):
            return written
        return cached

    def of_function(self, kind: Kind, function: str) -> list[Object]:
        """What belongs to the function with that id, in any namespace."""
        return list(self._reflectors[kind].by(_FUNCTION, function))

    def items(self, kind: Kind) -> Iterable[Object]:
        """Everything of a kind."""
        return self._reflectors[kind].items()

    def functions(self) -> Iterator[str]:
        """Ids of all functions of which there is anything."""
        for kind in KINDS:
            for item in self._reflectors[kind].items():
                yield from _functions(item)

    def note(self, kind: Kind, item: Object) -> None:
        """What a write answered."""
        metadata = item["metadata"]
        self._written[kind, metadata.get("namespace") or "", metadata["name"]] = item

    def forget(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """It was deleted."""
        self._written.pop((kind, namespace or "", name), None)

    def _listener(self, kind: Kind) -> Callable[[Change], None]:
        def changed(change: Change) -> None:
            if change.type != "SYNCED":
                at = (kind, *change.key)
                written = self._written.get(at)
                if written is not None and (change.type == "DELETED" or not is_older(change.object, written)):
                    del self._written[at]
            self._on_change(kind, change)
            if change.type == "SYNCED":
                self._miss(kind)

        return changed

    def _miss(self, kind: Kind) -> None:
        """What was written and is not in a whole listing was deleted while the watch was cut: it would be told by nobody. Should the
        listing be the older one, what is there is looked at once more."""
        for at, item in [(at, item) for at, item in self._written.items() if at[0] == kind]:
            if self._reflectors[kind].get(at[2], at[1] or None) is None:
                del self._written[at]
                self._on_change(kind, Change("DELETED", item))


def is_older(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` is an earlier version of the same object (KEP-5504: versions of a resource compare as numbers)."""
    a, b = version_of(one), version_of(other)
    if a.isdigit() and b.isdigit():
        return int(a) < int(b)
    return a != b


def _functions(item: Object) -> list[str]:
    function = item["metadata"].get("labels", {}).get(names.FUNCTION_ID)
    return [str(function)] if function else []

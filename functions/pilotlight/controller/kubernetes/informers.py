"""Informer caches of this platform's objects of every kind, kept current by watches, so that
comparison needs no request.

A watch lags behind our own writes. The response to a write is kept until the cache has caught up,
so that nothing is written twice.

Secrets are read in tenants' namespaces only: permission to list them in the whole cluster would
expose every credential in it. Each namespace in which the controller has rights (by a RoleBinding
of ours) has its own watch for secrets; every other kind has one for the whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.manifests.tenant_namespace import CONTROLLER_BINDING
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.watch_events import Object, WatchChange, version_of

KINDS: tuple[Kind, ...] = (
    kinds.NAMESPACE,
    kinds.ROLE_BINDING,
    kinds.SERVICE_ACCOUNT,
    kinds.NETWORK_POLICY,
    kinds.LIMIT_RANGE,
    kinds.RESOURCE_QUOTA,
    kinds.CONFIG_MAP,
    kinds.POD_DISRUPTION_BUDGET,
    kinds.SERVICE,
    kinds.REVISION,
)
"""Kinds watched in the whole cluster."""
_FUNCTION = "function"


class Informers:
    """Informers for all kinds. A context manager. Owner: one event loop."""

    def __init__(self, cluster: Cluster, *, on_change: Callable[[Kind, WatchChange], None]) -> None:
        selector = f"{names.MANAGED_BY}={names.manager_of(cluster.settings)}"
        self._cluster = cluster
        self._selector = selector
        self._written: dict[tuple[Kind, str, str], Object] = {}
        self._on_change = on_change
        self._reflectors = {
            kind: Reflector(
                cluster,
                kind,
                selector=selector,
                indexes={_FUNCTION: _functions},
                on_change=self._listener(kind),
            )
            for kind in KINDS
        }
        self._secrets: dict[str, Reflector] = {}
        self._tasks = asyncio.TaskGroup()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return (
            f"<Informers {', '.join(repr(one) for one in self._reflectors.values())}, secrets of "
            f"{len(self._secrets)} namespaces>"
        )

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        await self._stack.enter_async_context(self._tasks)
        # runs after the watch of RoleBindings, which starts the secrets' watches, has ended
        self._stack.callback(self._stop_all_secrets)
        for reflector in self._reflectors.values():
            await self._stack.enter_async_context(reflector)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._stack.aclose()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until every kind was listed once. Raises ClusterError with the cause if it was
        not."""
        await asyncio.gather(
            *(reflector.wait_synced(timeout_s) for reflector in self._reflectors.values())
        )

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """Return the newest known version of an object; None if it does not exist or is not
        ours."""
        cached = self._cached(kind, name, namespace)
        written = self._written.get((kind, namespace or "", name))
        if written is not None and (cached is None or is_older(cached, written)):
            return written
        return cached

    def of_function(self, kind: Kind, function: str) -> list[Object]:
        """Return the objects of the function with that id, in any namespace."""
        return list(self._reflectors[kind].by(_FUNCTION, function))

    def items(self, kind: Kind) -> Iterable[Object]:
        """Return all objects of a kind other than secrets (see `secrets`)."""
        return self._reflectors[kind].items()

    def secrets(self, namespace: str) -> Iterable[Object]:
        """Return our secrets in a namespace, as far as they have been listed."""
        reflector = self._secrets.get(namespace)
        return reflector.items() if reflector is not None else ()

    def functions(self) -> Iterator[str]:
        """Yield the ids of all functions that have objects."""
        for kind in KINDS:
            for item in self._reflectors[kind].items():
                yield from _functions(item)

    def note(self, kind: Kind, item: Object) -> None:
        """Keep the response to a write."""
        metadata = item["metadata"]
        self._written[kind, metadata.get("namespace") or "", metadata["name"]] = item

    def forget(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """Forget an object that was deleted."""
        self._written.pop((kind, namespace or "", name), None)

    def _cached(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        reflector = (
            self._secrets.get(namespace or "") if kind == kinds.SECRET else self._reflectors[kind]
        )
        return reflector.get(name, namespace) if reflector is not None else None

    def _listener(self, kind: Kind, namespace: str | None = None) -> Callable[[WatchChange], None]:
        """`namespace`: the only one watched; None = all."""

        def changed(change: WatchChange) -> None:
            if change.type != "SYNCED":
                at = (kind, *change.key)
                written = self._written.get(at)
                if written is not None and (
                    change.type == "DELETED" or not is_older(change.object, written)
                ):
                    del self._written[at]
            self._follow_secrets(kind, change)
            self._on_change(kind, change)
            if change.type == "SYNCED":
                self._miss(kind, namespace)

        return changed

    def _follow_secrets(self, kind: Kind, change: WatchChange) -> None:
        """Watch a namespace's secrets from the controller's RoleBinding to the namespace's end."""
        if kind == kinds.ROLE_BINDING and change.type in ("ADDED", "MODIFIED"):
            namespace, name = change.key
            if name == CONTROLLER_BINDING and namespace not in self._secrets:
                listener = self._listener(kinds.SECRET, namespace)
                self._secrets[namespace] = Reflector(
                    self._cluster,
                    kinds.SECRET,
                    namespace=namespace,
                    selector=self._selector,
                    on_change=listener,
                )
                self._watching[namespace] = self._tasks.create_task(
                    self._secrets[namespace].run(), name=f"secrets of {namespace}"
                )
        elif kind == kinds.NAMESPACE and change.type == "DELETED":
            self._stop_secrets(change.key[1])

    def _stop_secrets(self, namespace: str) -> None:
        if self._secrets.pop(namespace, None) is not None:
            self._watching.pop(namespace).cancel()
            for at in [at for at in self._written if at[:2] == (kinds.SECRET, namespace)]:
                del self._written[at]

    def _stop_all_secrets(self) -> None:
        for namespace in list(self._secrets):
            self._stop_secrets(namespace)

    def _miss(self, kind: Kind, namespace: str | None) -> None:
        """Report written objects that a full listing lacks as deleted: they were deleted while the
        watch was interrupted, so no event reports them. If the listing is older than the write, the
        object is merely reconciled once more."""
        written = [
            (at, item)
            for at, item in self._written.items()
            if at[0] == kind and namespace in (None, at[1])
        ]
        for at, item in written:
            if self._cached(kind, at[2], at[1] or None) is None:
                del self._written[at]
                self._on_change(kind, WatchChange("DELETED", item))


def is_older(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` is an earlier version of the same object (KEP-5504: resource versions compare
    as numbers)."""
    a, b = version_of(one), version_of(other)
    if a.isdigit() and b.isdigit():
        return int(a) < int(b)
    return a != b


def _functions(item: Object) -> list[str]:
    function = item["metadata"].get("labels", {}).get(names.FUNCTION_ID)
    return [str(function)] if function else []

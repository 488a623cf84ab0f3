"""What is there of ours in the cluster: caches of every kind that we apply, kept by watches, so
that comparing costs no call.

A watch lags behind our own writes. What a write answered is remembered until the cache has caught
up, so nothing is written twice.

Secrets are read in tenants' namespaces only: whoever may list them in the whole cluster has every
credential in it. Each namespace of ours in which the controller has rights (a RoleBinding of ours)
has a watch of its own; all other kinds have one for the whole cluster."""

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
"""Watched in the whole cluster."""
_FUNCTION = "function"


class Informers:
    """Ours, of every kind. A context manager. Owner: one event loop."""

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
        # after the watch of RoleBindings, which begins them
        self._stack.callback(self._stop_all_secrets)
        for reflector in self._reflectors.values():
            await self._stack.enter_async_context(reflector)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._stack.aclose()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until everything was listed once. Raises ClusterError: why that does not happen."""
        await asyncio.gather(
            *(reflector.wait_synced(timeout_s) for reflector in self._reflectors.values())
        )

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The newest that we know of an object; None = it is not there, or not ours."""
        cached = self._cached(kind, name, namespace)
        written = self._written.get((kind, namespace or "", name))
        if written is not None and (cached is None or is_older(cached, written)):
            return written
        return cached

    def of_function(self, kind: Kind, function: str) -> list[Object]:
        """What belongs to the function with that id, in any namespace."""
        return list(self._reflectors[kind].by(_FUNCTION, function))

    def items(self, kind: Kind) -> Iterable[Object]:
        """Everything of a kind; no secrets, of which `secrets` tells."""
        return self._reflectors[kind].items()

    def secrets(self, namespace: str) -> Iterable[Object]:
        """Secrets of ours in a namespace, as far as they have been listed."""
        reflector = self._secrets.get(namespace)
        return reflector.items() if reflector is not None else ()

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

    def _cached(self, kind: Kind, name: str, namespace: str | None) -> Object | None:
        reflector = (
            self._secrets.get(namespace or "") if kind == kinds.SECRET else self._reflectors[kind]
        )
        return reflector.get(name, namespace) if reflector is not None else None

    def _listener(self, kind: Kind, namespace: str | None = None) -> Callable[[WatchChange], None]:
        """`namespace`: the only one that is watched; None = all."""

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
        """From the controller's RoleBinding in a namespace to the end of the namespace."""
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
        """What was written and is not in a whole listing was deleted while the watch was cut: it
        would be told by nobody. Should the listing be the older one, what is there is looked at
        once more."""
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
    """Whether `one` is an earlier version of the same object (KEP-5504: versions of a resource
    compare as numbers)."""
    a, b = version_of(one), version_of(other)
    if a.isdigit() and b.isdigit():
        return int(a) < int(b)
    return a != b


def _functions(item: Object) -> list[str]:
    function = item["metadata"].get("labels", {}).get(names.FUNCTION_ID)
    return [str(function)] if function else []

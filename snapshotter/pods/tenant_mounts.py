"""Code and weights that one tenant's pods hold on this node, linked in the tenant's directory as
long as a pod needs them.

The first pod that requests an item creates it, others wait for it; when the last one exits it is
removed, and the lease of weights closed. A lease belongs to the tenant, not to a pod: a request
after a restart of the agent returns the same lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.errors import NoCapacity
from snapshotter.linux import atomic_directory
from snapshotter.pods import hardlinks
from snapshotter.slots.launch_plan import BundleStore
from weight_cache.errors import LeaseUnknown, WeightCacheError, WeightCacheUnavailable
from weight_cache.types import Lease, LoadProgress, OpenedLease, WeightsLease

_log = logging.getLogger(__name__)
MAX_HELD = 64
"""Maximum number of different bundles, and of different weights, that one tenant's pods may hold on
one node."""
BUNDLES, WEIGHTS = "bundles", "weights"
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses between requests to a weight cache that does not answer: it is restarted at once, and
within 5 s after several crashes."""

Say = Callable[[str], None]


class PodWeights(Protocol):
    """The methods of `weight_cache.client.WeightCacheClient` that are used."""

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease: ...

    async def wait(
        self, lease_id: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> WeightsLease: ...

    async def close(self, lease_id: str) -> bool: ...

    async def leases(self) -> list[Lease]: ...


@dataclass(eq=False, slots=True, kw_only=True)
class _Item:
    """One bundle or one set of weights.

    Attributes:
        pods: number of pods that hold it.
        listeners: callbacks that receive its progress.
        turn: serializes creation and removal.
    """

    pods: int = 0
    is_shown: bool = False
    listeners: set[Say] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def notify(self, why: str) -> None:
        for report in list(self.listeners):
            report(why)


class TenantMounts:
    """Code and weights of one tenant. Owner: the event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        bundles: BundleStore,
        weights: PodWeights,
        background_tasks: BackgroundTasks,
    ) -> None:
        """`directory`: the tenant's, named by its id."""
        self.directory = self._directory = directory
        self._bundles = bundles
        self._weights = weights
        self._background_tasks = background_tasks
        self._items: dict[tuple[str, str], _Item] = {}
        self._is_detached = False

    def __repr__(self) -> str:
        return f"<TenantMounts {self._directory.name} {len(self._items)} items>"

    @property
    def holder(self) -> str:
        """Holder of this tenant's leases."""
        return holder_of(self._directory.name)

    def is_held(self, kind: str, name: str) -> bool:
        """Whether a pod holds it, or it is being removed."""
        return (kind, name) in self._items

    def detach(self) -> None:
        """Prepare the agent's shutdown: pods keep running, so what they hold remains for the next
        agent."""
        self._is_detached = True

    @contextlib.asynccontextmanager
    async def code(self, digest: str, report: Say) -> AsyncIterator[str]:
        """Provide a bundle while the context lasts; yields its path below the tenant's directory.
        Raises BundleUnavailable, NoCapacity, OSError."""
        async with self._provide(BUNDLES, digest, report) as place:
            yield place

    @contextlib.asynccontextmanager
    async def weights(self, manifest: str, report: Say) -> AsyncIterator[str]:
        """The same for weights. Raises WeightCacheError, Unsupported, NoCapacity, OSError."""
        async with self._provide(WEIGHTS, manifest, report) as place:
            yield place

    async def sweep(self) -> int:
        """Remove items in the directory that no pod holds, left by an earlier agent; returns how
        many."""
        swept = 0
        for kind in (BUNDLES, WEIGHTS):
            folder = self._directory / kind
            await asyncio.to_thread(atomic_directory.sweep, folder)
            for entry in list(folder.iterdir()) if folder.is_dir() else ():
                if not entry.name.startswith(".") and not self.is_held(kind, entry.name):
                    # a pod that requests it in the meantime waits for the lock
                    item = self._items[kind, entry.name] = _Item()
                    await self._release(kind, entry.name, item)
                    swept += not item.pods
        return swept

    @contextlib.asynccontextmanager
    async def _provide(self, kind: str, name: str, report: Say) -> AsyncIterator[str]:
        item = self._items.get((kind, name))
        if item is None:
            if sum(of == kind for of, _ in self._items) >= MAX_HELD:
                raise NoCapacity(
                    f"the tenant's pods already hold {MAX_HELD} different {kind} on this node, "
                    f"the limit",
                    {"resource": kind},
                )
            item = self._items[kind, name] = _Item()
        item.pods += 1
        item.listeners.add(report)
        try:
            async with item.turn:
                if not item.is_shown:
                    await self._make(kind, name, item)
                    item.is_shown = True
            item.listeners.discard(report)
            yield f"{kind}/{name}"
        finally:
            item.listeners.discard(report)
            item.pods -= 1
            if item.pods == 0 and not self._is_detached:
                self._background_tasks.run(
                    self._release(kind, name, item), name=f"remove {kind} {name[:12]}"
                )

    async def _make(self, kind: str, name: str, item: _Item) -> None:
        target = self._directory / kind / name
        if kind == BUNDLES:
            item.notify("unpacking the code")
            source = await self._bundles.ensure(name)
        else:
            source = await self._open_with_retries(name, item)
        await _run_to_completion(_show, source, target, may_copy=kind == BUNDLES)

    async def _open_with_retries(self, manifest: str, item: _Item) -> Path:
        for pause_s in _PAUSES_S:
            try:
                return await self._open(manifest, item)
            except (WeightCacheUnavailable, LeaseUnknown) as e:
                item.notify(f"the weight cache does not answer: {e}")
                await asyncio.sleep(pause_s)
        return await self._open(manifest, item)

    async def _open(self, manifest: str, item: _Item) -> Path:
        opened = await self._weights.open(manifest, holder=self.holder)
        if opened.path is not None:
            return opened.path
        item.notify(f"fetching weights {manifest[:12]}")

        def on_progress(progress: LoadProgress) -> None:
            item.notify(
                f"fetching weights {manifest[:12]}: {_size(progress.done_bytes)} of "
                f"{_size(progress.total_bytes)}"
            )

        return (await self._weights.wait(opened.lease_id, on_progress=on_progress)).path

    async def _release(self, kind: str, name: str, item: _Item) -> None:
        """Remove an item, unless a pod has requested it again. Links are removed before the lease
        is closed, because it protects the files."""
        async with item.turn:
            if item.pods or self._items.get((kind, name)) is not item:
                return
            try:
                await _run_to_completion(hardlinks.remove_links, self._directory / kind / name)
                if kind == WEIGHTS:
                    await self._weights.close(Lease.id_of(name, self.holder))
            except (OSError, WeightCacheError) as e:
                _log.warning(
                    "pods.not_taken_away tenant=%s kind=%s name=%s error=%s",
                    self._directory.name,
                    kind,
                    name[:12],
                    e,
                )
            item.is_shown = False
            if not item.pods:
                del self._items[kind, name]


def holder_of(tenant: str) -> str:
    """Lease holder of a tenant's pods."""
    return f"{HOLDER_PREFIX}{tenant}"


HOLDER_PREFIX = "pods/"


async def _run_to_completion(work: Callable[..., None], *args: Any, **options: Any) -> None:
    """Run `work` in a thread, which cannot be stopped: a cancelled caller waits for its end, so
    that the next operation does not overlap."""
    task = asyncio.create_task(asyncio.to_thread(work, *args, **options))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled
    task.result()


def _show(source: Path, target: Path, *, may_copy: bool) -> None:
    target.parent.mkdir(mode=0o755, exist_ok=True)
    target.parent.chmod(0o755)  # regardless of our umask
    hardlinks.show(source, target, may_copy=may_copy)


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"

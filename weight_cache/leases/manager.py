"""Manages leases: opened immediately, waited for separately, ended by `close` or by the exit of the
holder's process.

    open → (arriving) → ready → closed            by `close`, or by the exit of the holder's process
               └→ failed: the next `wait` raises the reason, the next `open` starts again

`open` starts the fetch and returns; the holder continues its work and waits when it needs the
bytes. A lease counts, and is on disk, from the moment its model is complete (`Store.lease`). After
a restart of this process those leases are restored; leases whose models were still arriving are
lost: their holders get LeaseUnknown and open them again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weight_cache.dram import page_cache
from weight_cache.dram.page_cache import Residency
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.errors import LeaseUnknown, StoreFailed
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.holders import LeaseHolder
from weight_cache.types import (
    Lease,
    LoadProgress,
    OpenedLease,
    Prediction,
    ReadPriority,
    Tier,
    WeightsLease,
)

_log = logging.getLogger(__name__)
_SOON_S = 0.02
"""A complete model is leased within a millisecond. One whose files seem modified is read again
first; `open` does not wait for that."""
_SMALL_BYTES, _FEW_FILES = 256 * 1024**2, 16
"""Models up to this size are inspected on the event loop: 0.05 ms with large folios, below 1 ms
with pages of 4 KiB."""
_FAILED_KEPT = 256
"""Failures kept for a later `wait`."""

OnProgress = Callable[[LoadProgress], None]
OnFetched = Callable[[float, float], None]
"""Called with the predicted and the actual seconds of each fetched model."""


class LeasedStore(Protocol):
    """The part of the store that leases use (`weight_cache.store.store.Store`)."""

    async def lease(
        self,
        manifest: str,
        *,
        holder: str,
        lane: ReadPriority,
        pid: int | None,
        pid_started: int | None,
        on_progress: OnProgress | None,
    ) -> tuple[Lease, Path]: ...

    async def release(self, lease_id: str) -> bool: ...

    def is_here(self, manifest: str) -> bool: ...

    def missing_bytes(self, manifest: str) -> int | None: ...

    def files(self, manifest: str) -> list[Path]: ...

    def path(self, manifest: str) -> Path: ...

    def leases(self) -> list[Lease]: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenLease:
    """One lease from `open` to its end.

    Attributes:
        name, holder: the holder's name, and its watched process.
        found: where the model was when the lease was opened.
        model: done when the model is complete; its directory.
        forecast: predicted seconds of the fetch, and the time of the prediction; None before its
            size is known.
        is_ahead: it counts as a reader in `ReadAhead`.
    """

    id: str
    manifest: str
    name: str
    holder: LeaseHolder | None
    found: asyncio.Future[Prediction]
    model: asyncio.Future[Path] = field(init=False)
    listeners: list[OnProgress] = field(default_factory=list)
    newest: LoadProgress | None = None
    forecast: tuple[float, float] | None = None
    is_ahead: bool = False

    @property
    def remaining_bytes(self) -> int:
        """Bytes still to be fetched, if known."""
        return (
            self.newest.total_bytes - self.newest.done_bytes
            if self.newest is not None and not self.model.done()
            else 0
        )


class LeaseManager:
    """All leases of this node. Owner: one event loop; the dictionaries change between awaits only.

    Attributes:
        served: leases by the tier of their model when they were opened.
    """

    def __init__(
        self,
        store: LeasedStore,
        *,
        bandwidths: TierBandwidths,
        ahead: ReadAhead,
        on_fetched: OnFetched | None = None,
    ) -> None:
        self._store = store
        self._bandwidths = bandwidths
        self._ahead = ahead
        self._on_fetched = on_fetched
        self._open: dict[str, _OpenLease] = {}
        self._failed: OrderedDict[str, _OpenLease] = OrderedDict()
        self._closing: dict[str, asyncio.Task[None]] = {}
        # a separate pool: many fetches fill the default one
        self._lookers = ThreadPoolExecutor(2, thread_name_prefix="residency")
        self.served: Counter[Tier] = Counter()

    def __repr__(self) -> str:
        arriving = sum(not opening.model.done() for opening in self._open.values())
        return f"<LeaseManager {len(self._open)} open, {arriving} of them arriving>"

    async def adopt(self) -> None:
        """Restore the leases granted by an earlier process; end those whose holders have exited."""
        for lease in self._store.leases():
            try:
                holder = (
                    None
                    if lease.pid is None
                    else LeaseHolder.find(lease.pid, started=lease.pid_started)
                )
            except LeaseUnknown as e:
                _log.info("lease.ended id=%s holder=%s reason=%s", lease.id, lease.holder, e)
                await self._store.release(lease.id)
                continue
            except StoreFailed as e:  # keep it: a lease too long is safer than one too short
                _log.warning(
                    "lease.not_watched id=%s holder=%s error=%s", lease.id, lease.holder, e
                )
                holder = None
            found = asyncio.create_task(
                self.predict(lease.manifest), name=f"look at {lease.manifest[:12]}"
            )
            opening = _OpenLease(
                id=lease.id, manifest=lease.manifest, name=lease.holder, holder=holder, found=found
            )
            opening.model = asyncio.get_running_loop().create_future()
            opening.model.set_result(self._store.path(lease.manifest))
            self._add(opening)

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease:
        """Open a lease on a model and start fetching its missing parts; return at once. Idempotent
        per (manifest, holder).

        pid: the process whose exit ends the lease; None: it ends when it is closed. Raises
        LeaseUnknown if that process does not exist. Errors of the model are raised by `wait`."""
        lease_id = Lease.id_of(manifest, holder)
        while (closing := self._closing.get(lease_id)) is not None:
            await asyncio.wait([closing])
        opening = self._open.get(lease_id) or self._begin(lease_id, manifest, holder, pid)
        if _is_good(opening.model) and not self._store.is_here(manifest):
            self._fetch(opening)  # found corrupt during the lease
        found = await asyncio.shield(opening.found)
        if self._store.is_here(manifest):
            await asyncio.wait([opening.model], timeout=_SOON_S)
        path = opening.model.result() if _is_good(opening.model) else None
        return OpenedLease(
            lease_id=lease_id,
            manifest=manifest,
            ready=path is not None,
            tier=found.tier,
            path=path,
            expected_s=found.seconds,
        )

    async def wait(self, lease_id: str, *, on_progress: OnProgress | None = None) -> WeightsLease:
        """Wait until the model is complete. Cancelling it ends neither lease nor fetch.

        Raises LeaseUnknown if there is no such lease, or it is closed meanwhile; ManifestInvalid,
        OriginUnavailable, ChunkCorrupt, StoreFull if the fetch failed, which ends the lease."""
        opening = self._open.get(lease_id) or self._failed.pop(lease_id, None)
        if opening is None:
            raise LeaseUnknown(
                f"no lease {lease_id}: it was closed, or the cache restarted before its model was "
                f"complete. Open it again"
            )
        if on_progress is not None:
            opening.listeners.append(on_progress)
            if opening.newest is not None:
                on_progress(opening.newest)
        try:
            await asyncio.wait([opening.model])
        finally:
            if on_progress is not None:
                opening.listeners.remove(on_progress)
        self._failed.pop(lease_id, None)
        if opening.model.cancelled():
            raise LeaseUnknown(
                f"lease {lease_id} was closed, or its holder exited, before its model was complete"
            )
        path, found = opening.model.result(), await opening.found
        return WeightsLease(
            lease_id=lease_id, manifest=opening.manifest, path=path, tier=found.tier
        )

    async def close(self, lease_id: str) -> bool:
        """Release a lease; cancel a fetch without other waiters. False if there was no such lease;
        closing twice is harmless."""
        self._failed.pop(lease_id, None)
        opening = self._open.get(lease_id)
        if opening is not None:
            self._close_nowait(opening)
        if (closing := self._closing.get(lease_id)) is not None:
            await asyncio.shield(closing)
        return opening is not None

    async def predict(self, manifest: str) -> Prediction:
        """Predict how long a lease opened now would wait until the model is in memory."""
        if self._store.is_here(manifest):
            found = await self._measure_residency(manifest)
            missing = {Tier.NVME: found.absent_bytes}
            return Prediction(
                tier=found.tier, seconds=self._bandwidths.predict(missing), missing=missing
            )
        size = self._store.missing_bytes(manifest)
        if size is None:
            return Prediction(tier=Tier.ORIGIN, seconds=None, missing={})
        missing = {Tier.ORIGIN: size}
        return Prediction(
            tier=Tier.ORIGIN,
            seconds=self._bandwidths.predict(missing, queued_bytes=self._queued(manifest)),
            missing=missing,
        )

    async def aclose(self) -> None:
        """Stop watching and fetching. Leases remain for the next process."""
        arriving = [opening.model for opening in self._open.values() if not opening.model.done()]
        for opening in self._open.values():
            if opening.holder is not None:
                opening.holder.close()
        for model in arriving:
            model.cancel()
        await asyncio.gather(*arriving, *self._closing.values(), return_exceptions=True)
        self._lookers.shutdown()

    def _begin(self, lease_id: str, manifest: str, name: str, pid: int | None) -> _OpenLease:
        holder = None if pid is None else LeaseHolder.find(pid)
        self._failed.pop(lease_id, None)
        found = asyncio.create_task(self.predict(manifest), name=f"look at {manifest[:12]}")
        opening = _OpenLease(id=lease_id, manifest=manifest, name=name, holder=holder, found=found)
        self._fetch(opening)
        self._add(opening)
        return opening

    def _add(self, opening: _OpenLease) -> None:
        self._open[opening.id] = opening
        if opening.holder is not None:
            opening.holder.on_exit(lambda: self._holder_gone(opening))

    def _fetch(self, opening: _OpenLease) -> None:
        opening.model = asyncio.create_task(self._hold(opening), name=f"lease {opening.id}")
        opening.model.add_done_callback(lambda model: self._settled(opening, model))

    async def _hold(self, opening: _OpenLease) -> Path:
        """Acquire the lease from the store."""
        watched = opening.holder
        lease, path = await self._store.lease(
            opening.manifest,
            holder=opening.name,
            lane=ReadPriority.START,
            pid=watched.pid if watched is not None else None,
            pid_started=watched.started if watched is not None else None,
            on_progress=lambda progress: self._progressed(opening, progress),
        )
        if lease.id != opening.id:
            raise LeaseUnknown(f"the store knows lease {opening.id} as {lease.id}")
        return path

    def _settled(self, opening: _OpenLease, model: asyncio.Future[Path]) -> None:
        """Handle the end of a fetch: complete, failed or cancelled."""
        if model.cancelled():
            return
        if (error := model.exception()) is not None:
            self._open.pop(opening.id, None)
            self._failed[opening.id] = opening
            while len(self._failed) > _FAILED_KEPT:
                self._failed.popitem(last=False)
            if opening.holder is not None:
                opening.holder.close()
            _log.warning(
                "lease.failed id=%s manifest=%s error=%s", opening.id, opening.manifest[:12], error
            )
            return
        if opening.forecast is not None and self._on_fetched is not None:
            predicted_s, since = opening.forecast
            actual_s = time.monotonic() - since
            self._on_fetched(predicted_s, actual_s)
            _log.info(
                "lease.fetched id=%s manifest=%s predicted_s=%.2f took_s=%.2f",
                opening.id,
                opening.manifest[:12],
                predicted_s,
                actual_s,
            )
        if opening.found.done():
            self._warm(opening)
        else:
            opening.found.add_done_callback(lambda _: self._warm(opening))

    def _warm(self, opening: _OpenLease) -> None:
        """Count the lease and begin read-ahead, once the model is complete and its residency is
        known."""
        if self._open.get(opening.id) is not opening or opening.is_ahead:
            return
        found = opening.found.result()
        self.served[found.tier] += 1
        opening.is_ahead = True
        is_resident = found.tier is Tier.DRAM and not any(found.missing.values())
        self._ahead.begin(
            opening.manifest, self._store.files(opening.manifest), is_resident=is_resident
        )

    def _progressed(self, opening: _OpenLease, progress: LoadProgress) -> None:
        opening.newest = progress
        remaining = progress.total_bytes - progress.done_bytes
        if opening.forecast is None and remaining:
            predicted_s = self._bandwidths.predict(
                {Tier.ORIGIN: remaining}, queued_bytes=self._queued(opening.manifest)
            )
            opening.forecast = (predicted_s, time.monotonic())
        for listener in opening.listeners:
            listener(progress)

    def _holder_gone(self, opening: _OpenLease) -> None:
        if self._open.get(opening.id) is opening:
            _log.info(
                "lease.ended id=%s holder=%s process=%r", opening.id, opening.name, opening.holder
            )
            self._close_nowait(opening)

    def _close_nowait(self, opening: _OpenLease) -> None:
        """Remove the lease. A new one with the same id waits until this one has ended
        completely."""
        del self._open[opening.id]
        closing = asyncio.create_task(self._end(opening), name=f"close {opening.id}")
        self._closing[opening.id] = closing
        closing.add_done_callback(lambda _: self._closing.pop(opening.id))

    async def _end(self, opening: _OpenLease) -> None:
        if opening.holder is not None:
            opening.holder.close()
        if not opening.model.done():
            opening.model.cancel()
            await asyncio.wait([opening.model])
        if opening.is_ahead:
            self._ahead.end(opening.manifest)
        await self._store.release(opening.id)

    def _queued(self, manifest: str) -> int:
        """Bytes of other models still to be fetched."""
        return sum(
            {
                o.manifest: o.remaining_bytes for o in self._open.values() if o.manifest != manifest
            }.values()
        )

    async def _measure_residency(self, manifest: str) -> Residency:
        """Measure residency: of small models inline, since a thread would cost more."""
        files = self._store.files(manifest)
        lengths = page_cache.file_sizes(files)
        if len(lengths) <= _FEW_FILES and sum(lengths.values()) <= _SMALL_BYTES:
            return page_cache.measure_residency(files)
        return await asyncio.get_running_loop().run_in_executor(
            self._lookers, page_cache.measure_residency, files
        )


def _is_good(future: asyncio.Future[Path]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None

"""Operations on the node's weight cache: locate, prefetch, verify, pin and evict models.

The rows (`weight_names.py`) define what is pinned. The cache follows them at once if it answers,
else with the next `sweep`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any

import anyio.to_thread

from pilotlight.controller.database.store import Store
from pilotlight.controller.weights import weight_names
from pilotlight.core.background_tasks import cancel_all
from pilotlight.errors import InvalidInput, PilotlightError, StorageFull, Unavailable
from weight_cache import errors
from weight_cache.client import WeightCacheClient
from weight_cache.types import LoadProgress, Prediction

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0
"""How long a listing waits for a busy cache, in seconds; after that it omits the cache's data."""
BEAT_S = 10.0
"""Longest time between two lines, in seconds: proxies close connections that are silent for a
minute."""
RETRY_S = 1.0
"""The supervisor restarts a crashed cache in less time than this, in seconds."""
ReportProgress = Callable[[LoadProgress], None]


async def locations(
    cache: WeightCacheClient, manifests: Collection[str]
) -> dict[str, Prediction] | None:
    """Return where these models are, and how long a start would wait for each; None when the cache
    does not answer."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return dict(
                zip(manifests, await asyncio.gather(*map(cache.predict, manifests)), strict=True)
            )
    except (errors.WeightCacheError, TimeoutError) as e:
        log.warning("event=cache_not_looked_at error=%r", e)
        return None


async def require_available(cache: WeightCacheClient) -> None:
    """Raise Unavailable unless the cache answers. Call it before a stream begins, which could
    report this only in a line."""
    with translate_errors():
        await cache.stat()


async def verify(cache: WeightCacheClient, manifest: str) -> Mapping[str, Any]:
    """Verify a model's bytes on the node. Returns whether it is there, and the digests of corrupt
    files."""
    with translate_errors():
        is_here = manifest in {model.manifest for model in await cache.models()}
        return {"is_here": is_here, "corrupt": await cache.verify(manifest)}


async def prefetch(cache: WeightCacheClient, manifest: str, on_progress: ReportProgress) -> None:
    """Fetch a model to the node's disk."""
    with translate_errors():
        await cache.prefetch(manifest, on_progress=on_progress)


async def pin(cache: WeightCacheClient, manifest: str, on_progress: ReportProgress) -> None:
    """Fetch a model and pin it, so that it is not evicted."""
    with translate_errors():
        await cache.prefetch(manifest, on_progress=on_progress)
        await cache.pin(manifest)


async def unpin_unused(cache: WeightCacheClient, store: Store, manifests: Collection[str]) -> None:
    """Unpin the models that no name pins. If the cache is unavailable, `sweep` does it later."""
    pinned = await anyio.to_thread.run_sync(_pinned, store) if manifests else set()
    with _best_effort("unpin"):
        for manifest in set(manifests) - pinned:
            await cache.unpin(manifest)


async def evict(cache: WeightCacheClient, store: Store, manifest: str) -> None:
    """Evict a model without a name from the node's disk, unless it is in use."""
    if not await anyio.to_thread.run_sync(_is_named, store, manifest):
        with _best_effort("drop"):
            await cache.drop(manifest)


async def forget(cache: WeightCacheClient, manifests: Collection[str]) -> None:
    """Unpin and evict models that no name will need. If the cache is unavailable, `sweep` unpins
    them later, and they are evicted as the least recently used."""
    with _best_effort("forget"):
        for manifest in manifests:
            await cache.unpin(manifest)
            await cache.drop(manifest)


async def sweep(cache: WeightCacheClient, store: Store) -> None:
    """Unpin the models that are pinned on the node but not by any name. Raises WeightCacheError."""
    on_node = {model.manifest for model in await cache.models() if model.is_pinned}
    await unpin_unused(cache, store, on_node)


async def stream_progress(
    work: Callable[[ReportProgress], Coroutine[Any, Any, Mapping[str, Any]]],
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Run `work` and yield its progress, only the newest and at least every `BEAT_S`, then its
    result.

    Closing the generator early cancels the work.
    """
    newest: dict[str, Any] = {}
    changed = asyncio.Event()

    def on_progress(progress: LoadProgress) -> None:
        newest.update(done_bytes=progress.done_bytes, total_bytes=progress.total_bytes)
        changed.set()

    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.create_task(work(on_progress), name="weights on the node")
    task.add_done_callback(lambda _: changed.set())
    try:
        while not task.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()
            changed.clear()
            if not task.done():
                yield {**newest, "elapsed_s": round(loop.time() - began, 3)}
        yield task.result()
    finally:
        await cancel_all([task])


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the cache's errors into this package's own; their messages say what to do."""
    try:
        yield
    except errors.ManifestInvalid as e:
        raise InvalidInput(str(e), parameter="weights") from e
    except errors.StoreFull as e:
        raise StorageFull(str(e)) from e
    except errors.WeightCacheUnavailable as e:
        raise Unavailable(
            f"the node's weight cache does not answer: {e}",
            retry_after_s=RETRY_S,
            reason="weight_cache",
        ) from e
    except (errors.OriginUnavailable, errors.ChunkCorrupt) as e:
        raise Unavailable(str(e), retry_after_s=RETRY_S, reason=e.code) from e
    except errors.WeightCacheError as e:
        raise PilotlightError(str(e), reason=e.code) from e


@contextlib.contextmanager
def _best_effort(what: str) -> Iterator[None]:
    try:
        yield
    except errors.WeightCacheError as e:
        log.warning("event=cache_did_not_follow what=%s error=%r", what, e)


def _pinned(store: Store) -> set[str]:
    with store.read() as sql:
        return weight_names.pinned(sql)


def _is_named(store: Store, manifest: str) -> bool:
    with store.read() as sql:
        return weight_names.is_named(sql, manifest=manifest)

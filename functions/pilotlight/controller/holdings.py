"""What the node's weight cache holds of what names mean: where a model is; bringing it, checking
it, keeping it, letting it go.

The rows (`weights.py`) say what shall be pinned, the cache follows: at once where it answers, else
with the next `sweep`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any

import anyio.to_thread

from pilotlight.controller import weights
from pilotlight.controller.store import Store
from pilotlight.errors import InvalidInput, PilotlightError, StorageFull, Unavailable
from weight_cache import errors
from weight_cache.client import WeightCacheClient
from weight_cache.types import LoadProgress, Prediction

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0
"""A list does not wait longer for a cache that is busy; it is shown without what only the cache
knows then."""
BEAT_S = 10.0
"""A line at least this often: proxies on the way cut what is silent for a minute."""
RETRY_S = 1.0
"""The supervisor brings a dead cache back within a fraction of this."""
Tell = Callable[[LoadProgress], None]


async def look(
    cache: WeightCacheClient, manifests: Collection[str]
) -> dict[str, Prediction] | None:
    """Where these models are, and how long a start would wait for each; None when the cache does
    not answer."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return dict(
                zip(manifests, await asyncio.gather(*map(cache.predict, manifests)), strict=True)
            )
    except (errors.WeightCacheError, TimeoutError) as e:
        log.warning("event=cache_not_looked_at error=%r", e)
        return None


async def demand(cache: WeightCacheClient) -> None:
    """Raise Unavailable unless the cache answers: a stream that has begun could only say so in a
    line."""
    with translated():
        await cache.stat()


async def verify(cache: WeightCacheClient, manifest: str) -> Mapping[str, Any]:
    """Read a model's bytes on the node again: whether it is there, and digests of files that were
    not what they should be."""
    with translated():
        is_here = manifest in {model.manifest for model in await cache.models()}
        return {"is_here": is_here, "corrupt": await cache.verify(manifest)}


async def prefetch(cache: WeightCacheClient, manifest: str, tell: Tell) -> None:
    """Bring a model to the node's disk."""
    with translated():
        await cache.prefetch(manifest, on_progress=tell)


async def pin(cache: WeightCacheClient, manifest: str, tell: Tell) -> None:
    """Bring it, and keep it whoever needs room."""
    with translated():
        await cache.prefetch(manifest, on_progress=tell)
        await cache.pin(manifest)


async def settle(cache: WeightCacheClient, store: Store, manifests: Collection[str]) -> None:
    """Unpin those that no name wants kept any more. Where the cache is away `sweep` does it."""
    wanted = await anyio.to_thread.run_sync(_pinned, store) if manifests else set()
    with _best_effort("unpin"):
        for manifest in set(manifests) - wanted:
            await cache.unpin(manifest)


async def forget(cache: WeightCacheClient, store: Store, manifest: str) -> None:
    """Free the disk of a model that has no name any more, unless somebody holds it."""
    if not await anyio.to_thread.run_sync(_is_named, store, manifest):
        with _best_effort("drop"):
            await cache.drop(manifest)


async def sweep(cache: WeightCacheClient, store: Store) -> None:
    """Unpin what is pinned on the node and by no name. Raises WeightCacheError."""
    on_node = {model.manifest for model in await cache.models() if model.is_pinned}
    await settle(cache, store, on_node)


async def following(
    work: Callable[[Tell], Coroutine[Any, Any, Mapping[str, Any]]],
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Run `work`: records of how far it is, the newest only and at least each `BEAT_S`, and what it
    returns last.

    Leaving the loop early cancels it.
    """
    newest: dict[str, Any] = {}
    changed = asyncio.Event()

    def tell(progress: LoadProgress) -> None:
        newest.update(done_bytes=progress.done_bytes, total_bytes=progress.total_bytes)
        changed.set()

    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.create_task(work(tell), name="weights on the node")
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
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """The cache's errors as this package's own; their messages name the way out."""
    try:
        yield
    except errors.ManifestInvalid as e:
        raise InvalidInput(str(e), parameter="weights") from e
    except errors.StoreFull as e:
        raise StorageFull(str(e)) from e
    except errors.ProtocolError as e:
        raise Unavailable(
            f"the node's weight cache does not answer: {e}",
            retry_after_s=RETRY_S,
            reason="weight_cache",
        ) from e
    except (errors.OriginUnavailable, errors.ChunkCorrupt, errors.ObjectStoreError) as e:
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
        return weights.pinned(sql)


def _is_named(store: Store, manifest: str) -> bool:
    with store.read() as sql:
        return weights.is_named(sql, manifest=manifest)

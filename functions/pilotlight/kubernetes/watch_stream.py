"""An endless watch: lists once, then resumes from the newest resourceVersion whenever the
connection breaks.

A broken connection costs a new request, not a new listing: the server continues after the last
event or bookmark. Only a version that is too old (410, as a status or inside the stream) or that
the server rejects requires a new listing, of which only the differences are delivered."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from pilotlight.kubernetes.api_errors import from_status
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.client import CallDeadlines
from pilotlight.kubernetes.errors import (
    BadCredentials,
    ClusterError,
    ClusterUnreachable,
    Forbidden,
    Gone,
    Invalid,
    KindMissing,
    NotFound,
)
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import (
    JsonLines,
    Listing,
    Object,
    ResourceVersions,
    WatchChange,
    version_of,
)

logger = logging.getLogger(__name__)

# a connection that lasted this long, or delivered anything, was healthy: retry without backoff
_HEALTHY_S = 1.0
# consecutive failures after which a new listing is tried, in case the server rejects our version
_REFUSALS = 5
_HOPELESS = (Forbidden, KindMissing, BadCredentials)  # retries cannot succeed without a change


class WatchSource(Protocol):
    """The methods of the API server's client that a watch needs."""

    @property
    def patience(self) -> CallDeadlines:
        """Deadlines and delays between attempts."""

    async def list(
        self, kind: Kind, namespace: str | None = None, selector: str = "", *, fields: str = ""
    ) -> Listing:
        """A consistent listing of all objects of a kind."""

    def changes(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        selector: str = "",
        fields: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """One watch starting at a resourceVersion, as raw bytes, until it ends or breaks."""


class _Pace:
    """Counts consecutive failures, which determine the backoff."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.failures = 0

    def begin(self) -> None:
        """A connection is being opened."""
        self._began = self._clock()

    def heard(self) -> None:
        """The connection delivered something."""
        self.failures = 0

    def ended(self) -> None:
        """The connection ended."""
        self.failures = 0 if self._clock() - self._began >= _HEALTHY_S else self.failures + 1


async def watch_forever(
    cluster: WatchSource,
    kind: Kind,
    namespace: str | None,
    selector: str,
    *,
    fields: str,
    chance: Callable[[], float],
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> AsyncGenerator[WatchChange, None]:
    """Yield changes endlessly: the first listing as ADDED, and a SYNCED after every listing.

    Raises:
        Forbidden, KindMissing, BadCredentials: at the first listing only; later they are retried
            like all other errors.
    """
    known, pace = ResourceVersions(), _Pace(clock)
    deed = ApiRequest(verb="watch", kind=kind, namespace=namespace)
    version, was_listed = "", False
    while True:
        try:
            if not version:
                listing = await cluster.list(kind, namespace, selector, fields=fields)
                for change in known.listed(listing.items):
                    yield change
                version, was_listed = listing.resource_version, True
                yield WatchChange("SYNCED", {})
            pace.begin()
            stream = cluster.changes(
                kind, namespace, resource_version=version, selector=selector, fields=fields
            )
            async with aclosing(_events(deed, stream)) as events:
                async for event, item in events:
                    pace.heard()
                    version = version_of(item) or version
                    for change in [] if event == "BOOKMARK" else known.happened(event, item):
                        yield change
            pace.ended()
        except ClusterError as error:
            if not was_listed and isinstance(error, _HOPELESS):
                raise
            pace.ended()
            if _wants_listing(error, pace.failures):
                version = ""
            logger.info(
                "watch cut kind=%s failures=%d relist=%s error=%s",
                kind,
                pace.failures,
                not version,
                error,
            )
            asked_s = error.retry_after_s
        else:
            asked_s = None
        await sleep(
            cluster.patience.watch_pauses.pause_s(
                max(1, pace.failures), chance=chance(), retry_after_s=asked_s
            )
        )


async def _events(
    deed: ApiRequest, stream: AsyncGenerator[bytes, None]
) -> AsyncGenerator[tuple[str, Object], None]:
    lines = JsonLines()
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            try:
                documents = list(lines.feed(piece))
            except ValueError as error:
                raise ClusterUnreachable(f"cannot {deed}: {error}", deed=deed) from error
            for document in documents:
                event, item = str(document.get("type")), document.get("object") or {}
                if event == "ERROR":
                    raise from_status(deed, item)
                yield event, item


def _wants_listing(error: ClusterError, failures: int) -> bool:
    """Whether the watch cannot resume from our resourceVersion and must list again."""
    if isinstance(error, (Gone, Invalid, NotFound, KindMissing)):
        return True
    # 504 "Too large resource version" comes from a server that lags behind the others; it catches
    # up, unless it was restored from a backup.
    return (
        not isinstance(error, ClusterUnreachable)
        and error.status not in (429, 503)
        and failures >= _REFUSALS
    )

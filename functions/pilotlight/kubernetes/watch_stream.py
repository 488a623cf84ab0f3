"""A watch that does not end: list once, then go on from the newest resourceVersion however often
the connection is cut.

A cut costs a new request, not a new listing: the server continues behind the last event or
bookmark. Only a version that is too old (410, as a status or inside the stream) or that the server
does not understand makes us list anew, and then the difference is what comes out."""

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

# a connection that lived so long, or brought anything, was worth having: the next attempt comes
# soon
_HEALTHY_S = 1.0
# in a row, after which a new listing is tried: whatever the server has against our version, it is
# not lost that way
_REFUSALS = 5
_HOPELESS = (Forbidden, KindMissing, BadCredentials)  # nothing to wait for until somebody acts


class WatchSource(Protocol):
    """What a watch needs of the API server's client."""

    @property
    def patience(self) -> CallDeadlines:
        """Deadlines and delays between attempts."""

    async def list(
        self, kind: Kind, namespace: str | None = None, selector: str = "", *, fields: str = ""
    ) -> Listing:
        """All objects of a kind, as of one moment."""

    def changes(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        selector: str = "",
        fields: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """One watch from a resourceVersion on, as raw bytes, until it ends or breaks."""


class _Pace:
    """How soon to try again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.failures = 0

    def begin(self) -> None:
        """A connection is being opened."""
        self._began = self._clock()

    def heard(self) -> None:
        """Something arrived."""
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
    """Changes for ever, the first listing as ADDED, a SYNCED behind every listing.

    Raises:
        Forbidden, KindMissing, BadCredentials: at the first listing only; later they are waited out
        like everything else.
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
    """Whether going on from our resourceVersion has no future."""
    if isinstance(error, (Gone, Invalid, NotFound, KindMissing)):
        return True
    # 504 "Too large resource version" is a server that lags behind the others; it catches up,
    # unless it was restored from a backup.
    return (
        not isinstance(error, ClusterUnreachable)
        and error.status not in (429, 503)
        and failures >= _REFUSALS
    )

"""Client methods for stored traces, and for measured times of calls."""

from __future__ import annotations

from collections.abc import Iterator

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment

_PATH = "/v1/traces"
_PAGE = 500


class TraceResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for traces and measured times."""

    def traces(
        self, *, limit: int | None = None, **filters: str | float | bool | None
    ) -> Iterator[Json]:
        """Yield traces without spans, newest first; at most `limit`, None = all stored ones.

        `filters`: `app`, `function`, `revision`, `arm`, `call`, `kept_for` (`asked, drawn, error,
        cold, slow, shadow`), `start_kind`, `failed`, `min_ms`, `since`, `until` (seconds since the
        epoch)."""
        cursor: str | None = None
        while limit is None or limit > 0:
            asked = {
                name: str(value).lower() if isinstance(value, bool) else value
                for name, value in filters.items()
            }
            page = self._get(_PATH, limit=min(_PAGE, limit or _PAGE), cursor=cursor, **asked)
            yield from page["traces"]
            cursor = page["cursor"]
            if cursor is None:
                return
            limit = None if limit is None else limit - len(page["traces"])

    def trace(self, trace: str) -> Json:
        """Return a trace by its id or that of a call in it: `calls`, and `spans` with times in ms
        relative to `at`. Raises NotFound."""
        return self._get(f"{_PATH}/{path_segment(trace)}")

    def service_times(
        self,
        app: str,
        function: str,
        *,
        method: str | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> Json:
        """Return the measured times of a function's newest calls and starts since a time (seconds
        since the epoch; default: a day ago), and what it is deployed with. Raises NotFound."""
        path = f"/v1/apps/{path_segment(app)}/functions/{path_segment(function)}/service-times"
        return self._get(path, method=method or None, since=since, limit=limit)

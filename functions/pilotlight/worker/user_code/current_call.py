"""The running call that `pilotlight.context()` describes. Created for every call, so everything is
computed lazily."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from pilotlight.core.tracing.trace_context import format_traceparent
from pilotlight.current_call.context import Context
from pilotlight.protocol import HEADER_ARM, HEADER_ATTEMPT, HEADER_CALL, HEADER_DEADLINE
from pilotlight.worker.user_code.spans import CallSpans

_ARM = HEADER_ARM.encode()
_ATTEMPT = HEADER_ATTEMPT.encode()
_CALL = HEADER_CALL.encode()
_DEADLINE = HEADER_DEADLINE.encode()


class FunctionIdentity:
    """The function and revision that this process runs. Set once at its start; a Template's forks
    run the same revision."""

    function = ""
    revision = ""

    @classmethod
    def set(cls, *, function: str, key: str) -> None:
        """Set both. `key`: the revision's platform-wide key, `<function id>@<revision>`."""
        cls.function, cls.revision = function, key.rpartition("@")[2]


class RunningCall:
    """One running call; a `current_call.context.ContextProvider`."""

    _context: Context | None = None

    def __init__(self, headers: Mapping[bytes, bytes], spans: CallSpans) -> None:
        self._headers = headers
        self._spans = spans

    def __repr__(self) -> str:
        return f"<RunningCall {self._headers.get(_CALL, b'-').decode('latin-1')}>"

    def context(self) -> Context:
        """The call's context; the same object each time."""
        if self._context is None:
            self._context = self._make()
        return self._context

    def _make(self) -> Context:
        headers, parent = self._headers, self._spans.context
        ends_at = self._spans.began_ns / 1e9 + (_number(headers.get(_DEADLINE)) or math.inf)
        return Context(
            call_id=headers.get(_CALL, b"").decode("latin-1"),
            attempt=int(_number(headers.get(_ATTEMPT))) or 1,
            deadline=None
            if ends_at == math.inf
            else datetime.now(UTC) + timedelta(seconds=ends_at - time.monotonic()),
            arm=headers.get(_ARM, b"").decode("latin-1"),
            revision=FunctionIdentity.revision,
            function=FunctionIdentity.function,
            traceparent=format_traceparent(
                parent.trace_id, parent.span_id, is_sampled=parent.is_sampled
            ),
            _ends_at=ends_at,
        )


def example() -> RunningCall:
    """The call of a warm-up's example, which has no caller."""
    return RunningCall({}, CallSpans(""))


def _number(text: bytes | None) -> float:
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    return number if number > 0 and number < math.inf else 0.0

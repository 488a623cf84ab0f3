"""Whether a worker answered from defaults of online features: it says so in a header of its answer,
of which only the known reasons are believed."""

from __future__ import annotations

from typing import Final

from activator.calls.call import AnsweredCall
from activator.worker_client.connection import WorkerResponse
from pilotlight.protocol import DEGRADED_FEATURES, HEADER_DEGRADED

DEGRADED: Final = HEADER_DEGRADED.encode()
_REASONS: Final = {
    f"{DEGRADED_FEATURES}{reason}".encode(): reason
    for reason in ("unavailable", "deadline", "invalid", "stale", "missing")
}


def is_features_reason(value: bytes) -> bool:
    """Return whether a value of the header is one that a worker may give."""
    return value in _REASONS


def features_reason(answer: WorkerResponse) -> str:
    """Return why features of an answer are defaults; "" for an answer whose are not."""
    return _REASONS.get(answer.header(DEGRADED), "")


def degradation_of(attempt: AnsweredCall) -> str:
    """Return the values of `pilotlight-degraded` of the response; "" for none."""
    known, reason = attempt.call.degradation, features_reason(attempt.answer)
    return ", ".join(
        one for one in (known, f"{DEGRADED_FEATURES}{reason}" if reason else "") if one
    )

"""Rules of fallbacks: for which failures, in which order, and the response of a static fallback.
Pure functions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from activator.http.payloads import PICKLE
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_SSE,
)
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.policies import Fallback

if TYPE_CHECKING:
    from activator.calls.call import Call
    from pilotlight.spec.function import FunctionSpec

VARIANT = "variant"
"""Kind of a fallback to a variant."""


class Unchecked(errors.Unavailable):
    """Raised for a call that nothing may answer yet: what it asks for could not be checked."""


def may_fall_back(error: errors.PilotlightError) -> bool:
    """Return whether a fallback may answer a call that failed with `error`: the platform could not
    serve it, and did not refuse it on purpose."""
    if isinstance(error, errors.OverQuota | errors.BudgetReserved | Unchecked):
        return False
    if isinstance(error, errors.DeadlineExceeded):
        return error.detail.get("clock") in ("queue", "startup")
    return isinstance(
        error,
        errors.Unavailable | errors.StartFailed | errors.WorkerCrashed | errors.TooManyRequests,
    )


def fallback_chain(spec: FunctionSpec, priority: Priority) -> Iterator[tuple[str, Fallback]]:
    """Yield (kind, fallback) in order: first the variants that accept this priority, then the
    fallbacks."""
    for variant in spec.variants:
        if priority in variant.priorities:
            yield VARIANT, Fallback(kind="function", function=variant.function)
    for rung in spec.fallback:
        yield rung.kind, rung


def name_of(kind: str, function: str) -> str:
    """Return the value of `pilotlight-degraded` for a fallback."""
    return f"{kind}={function}" if function else kind


def static_answer(call: Call, rung: Fallback) -> WorkerResponse:
    """Return the declared response in the format that the caller expects: for a generator, a stream
    of this one item."""
    method = call.target.spec.method(call.method)
    speaks_pickle = call.content_type is PICKLE
    if method is not None and method.is_generator:
        content_type, body = _one_item(
            rung.body, speaks_pickle=speaks_pickle, is_events=CONTENT_SSE.encode() in call.accept
        )
    elif speaks_pickle:
        content_type, body = CONTENT_PICKLE, _pickled(rung.body)
    else:
        content_type, body = CONTENT_JSON, _as_json(rung.body)
    return WorkerResponse(
        None,
        rung.status,
        [(b"content-type", content_type.encode()), (b"pilotlight-outcome", b"ok")],
        body,
    )


def _one_item(value: Any, *, speaks_pickle: bool, is_events: bool) -> tuple[str, bytes]:
    """Frame one item as the worker frames the items of a generator."""
    if speaks_pickle:
        data = _pickled(value)
        return CONTENT_PICKLE_STREAM, len(data).to_bytes(4, "big") + data
    if is_events:
        return CONTENT_SSE, b"data: " + _as_json(value) + b"\n\n"
    return CONTENT_NDJSON, _as_json(value) + b"\n"


def _pickled(value: Any) -> bytes:
    """Pickle a JSON value; nothing is ever unpickled here."""
    return pickle.dumps(value, protocol=4)


def _as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

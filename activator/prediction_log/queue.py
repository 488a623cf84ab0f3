"""Logged calls that wait for the writer process: a bounded queue, which calls never wait for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from activator.calls.attempt import Attempt
from activator.calls.call import AnsweredCall
from activator.calls.degradation import degradation_of
from activator.http.payloads import CONTENT_TYPE, JSON
from activator.prediction_log.frames import MAX_BODY_BYTES, LoggedCall
from activator.routing.call_target import CallTarget
from pilotlight.spec.prediction_log import Content

MAX_BYTES: Final = 16 * 1024**2
"""Memory for rows that wait; those of one tenant have half of it."""
ROW_BYTES: Final = 2048
"""Estimate of a row without its bodies."""
BATCH_BYTES: Final = 256 * 1024
"""Encoded at once: a fraction of a millisecond of the event loop."""


class PredictionQueue:
    """Decides which calls are logged, and holds them until they are written. Owner: the event
    loop.

    Attributes:
        dropped: rows for which there was no room.
        is_filled: set while rows wait.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, draw: Callable[[], float] = random.random
    ) -> None:
        self._max_bytes = max_bytes
        self._draw = draw
        self._rows: dict[str, deque[tuple[int, LoggedCall]]] = {}
        """By tenant, in the order of their turns."""
        self._count = 0
        self._used: Counter[str] = Counter()
        self._bytes = 0
        self.dropped = 0
        self.is_filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PredictionQueue {self._count} rows, {self._bytes} bytes>"

    def __len__(self) -> int:
        return self._count

    def add(self, attempt: AnsweredCall, status: int, body: bytes | None) -> None:
        """Log an answered call of a function with a log, if it is drawn and no replay. `body`: the
        response; None = it was streamed."""
        call = attempt.call
        terms = call.target.log
        if terms is None or call.is_replay or self._draw() >= terms.sample:
            return
        request_body = call.body if len(call.body) <= MAX_BODY_BYTES else b""
        response_body = b""
        if body is not None and terms.outputs is not Content.NONE and len(body) <= MAX_BODY_BYTES:
            response_body = body
        facts = facts_of(attempt, status, attempt.bytes_out if body is None else len(body))
        self.put(LoggedCall(facts, request_body, response_body))

    def put(self, logged: LoggedCall) -> None:
        """Queue a row, or drop it."""
        tenant = logged.facts["tenant"]
        size = ROW_BYTES + len(logged.input) + len(logged.output)
        if self._bytes + size > self._max_bytes or self._used[tenant] + size > self._max_bytes // 2:
            self.dropped += 1
            return
        self._rows.setdefault(tenant, deque()).append((size, logged))
        self._count += 1
        self._used[tenant] += size
        self._bytes += size
        self.is_filled.set()

    def pop_batch(self) -> list[LoggedCall]:
        """Remove and return rows of about BATCH_BYTES: of each tenant in turn its oldest."""
        batch: list[LoggedCall] = []
        taken = 0
        while self._rows and taken < BATCH_BYTES:
            tenant, rows = next(iter(self._rows.items()))
            size, logged = rows.popleft()
            del self._rows[tenant]
            if rows:
                self._rows[tenant] = rows
            self._count -= 1
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]
            taken += size
            batch.append(logged)
        self._bytes -= taken
        if not self._rows:
            self.is_filled.clear()
        return batch


def facts_of(attempt: AnsweredCall, status: int, output_bytes: int) -> dict[str, Any]:
    """Return what the activator knows about an answered call (`frames.LoggedCall`)."""
    call, held = attempt.call, attempt.held
    target, choice = call.target, call.choice
    method = target.spec.method(call.method)
    return {
        "request_id": call.id,
        "at_ns": call.at_ns,
        "tenant": target.tenant,
        "caller": call.caller.tenant or target.tenant,
        "environment": target.environment,
        "app": target.app,
        "function": target.function,
        "function_id": target.function_id,
        "method": call.method,
        "model_id": model_id(target),
        "version": target.revision,
        "experiment": choice.experiment if choice is not None else "",
        "arm": choice.arm if choice is not None else "",
        "start_kind": held.start_kind.value if held is not None else "",
        "status": status,
        "degraded": degradation_of(attempt),
        "feature_schema": target.feature_schema,
        "latency_ms": (attempt.ended_ns - call.received_ns) / 1e6,
        "queue_ms": call.queued_ms,
        "start_ms": call.start_ms,
        "exec_ms": attempt.exec_ms,
        "picos": attempt.picos,
        "currency": target.rates.currency,
        "input_bytes": len(call.body),
        "output_bytes": output_bytes,
        "input_is_json": call.content_type is JSON,
        "output_is_json": _is_json(attempt),
        "parameters": method.parameters if method is not None else (),
        "log": target.log_terms,
    }


def model_id(target: CallTarget) -> str:
    """Return what identifies the model that answered: its weights, by the name of each and the
    first digits of its manifest; for a function without weights, `app/function`."""
    weights = (f"{one.name}@{one.manifest[:12]}" for one in target.spec.weights)
    return ",".join(weights) or f"{target.app}/{target.function}"


def _is_json(attempt: AnsweredCall) -> bool:
    return (
        isinstance(attempt, Attempt)
        and attempt.answer.header(CONTENT_TYPE).partition(b";")[0].strip() == JSON
    )

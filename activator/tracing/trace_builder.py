"""Builds the spans of an ended call's trace. Pure: timestamps in, a document out.

The root is the call. Below it are `admit`, and for each attempt `queue`, `start` with the phases of
the node agent, `exec`, the worker's own time, and the spans of user code. Attributes follow
OpenTelemetry's semantic conventions (https://opentelemetry.io/docs/specs/semconv/: HTTP, FaaS,
error) where they define one, and otherwise begin with `pilotlight.`. A worker runs user code, so
its report is validated (`parse_report`)."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from activator.calls.call import Call
from activator.calls.trace_context import AttemptRecord
from pilotlight.core.tracing.trace_context import (
    attempt_span_id,
    child_span_id,
    root_span_id,
    trace_id_for_call,
)
from snapshotter.types import InstanceInfo, StartKind

MAX_BYTES = 8192
MAX_SPANS = 64
MAX_ATTRIBUTES = 16
MAX_CHARS = 256
MAX_MS = 7 * 86_400_000.0
_RESERVED = ("pilotlight.", "faas.", "http.", "url.")
"""Reserved attribute prefixes; user code's attributes with them are dropped."""
_ID = re.compile(r"(?!0{16})[0-9a-f]{16}\Z")


class ReportedSpan(NamedTuple):
    """One span of user code; times in ms from the begin of the call in the worker."""

    id: str
    parent: str
    name: str
    begin_ms: float
    ms: float
    error: str
    attributes: Mapping[str, str | int | float | bool]


class WorkerSpans(NamedTuple):
    """The worker's time for the call, its spans, and the number of dropped ones."""

    ms: float
    spans: tuple[ReportedSpan, ...]
    dropped: int


def parse_report(value: bytes) -> WorkerSpans | None:
    """Parse the header's value; None if it is empty or invalid."""
    if not value or len(value) > MAX_BYTES:
        return None
    try:
        body = json.loads(base64.b64decode(value, validate=True))
        rows = body["spans"][:MAX_SPANS]
        spans = tuple(_span(row) for row in rows)
        if len({span.id for span in spans}) < len(spans):
            return None
        return WorkerSpans(_time(body["ms"]), spans, min(_count(body["dropped"]), 10**6))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _span(row: Any) -> ReportedSpan:
    identity, parent, name, begin_ms, ms, error, attributes = row
    if not _ID.match(identity) or (parent and not _ID.match(parent)):
        raise ValueError("no id")
    named = ((_text(key), value) for key, value in list(attributes.items())[:MAX_ATTRIBUTES])
    own = {key: _attribute(value) for key, value in named if not key.startswith(_RESERVED)}
    return ReportedSpan(
        identity, parent, _text(name), _time(begin_ms), _time(ms), _text(error), own
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    # terminals display it, too
    return "".join(char if char.isprintable() else "?" for char in value[:MAX_CHARS])


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no time")
    return min(max(0.0, float(value)), MAX_MS)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("no count")
    return value


def _attribute(value: Any) -> str | int | float | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _text(value)


SERVER, CLIENT, CONSUMER, INTERNAL = "server", "client", "consumer", "internal"
Json = dict[str, Any]
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """A call at its end. Times are monotonic nanoseconds.

    Attributes:
        attempts: all attempts; the last one answered (or failed).
        status: of the answer.
        error: type of the error that the caller got; "" = none of the platform.
        reported: the worker's report of the last attempt; None = none.
        verb: HTTP method; `route`: the address without the parts that differ between calls.
        is_submitted: no caller waited for its answer.
        first_byte_ms: of a stream, from its beginning; None for others."""

    call: Call
    kept_for: str
    attempts: tuple[AttemptRecord, ...]
    status: int
    ended_ns: int
    error: str = ""
    cost: str = "0"
    reported: WorkerSpans | None = None
    verb: str = "POST"
    route: str = ""
    is_submitted: bool = False
    first_byte_ms: float | None = None
    node: str = ""
    activator: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def document(ended: FinishedCall) -> Json:
    """The trace of a call as JSON: `spans` from its beginning, times in ms from `at` (wall clock,
    seconds)."""
    call, target = ended.call, ended.call.target
    spans = list(_Spans(ended).all())
    return {
        "id": trace_of(call),
        "call": call.id,
        "tenant": target.tenant,
        "environment": target.environment,
        "app": target.app,
        "function": target.function,
        "revision": target.revision,
        "start_kind": call.start_name,
        "kept_for": ended.kept_for,
        "status": ended.status,
        "duration_ms": spans[0]["ms"],
        "at": call.started_at - (call.received_ns - call.began_ns) / 1e9,
        "spans": spans,
    }


def trace_of(call: Call) -> str:
    """The id of a call's trace."""
    return call.trace.id if call.trace is not None else trace_id_for_call(call.id)


class _Spans:
    """Builds the spans of one call; ids count up from the root's."""

    def __init__(self, ended: FinishedCall) -> None:
        self._ended = ended
        self._call = ended.call
        self._root = root_span_id(ended.call.id)
        self._begin_ns = ended.call.began_ns
        self._number = 0

    def all(self) -> Iterator[Json]:
        """Yield the root first, parents before their children."""
        call, ended = self._call, self._ended
        trace = call.trace
        name = (
            f"{ended.verb} {ended.route}"
            if not ended.is_submitted
            else f"{call.target.app}/{call.target.function}"
        )
        root = self._span(
            name,
            trace.parent if trace is not None else "",
            call.began_ns,
            ended.ended_ns,
            kind=CONSUMER if ended.is_submitted else SERVER,
            error=ended.error or (str(ended.status) if ended.status >= 500 else ""),
            id=self._root,
            attributes=self._of_call(),
        )
        if trace is not None and trace.link:
            root["links"] = [trace.link]
        yield root
        if call.routed_ns > call.began_ns:
            yield self._span("route", self._root, call.began_ns, call.routed_ns)
        if call.received_ns > call.routed_ns:
            yield self._span("admit", self._root, call.routed_ns, call.received_ns)
        for attempt in ended.attempts:
            yield from self._attempt(attempt, is_last=attempt is ended.attempts[-1])

    def _of_call(self) -> Json:
        call, ended, target = self._call, self._ended, self._call.target
        attributes: Json = {
            "http.request.method": None if ended.is_submitted else ended.verb,
            "http.route": None if ended.is_submitted else ended.route,
            "url.path": None if ended.is_submitted else ended.route,
            "http.response.status_code": ended.status or None,
            "faas.trigger": "pubsub" if ended.is_submitted else "http",
            "faas.name": f"{target.app}/{target.function}",
            "faas.version": target.revision,
            "faas.invocation_id": call.id,
            "faas.coldstart": call.start_kind is not StartKind.WARM,
            "pilotlight.tenant": target.tenant,
            "pilotlight.caller": call.caller.tenant or None,
            "pilotlight.environment": target.environment,
            "pilotlight.method": call.method or None,
            "pilotlight.start_kind": call.start_name,
            "pilotlight.cache": call.cache_result or None,
            "pilotlight.priority": call.caller.rank.priority.value,
            "pilotlight.degraded": call.degradation or None,
            "pilotlight.attempts": len(ended.attempts) or None,
            "pilotlight.cost": ended.cost,
            "pilotlight.kept_for": ended.kept_for,
            "pilotlight.activator": ended.activator or None,
            "pilotlight.first_byte_ms": round(ended.first_byte_ms, 3)
            if ended.first_byte_ms is not None
            else None,
        }
        choice = getattr(call, "choice", None)
        if choice is not None:
            attributes["pilotlight.experiment"] = choice.experiment or None
            attributes["pilotlight.arm"] = choice.arm or None
        return {**attributes, **ended.extra}

    def _attempt(self, attempt: AttemptRecord, *, is_last: bool) -> Iterator[Json]:
        parent = self._root
        if len(self._ended.attempts) > 1:
            around = self._span(
                f"attempt {attempt.number}",
                parent,
                attempt.waited_ns,
                attempt.ended_ns,
                error=attempt.error,
                attributes={"pilotlight.attempt": attempt.number},
            )
            parent = around["id"]
            yield around
        until_ns = attempt.reserved_ns or attempt.ended_ns
        start_ns = int(attempt.start_ms * 1e6)
        if until_ns - start_ns > attempt.waited_ns:
            yield self._span(
                "queue",
                parent,
                attempt.waited_ns,
                until_ns - start_ns,
                error="" if attempt.reserved_ns else attempt.error,
            )
        if attempt.instance is not None and start_ns:
            yield from self._start(attempt.instance.info, parent, until_ns - start_ns, until_ns)
        if attempt.dispatched_ns:
            yield from self._execution(attempt, parent, is_last=is_last)

    def _start(self, info: InstanceInfo, parent: str, begin_ns: int, end_ns: int) -> Iterator[Json]:
        """The part of a start that the call waited for. Phases before the call are left out; the
        total is an attribute."""
        tiers = {f"pilotlight.weights.{name}": tier for name, tier in info.weights.items()}
        whole_ms = sum(info.phases_ms.values())
        start = self._span(
            "start",
            parent,
            begin_ns,
            end_ns,
            attributes={
                "faas.instance": str(info.id),
                "pilotlight.start_kind": info.start_kind.value,
                "pilotlight.node": self._node(info),
                "pilotlight.start_ms": round(whole_ms, 3),
                **tiers,
            },
        )
        yield start
        at_ns = end_ns - int(whole_ms * 1e6)
        # if the phases took less, the rest is the round trip to the agent
        at_ns = min(at_ns, begin_ns)
        for phase, ms in info.phases_ms.items():
            until_ns = at_ns + int(ms * 1e6)
            if until_ns > begin_ns and at_ns < end_ns:
                whole = {"pilotlight.phase_ms": round(ms, 3)}
                yield self._span(
                    phase,
                    start["id"],
                    max(at_ns, begin_ns),
                    min(until_ns, end_ns),
                    attributes=whole,
                )
            at_ns = until_ns

    def _execution(self, attempt: AttemptRecord, parent: str, *, is_last: bool) -> Iterator[Json]:
        instance = attempt.instance
        of_instance = (
            {"faas.instance": instance.id, "pilotlight.node": self._node(instance.info)}
            if instance is not None
            else {}
        )
        identity = attempt_span_id(self._call.id, attempt.number)
        status = self._ended.status if is_last and not attempt.error else 0
        yield self._span(
            "exec",
            parent,
            attempt.dispatched_ns,
            attempt.ended_ns,
            kind=CLIENT,
            id=identity,
            error=attempt.error or (str(status) if status >= 500 else ""),
            attributes={**of_instance, "http.response.status_code": status or None},
        )
        if is_last and self._ended.reported is not None:
            yield from self._reported(self._ended.reported, identity, attempt)

    def _reported(
        self, reported: WorkerSpans, parent: str, attempt: AttemptRecord
    ) -> Iterator[Json]:
        """The worker has its own clock: its time is centered in ours, with the network time around
        it."""
        took_ns = attempt.ended_ns - attempt.dispatched_ns
        own_ns = min(int(reported.ms * 1e6), took_ns)
        begin_ns = attempt.dispatched_ns + (took_ns - own_ns) // 2
        worker = self._span(
            "worker",
            parent,
            begin_ns,
            begin_ns + own_ns,
            kind=SERVER,
            attributes={"pilotlight.spans_dropped": reported.dropped or None},
        )
        yield worker
        known: set[str] = set()
        for one in reported.spans:
            at_ns = min(begin_ns + int(one.begin_ms * 1e6), attempt.ended_ns)
            end_ns = min(at_ns + int(one.ms * 1e6), attempt.ended_ns)
            # only earlier spans: no cycles
            around = one.parent if one.parent in known else worker["id"]
            yield self._span(
                one.name,
                around,
                at_ns,
                end_ns,
                id=one.id,
                error=one.error,
                attributes=one.attributes,
            )
            known.add(one.id)

    def _node(self, info: InstanceInfo) -> str:
        return info.labels.get("node", self._ended.node)

    def _span(
        self,
        name: str,
        parent: str,
        begin_ns: int,
        end_ns: int,
        *,
        kind: str = INTERNAL,
        error: str = "",
        id: str = "",
        attributes: Mapping[str, Any] = _NONE,
    ) -> Json:
        self._number += 1
        present = {key: value for key, value in attributes.items() if value is not None}
        if error:
            present["error.type"] = error
        return {
            "id": id or child_span_id(self._root, self._number),
            "parent": parent,
            "name": name,
            "kind": kind,
            "begin_ms": round((begin_ns - self._begin_ns) / 1e6, 3),
            "ms": round(max(0, end_ns - begin_ns) / 1e6, 3),
            "error": error,
            "attributes": present,
        }

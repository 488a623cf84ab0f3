"""Exports kept traces to an OpenTelemetry collector, with the official exporter in its own thread
(`activator.otlp_endpoint`).

The environment variables of the exporter apply (such as `OTEL_EXPORTER_OTLP_HEADERS` for a
collector that requires a token). A collector that is down, slow or broken costs a bounded queue and
some counted losses, but never delays a call."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from activator.tracing.trace_builder import CLIENT, CONSUMER, SERVER, Json

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

MAX_HELD = 1000
"""Maximum number of traces that wait for the collector."""
BATCH = 50
TIMEOUT_S = 5.0
"""Timeout of one batch, including retries."""
PAUSE_S = 5.0
"""Pause after a failed batch; the queue is bounded meanwhile."""
CLOSE_S = 2.0
PATH = "/v1/traces"
"""Default path of a collector for traces (OTLP/HTTP)."""


class OtlpExport:
    """The export thread. `put` never waits, from any thread.

    Attributes:
        exported, dropped: number of traces that the collector has received, and that are lost."""

    def __init__(
        self,
        endpoint: str,
        *,
        instance: str,
        max_held: int = MAX_HELD,
        timeout_s: float = TIMEOUT_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._endpoint = (
            endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        )
        self._exporter = OTLPSpanExporter(self._endpoint, timeout=timeout_s)
        self._resource = Resource(
            {
                "service.name": "pilotlight",
                "service.instance.id": instance,
                "service.version": metadata.version("pilotlight"),
            }
        )
        self._pause_s = pause_s
        self._held: queue.Queue[Json] = queue.Queue(max_held)
        self._stopping = threading.Event()
        self.exported = 0
        self.dropped = 0
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"<OtlpExport {self._endpoint} {self._held.qsize()} held, {self.exported} "
            f"exported, {self.dropped} dropped>"
        )

    def put(self, trace: Json) -> None:
        """Queue a trace for export; dropped if the queue is full."""
        try:
            self._held.put_nowait(trace)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Export the queue, if the collector accepts it at once, and end."""
        self._stopping.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()
        self._thread.join(CLOSE_S)
        self.dropped += self._held.qsize()

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch and not self._export(batch):
                if self._stopping.wait(self._pause_s):
                    return
            elif not batch and self._stopping.is_set():
                return

    def _next_batch(self) -> list[Json]:
        batch: list[Json] = []
        try:
            batch.append(self._held.get(timeout=0.05 if self._stopping.is_set() else 0.5))
            while len(batch) < BATCH:
                batch.append(self._held.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _export(self, batch: Sequence[Json]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        began = time.monotonic()
        spans = [span for trace in batch for span in readable(trace, self._resource)]
        is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if is_taken:
            self.exported += len(batch)
        else:
            self.dropped += len(batch)
        if is_taken == self._is_down:  # log only changes
            self._is_down = not is_taken
            log.warning(
                "collector %s endpoint=%s took_s=%.1f",
                "is back" if is_taken else "rejects traces",
                self._endpoint,
                time.monotonic() - began,
            )
        return is_taken


def readable(trace: Mapping[str, Any], resource: Resource) -> list[ReadableSpan]:
    """Convert a trace to ended spans of OpenTelemetry's SDK."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(trace_id: str, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED)
        )

    kinds = {SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT, CONSUMER: SpanKind.CONSUMER}
    scope = InstrumentationScope("pilotlight")
    at_us = round(trace["at"] * 1e6)  # the precision of a float
    own = {span["id"] for span in trace["spans"]}
    return [
        ReadableSpan(
            span["name"],
            context=context(trace["id"], span["id"]),
            parent=context(trace["id"], span["parent"], is_remote=span["parent"] not in own)
            if span["parent"]
            else None,
            resource=resource,
            attributes=span["attributes"],
            links=[
                Link(context(*link.split("-"), is_remote=True)) for link in span.get("links", ())
            ],
            kind=kinds.get(span["kind"], SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, span["error"]) if span["error"] else Status(),
            start_time=(at_us + round(span["begin_ms"] * 1e3)) * 1000,
            end_time=(at_us + round((span["begin_ms"] + span["ms"]) * 1e3)) * 1000,
            instrumentation_scope=scope,
        )
        for span in trace["spans"]
    ]

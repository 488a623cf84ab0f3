"""The trace pipeline of one activator: the tracer and its destinations."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from activator.tracing.otlp import OtlpExport
from activator.tracing.outbox import ControllerTraces, Outbox
from activator.tracing.trace_builder import Json
from activator.tracing.tracer import Exemplifies, Tracer
from pilotlight.core.transport.endpoint import Endpoint


class TracePipeline:
    """Tracer and exporters. Owner: the event loop.

    Attributes:
        tracer: builds traces.
        outbox: sends them to the controller.
        otlp: sends them to a collector; None = there is none."""

    def __init__(
        self,
        *,
        share: float,
        controller: Endpoint,
        token: str,
        activator: str,
        endpoint: str | None,
        exemplars: Exemplifies | None,
    ) -> None:
        self._store = ControllerTraces(controller=controller, token=token, activator=activator)
        self.outbox = Outbox(self._store)
        self.otlp = OtlpExport(endpoint, instance=activator) if endpoint is not None else None
        self.tracer = Tracer(
            share=share, keep=self._enqueue, exemplars=exemplars, activator=activator
        )

    def __repr__(self) -> str:
        return f"<TracePipeline {self.tracer!r} {self.outbox!r} {self.otlp!r}>"

    def _enqueue(self, trace: Json) -> None:
        self.outbox.put(trace)
        if self.otlp is not None:
            self.otlp.put(trace)

    async def run(self) -> None:
        """Send traces to the controller until cancelled."""
        await self.outbox.run()

    async def aclose(self) -> None:
        """Send the remaining traces, if they are accepted at once, and close."""
        await self.outbox.flush_or_drop()
        await self._store.aclose()
        if self.otlp is not None:
            self.otlp.close()

    def collect(self, registry: CollectorRegistry) -> None:
        """Export trace counters, read at each scrape."""
        registry.register(_TraceCollector(self))


class _TraceCollector(Collector):
    def __init__(self, token_admission: TracePipeline) -> None:
        self._token_admission = token_admission

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Current values (Prometheus' own interface)."""
        token_admission = self._token_admission
        kept = CounterMetricFamily(
            "pilotlight_traces_kept", "Traces that were kept, by reason.", labels=("reason",)
        )
        for reason, count in list(token_admission.tracer.kept.items()):
            kept.add_metric((reason,), count)
        lost = CounterMetricFamily(
            "pilotlight_traces_dropped",
            "Dropped traces: over the rate of their tenant, or without room on the way to "
            "the controller or the collector.",
            labels=("where",),
        )
        lost.add_metric(("rate",), token_admission.tracer.passed_over)
        lost.add_metric(("controller",), token_admission.outbox.dropped)
        if token_admission.otlp is not None:
            lost.add_metric(("collector",), token_admission.otlp.dropped)
        yield from (kept, lost)

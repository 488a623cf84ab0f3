"""The prediction logs of one activator: queue, writer process and shipper, and their metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.shipper import (
    ControllerPredictions,
    PredictionShipper,
    PredictionStore,
    age_s,
)
from activator.prediction_log.writer_supervisor import WriterSupervisor
from pilotlight.core.transport.endpoint import Endpoint

REASONS = (
    *("queue_full", "spool_full", "disk", "writer", "limits", "quota", "deleted", "refused"),
    "invalid",
)


class PredictionLogs(Collector):
    """Queue, writer process and shipper. Owner: the event loop.

    Attributes:
        queue: gets the answered calls.
    """

    def __init__(
        self,
        *,
        directory: Path,
        controller: Endpoint,
        token: str,
        max_bytes: int,
        ship_s: float,
        store: PredictionStore | None = None,
    ) -> None:
        """`store`: another destination than the controller."""
        self.queue = PredictionQueue()
        self.writer = WriterSupervisor(
            self.queue, directory=directory, token=token, max_bytes=max_bytes, ship_s=ship_s
        )
        self.shipper = PredictionShipper(
            directory, store or ControllerPredictions(controller=controller, token=token)
        )
        self._ended = asyncio.Event()
        self._ended.set()

    def __repr__(self) -> str:
        return f"<PredictionLogs {self.queue!r} {self.writer!r} {self.shipper!r}>"

    async def run(self) -> None:
        """Write and ship until cancelled."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.writer.run(), name="prediction writer")
                group.create_task(self.shipper.run(), name="prediction shipper")
        finally:
            self._ended.set()

    async def aclose(self) -> None:
        """Write and ship what is left, for some seconds. Call once `run` was cancelled."""
        await self._ended.wait()
        await self.writer.aclose()
        await self.shipper.aclose()

    def dropped(self) -> Counter[str]:
        """Rows that were lost, by reason."""
        full = Counter({"queue_full": self.queue.dropped})
        return full + self.writer.dropped + self.shipper.dropped

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        yield CounterMetricFamily(
            "pilotlight_predictions_stored",
            "Rows of prediction logs that are in the blob store.",
            value=self.shipper.shipped,
        )
        lost = CounterMetricFamily(
            "pilotlight_predictions_dropped",
            "Rows of prediction logs that were dropped.",
            labels=("reason",),
        )
        dropped = self.dropped()
        for reason in REASONS:
            lost.add_metric((reason,), dropped[reason])
        yield lost
        yield GaugeMetricFamily(
            "pilotlight_predictions_backlog_seconds",
            "Age of the oldest row that is in files and not in the blob store.",
            value=max(age_s(self.shipper.oldest_at), self.writer.open_age_s),
        )
        yield GaugeMetricFamily(
            "pilotlight_predictions_backlog_bytes",
            "Files of rows that are not in the blob store.",
            value=self.writer.used_bytes,
        )

"""Every metric that the node agent exports. Names are part of the contract with dashboards.

| name | what |
|---|---|
| `pilotlight_starts_total{kind,outcome}` | starts by StartKind; outcome `ready` or the error's code |
| `pilotlight_start_seconds{kind}` | from the request to ready |
| `pilotlight_start_phase_seconds{phase}` | by phase of the start |
| `pilotlight_instances{state}` | instances on this node |
| `pilotlight_templates` / `pilotlight_template_pss_bytes` | resident Templates, and their memory |
| `pilotlight_parked_forks` | pre-forked processes that wait for an assignment; their memory is in the line above |
| `pilotlight_templates_gone_total{reason}` | Templates that exited |
| `pilotlight_instances_gone_total{reason}` | instances that exited |
| `pilotlight_rung_failures_total{rung,reason}` | start strategies that failed: the start continued with the next one |
| `pilotlight_start_prediction_ratio{kind}` | actual duration of a start divided by the predicted duration |
| `pilotlight_snapshots{state}` / `pilotlight_snapshot_bytes` | snapshots on this node, and their disk usage |
| `pilotlight_snapshots_made_total{outcome}` | `ready`, or `refused` |
| `pilotlight_snapshot_phase_seconds{phase}` | duration of each phase of making a snapshot: `quiesce, dump, publish, prove` |
| `pilotlight_snapshot_misses_total{field}` | starts that found a mismatched snapshot, by the identity field that differs |
| `pilotlight_gpu_sm_utilisation{tenant,app,function,gpu,device}` | share of the last sample period in which a kernel ran on a granted GPU |
| `pilotlight_gpu_memory_used_bytes{…}` | memory in use of a granted GPU |
| `pilotlight_gpu_weights_bytes{…,state}` | weights in the memory of a granted GPU: `delivered`, of these `pinned` |
| `pilotlight_log_dropped_bytes_total` | output discarded because a function printed faster than it could be stored |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from snapshotter.gpus.view import GpuUse
from snapshotter.types import InstanceState, SnapshotState, StartKind

_START_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
    163.84,
)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)


class GpuMetrics:
    """The GPUs of the node, and how those that were granted are used."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self._total = gauge("pilotlight_gpus", "GPUs and MIG instances of this node", ["kind"])
        self._granted = gauge(
            "pilotlight_gpus_granted", "GPUs and MIG instances that a slot has", ["kind"]
        )
        self._fragmentation = gauge(
            "pilotlight_gpu_fragmentation",
            "Largest request that would get connected GPUs, divided by the free GPUs; absent while "
            "none is free",
            ["kind"],
        )
        owner = ["tenant", "app", "function", "gpu", "device"]
        self._utilisation = gauge(
            "pilotlight_gpu_sm_utilisation",
            "Share of the last sample period in which a kernel ran on a granted GPU (NVML); absent "
            "where the driver does not tell",
            owner,
        )
        self._used = gauge(
            "pilotlight_gpu_memory_used_bytes", "Memory in use of a granted GPU (NVML)", owner
        )
        self._weights = gauge(
            "pilotlight_gpu_weights_bytes",
            "Weights in the memory of a granted GPU: delivered, and those of them that are pinned",
            [*owner, "state"],
        )

    def observe(
        self,
        counts: Mapping[str, tuple[int, int]],
        fragmentation: Mapping[str, float | None],
    ) -> None:
        """Set the gauges; called before each scrape. `counts`: kind → number, granted."""
        for kind, (total, granted) in counts.items():
            self._total.labels(kind=kind).set(total)
            self._granted.labels(kind=kind).set(granted)
        self._fragmentation.clear()
        for kind, share in fragmentation.items():
            if share is not None:
                self._fragmentation.labels(kind=kind).set(share)

    def observe_use(self, uses: Iterable[GpuUse]) -> None:
        """Set the gauges of the granted devices, of which there are at most as many as the node
        has; called before each scrape. What NVML does not tell has no series."""
        for gauge in (self._utilisation, self._used, self._weights):
            gauge.clear()
        for use in uses:
            if use.holder is None:
                continue
            labels = use.holder.labels
            owner = {name: labels.get(name, "") for name in ("tenant", "app", "function")}
            owner |= {"gpu": use.device.kind, "device": use.device.uuid}
            if use.sample is not None:
                self._used.labels(**owner).set(use.sample.used_bytes)
                if use.sample.sm_utilisation is not None:
                    self._utilisation.labels(**owner).set(use.sample.sm_utilisation)
            if use.weights:
                self._weights.labels(**owner, state="delivered").set(use.delivered_bytes)
                self._weights.labels(**owner, state="pinned").set(use.pinned_bytes)


class Metrics:
    """The agent's registry. Owner: the event loop.

    Attributes:
        gpus: metrics of GPUs.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._starts = counter("pilotlight_starts", "Starts of instances", ["kind", "outcome"])
        self._seconds = histogram(
            "pilotlight_start_seconds",
            "Seconds from request to ready",
            ["kind"],
            buckets=_START_BUCKETS,
        )
        self._phases = histogram(
            "pilotlight_start_phase_seconds",
            "Seconds of each phase of a start",
            ["phase"],
            buckets=_START_BUCKETS,
        )
        self._instances = gauge("pilotlight_instances", "Instances on this node", ["state"])
        self._templates = gauge("pilotlight_templates", "Resident Templates")
        self._template_pss = gauge("pilotlight_template_pss_bytes", "PSS of resident Templates")
        self._parked = gauge(
            "pilotlight_parked_forks",
            "Pre-forked processes that wait for an assignment",
        )
        self._templates_gone = counter(
            "pilotlight_templates_gone", "Templates that exited", ["reason"]
        )
        self._instances_gone = counter(
            "pilotlight_instances_gone", "Instances that exited", ["reason"]
        )
        self._rung_failures = counter(
            "pilotlight_rung_failures", "Start strategies that failed", ["rung", "reason"]
        )
        self._predictions = histogram(
            "pilotlight_start_prediction_ratio",
            "Actual start time divided by predicted start time",
            ["kind"],
            buckets=_RATIO_BUCKETS,
        )
        self._snapshots = gauge("pilotlight_snapshots", "Snapshots on this node", ["state"])
        self._snapshot_bytes = gauge("pilotlight_snapshot_bytes", "Disk used by snapshots")
        self._snapshots_made = counter(
            "pilotlight_snapshots_made", "Snapshots made or refused", ["outcome"]
        )
        self._snapshot_phases = histogram(
            "pilotlight_snapshot_phase_seconds",
            "Seconds of each phase of making a snapshot",
            ["phase"],
            buckets=_START_BUCKETS,
        )
        self._snapshot_misses = counter(
            "pilotlight_snapshot_misses", "Mismatched snapshots by identity field", ["field"]
        )
        self.gpus = GpuMetrics(self.registry)
        self._log_dropped = counter("pilotlight_log_dropped_bytes", "Output that was discarded")

    def started(self, kind: StartKind, seconds: float, phases_ms: Mapping[str, float]) -> None:
        """Record a start that succeeded."""
        self._starts.labels(kind=kind.value, outcome="ready").inc()
        self._seconds.labels(kind=kind.value).observe(seconds)
        for phase, ms in phases_ms.items():
            self._phases.labels(phase=phase).observe(ms / 1000)

    def start_failed(self, kind: StartKind, outcome: str) -> None:
        """Record a start that failed."""
        self._starts.labels(kind=kind.value, outcome=outcome).inc()

    def record_instance_exit(self, reason: str) -> None:
        """Record the exit of an instance."""
        self._instances_gone.labels(reason=reason).inc()

    def record_template_exit(self, reason: str) -> None:
        """Record the exit of a Template."""
        self._templates_gone.labels(reason=reason).inc()

    def rung_failed(self, rung: StartKind, reason: str) -> None:
        """Record a start strategy that failed."""
        self._rung_failures.labels(rung=rung.value, reason=reason).inc()

    def predicted(self, kind: StartKind, *, predicted_ms: float, actual_ms: float) -> None:
        """Record the actual duration of a start beside the predicted one."""
        if predicted_ms > 0:
            self._predictions.labels(kind=kind.value).observe(actual_ms / predicted_ms)

    def snapshot_made(self, outcome: str, phases_ms: Mapping[str, float]) -> None:
        """Record a snapshot that is ready or was refused."""
        self._snapshots_made.labels(outcome=outcome).inc()
        for phase, ms in phases_ms.items():
            self._snapshot_phases.labels(phase=phase).observe(ms / 1000)

    def snapshot_missed(self, field: str) -> None:
        """Record a snapshot whose identity field `field` does not match."""
        self._snapshot_misses.labels(field=field).inc()

    def observe_snapshots(self, *, by_state: Mapping[SnapshotState, int], used_bytes: int) -> None:
        """Set the gauges; called before each scrape."""
        for state in SnapshotState:
            self._snapshots.labels(state=state.value).set(by_state.get(state, 0))
        self._snapshot_bytes.set(used_bytes)

    def log_dropped(self, count: int) -> None:
        """Count `count` discarded bytes of output."""
        self._log_dropped.inc(count)

    def observe(
        self,
        *,
        by_state: Mapping[InstanceState, int],
        templates: int,
        template_pss_bytes: int,
        parked: int,
    ) -> None:
        """Set the gauges; called before each scrape."""
        for state in (
            InstanceState.STARTING,
            InstanceState.READY,
            InstanceState.ASLEEP,
            InstanceState.DRAINING,
        ):
            self._instances.labels(state=state.value).set(by_state.get(state, 0))
        self._templates.set(templates)
        self._template_pss.set(template_pss_bytes)
        self._parked.set(parked)

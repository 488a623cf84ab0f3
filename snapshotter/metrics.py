"""Every metric that the node agent exports, in one place; names are part of the contract with
dashboards.

| name | what |
|---|---|
| `pilotlight_starts_total{kind,outcome}` | starts by StartKind; outcome `ready` or the error's code |
| `pilotlight_start_seconds{kind}` | from the ask to ready |
| `pilotlight_start_phase_seconds{phase}` | its phases |
| `pilotlight_instances{state}` | instances on this node now |
| `pilotlight_templates` / `pilotlight_template_pss_bytes` | resident Templates, and what they cost |
| `pilotlight_parked_forks` | forks that wait behind Templates for an instance to become; their cost is in the line above |
| `pilotlight_templates_gone_total{reason}` | Templates that ended |
| `pilotlight_instances_gone_total{reason}` | instances that ended |
| `pilotlight_rung_failures_total{rung,reason}` | rungs that were tried in vain: the start went on with the next one |
| `pilotlight_start_prediction_ratio{kind}` | how long a start took, as a multiple of what was predicted |
| `pilotlight_snapshots{state}` / `pilotlight_snapshot_bytes` | snapshots on this node, and their disk |
| `pilotlight_snapshots_made_total{outcome}` | `ready`, or `refused` |
| `pilotlight_snapshot_phase_seconds{phase}` | what making one takes: `quiesce, dump, publish, prove` |
| `pilotlight_snapshot_misses_total{field}` | starts that found a snapshot which does not fit, by the field of its identity that differs |
| `pilotlight_log_dropped_bytes_total` | output of functions that print faster than is kept |
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


class Metrics:
    """The agent's registry. Owner: the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._starts = Counter(
            "pilotlight_starts", "Starts of instances", ["kind", "outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "pilotlight_start_seconds",
            "Ask to ready",
            ["kind"],
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._phases = Histogram(
            "pilotlight_start_phase_seconds",
            "Phases of starts",
            ["phase"],
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._instances = Gauge(
            "pilotlight_instances", "Instances now", ["state"], registry=self.registry
        )
        self._templates = Gauge(
            "pilotlight_templates", "Resident Templates", registry=self.registry
        )
        self._template_pss = Gauge(
            "pilotlight_template_pss_bytes", "PSS of resident Templates", registry=self.registry
        )
        self._parked = Gauge(
            "pilotlight_parked_forks", "Forks that wait for an assignment", registry=self.registry
        )
        self._templates_gone = Counter(
            "pilotlight_templates_gone", "Templates that ended", ["reason"], registry=self.registry
        )
        self._instances_gone = Counter(
            "pilotlight_instances_gone", "Instances that ended", ["reason"], registry=self.registry
        )
        self._rung_failures = Counter(
            "pilotlight_rung_failures",
            "Rungs tried in vain",
            ["rung", "reason"],
            registry=self.registry,
        )
        self._predictions = Histogram(
            "pilotlight_start_prediction_ratio",
            "Actual by predicted",
            ["kind"],
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )
        self._snapshots = Gauge(
            "pilotlight_snapshots", "Snapshots on this node", ["state"], registry=self.registry
        )
        self._snapshot_bytes = Gauge(
            "pilotlight_snapshot_bytes", "Their disk", registry=self.registry
        )
        self._snapshots_made = Counter(
            "pilotlight_snapshots_made",
            "Snapshots made or refused",
            ["outcome"],
            registry=self.registry,
        )
        self._snapshot_phases = Histogram(
            "pilotlight_snapshot_phase_seconds",
            "Phases of making one",
            ["phase"],
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._snapshot_misses = Counter(
            "pilotlight_snapshot_misses",
            "Snapshots that did not fit, by identity field",
            ["field"],
            registry=self.registry,
        )
        self._log_dropped = Counter(
            "pilotlight_log_dropped_bytes", "Output that was not kept", registry=self.registry
        )

    def started(self, kind: StartKind, seconds: float, phases_ms: Mapping[str, float]) -> None:
        """An instance is ready."""
        self._starts.labels(kind=kind.value, outcome="ready").inc()
        self._seconds.labels(kind=kind.value).observe(seconds)
        for phase, ms in phases_ms.items():
            self._phases.labels(phase=phase).observe(ms / 1000)

    def start_failed(self, kind: StartKind, outcome: str) -> None:
        """A start ended without an instance."""
        self._starts.labels(kind=kind.value, outcome=outcome).inc()

    def instance_gone(self, reason: str) -> None:
        """An instance ended."""
        self._instances_gone.labels(reason=reason).inc()

    def template_gone(self, reason: str) -> None:
        """A Template ended."""
        self._templates_gone.labels(reason=reason).inc()

    def rung_failed(self, rung: StartKind, reason: str) -> None:
        """A rung was tried in vain."""
        self._rung_failures.labels(rung=rung.value, reason=reason).inc()

    def predicted(self, kind: StartKind, *, predicted_ms: float, actual_ms: float) -> None:
        """What a start took that was predicted to take so long."""
        if predicted_ms > 0:
            self._predictions.labels(kind=kind.value).observe(actual_ms / predicted_ms)

    def snapshot_made(self, outcome: str, phases_ms: Mapping[str, float]) -> None:
        """One is ready, or was refused."""
        self._snapshots_made.labels(outcome=outcome).inc()
        for phase, ms in phases_ms.items():
            self._snapshot_phases.labels(phase=phase).observe(ms / 1000)

    def snapshot_missed(self, field: str) -> None:
        """A start found one that does not fit."""
        self._snapshot_misses.labels(field=field).inc()

    def observe_snapshots(self, *, by_state: Mapping[SnapshotState, int], used_bytes: int) -> None:
        """What there is now; called before each scrape."""
        for state in SnapshotState:
            self._snapshots.labels(state=state.value).set(by_state.get(state, 0))
        self._snapshot_bytes.set(used_bytes)

    def log_dropped(self, count: int) -> None:
        """Bytes of output that were thrown away."""
        self._log_dropped.inc(count)

    def observe(
        self,
        *,
        by_state: Mapping[InstanceState, int],
        templates: int,
        template_pss_bytes: int,
        parked: int,
    ) -> None:
        """What there is now; called before each scrape."""
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

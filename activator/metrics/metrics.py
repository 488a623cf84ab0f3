"""All metrics that the activator exports. Times in seconds, as Prometheus requires.

The number of series does not grow with tenants and functions: the first `series` of each have their
own series, those of functions until they are removed, and later ones are summed under `other`
(activator.metrics_series)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from activator.billing.shipping import Lag
from activator.billing.usage_pricing import UsageSubject
from activator.call_stats.observer import CallStats
from activator.calls.call import AnsweredCall
from activator.calls.degradation import features_reason
from activator.coordination.state import SharedStatistics
from activator.llm.engine_state import EngineState
from activator.metrics.batching import Batches
from activator.metrics.call_counters import (
    FAST,
    FUNCTION,
    OTHER,
    FunctionTally,
    LabelLimiter,
    WarmCounters,
)
from activator.metrics.collectors import (
    CallCollector,
    InstanceCollector,
    SharedCollector,
    TenantCollector,
    WaitingCollector,
)
from activator.metrics.indicators import Indicators
from activator.metrics.llm import LlmMetrics
from activator.metrics.response_cache import CacheMetrics
from activator.routing.route_table import CallTarget
from pilotlight.errors import BudgetReserved, OverBudget, OverQuota, PilotlightError, Shed
from pilotlight.protocol import HEADER_BATCH
from pilotlight.spec.pricing import GpuState
from snapshotter.types import InstanceInfo

__all__ = ["DEFAULT_SERIES", "OTHER", "LabelLimiter", "Metrics"]

DEFAULT_SERIES = 1000
SWEEP_S = 30.0
"""Twice the usual interval of scrapes."""
ABORTED = 499
"""Status of a request whose caller left."""
_BATCH = HEADER_BATCH.encode()


class Metrics:
    """The activator's metrics in their own registry; up to `series` tenants and as many functions
    have their own series.

    `observer` counts the same calls by revision and arm, for the controller."""

    def __init__(self, *, series: int = DEFAULT_SERIES) -> None:
        self.registry = CollectorRegistry()
        self._series = series
        self.tenants = LabelLimiter(series)
        self.functions = LabelLimiter(series)
        self.batches = Batches(self.functions)
        self.registry.register(self.batches)
        self.response_caches = CacheMetrics(self.functions)
        self.registry.register(self.response_caches)
        self._indicators = Indicators(self.functions)
        self.registry.register(self._indicators)
        self.observer = CallStats(self._indicators.add)
        self.language = LlmMetrics(self.registry, self.functions)
        self._refusals = _Refusals(self.registry, self.tenants)
        self._cold = Counter(
            "pilotlight_cold_calls",
            "Calls that waited for a start, by its start kind.",
            (*FUNCTION, "start_kind"),
            registry=self.registry,
        )
        self._degraded_features = Counter(
            "pilotlight_degraded_features",
            "Answers for which online features were defaults, by the worst reason.",
            (*FUNCTION, "reason"),
            registry=self.registry,
        )
        self._starts = _Starts(self.registry, self._labels)
        self._wait = Histogram(
            "pilotlight_priority_wait_seconds",
            "From arrival to a slot, of calls that did not find one free.",
            ("priority",),
            buckets=FAST,
            registry=self.registry,
        )
        self._gpu_seconds = Counter(
            "pilotlight_gpu_seconds",
            "Time of granted GPUs that was recorded, by kind and state: start, idle_free, "
            "idle_paid, busy, asleep.",
            (*FUNCTION, "gpu", "state"),
            registry=self.registry,
        )
        self._unbilled = Counter(
            "pilotlight_unbilled_calls",
            "Calls served although the journal could not be written (journal_full: serve).",
            registry=self.registry,
        )
        self._journal_lag_s = Gauge(
            "pilotlight_journal_lag_seconds",
            "Age of the oldest usage record not yet in the ledger.",
            registry=self.registry,
        )
        self._journal_lag = Gauge(
            "pilotlight_journal_lag_records",
            "Usage records not yet in the ledger.",
            registry=self.registry,
        )
        self._by_labels: dict[tuple[str, ...], FunctionTally] = {}
        self.registry.register(CallCollector(self._by_labels))

    def __repr__(self) -> str:
        return f"<Metrics {len(self._by_labels)} functions>"

    def answered(
        self,
        attempt: AnsweredCall,
        status: int,
        *,
        first_byte_ms: float = 0.0,
        completed: bool = True,
        is_awaited: bool = True,
    ) -> None:
        """Count a call that was answered and closed.

        Args:
            first_byte_ms, completed: of a stream: when its first bytes came (0: none did), and
                whether it ended by itself.
            is_awaited: its caller waits for it; False for a submitted call, however long it is
                queued."""
        call, answer = attempt.call, attempt.answer
        if attempt.is_hit:
            self._count_cached(attempt, status)
            return
        self.answered_warm(
            call.target, status, exec_s=attempt.exec_ms / 1000, queued_s=call.queued_ms / 1000
        )
        if call.target.batched:
            self.batches.answered(call.target, call.method, answer.header(_BATCH), time.monotonic())
        reason = features_reason(answer) if call.target.has_online_features else ""
        if reason:
            self._degraded_features.labels(*self._labels(call.target), reason).inc()
        if call.start_ms:
            self._cold.labels(*self._labels(call.target), call.start_kind.value).inc()
        if call.tokens is not None:
            self.language.ended(call.target, call.tokens, call.start_kind)
        if call.degraded:
            self.observer.degraded(call.asked or call.target, status)
            if call.asked is None:
                return  # no worker has answered
        self.observer.answered(
            call,
            status=status,
            outcome=answer.header(b"pilotlight-outcome").decode("latin-1")
            if status == answer.status
            else "",
            arm=call.choice.arm if call.choice is not None else "",
            dispatched_ns=attempt.dispatched_ns,
            ended_ns=attempt.ended_ns,
            picos=attempt.picos,
            first_byte_ms=first_byte_ms,
            streamed=answer.body is None and is_awaited,
            completed=completed,
            is_awaited=is_awaited and not call.degraded and not reason,
            is_degraded=bool(reason),
        )

    def _count_cached(self, attempt: AnsweredCall, status: int) -> None:
        """Count a call that the response cache answered: in no clock, because nothing ran."""
        call = attempt.call
        self._tally(call.target).count(status)
        self.observer.answered(
            call,
            status=status,
            arm=call.choice.arm if call.choice is not None else "",
            dispatched_ns=attempt.dispatched_ns,
            ended_ns=attempt.ended_ns,
            picos=attempt.picos,
            is_awaited=False,
        )

    def warm_counters(self, target: CallTarget, arm: str) -> WarmCounters:
        """Return where the fast path counts calls of a revision and arm."""
        return WarmCounters(
            function_of=partial(self._tally, target),
            revision_of=partial(self.observer.bucket, target, arm),
        )

    def answered_raw(
        self,
        attempt: AnsweredCall,
        status: int,
        *,
        is_stream: bool,
        first_byte_ms: float,
        completed: bool = True,
    ) -> None:
        """Count a raw HTTP request that was answered, or a WebSocket that has ended; the function
        chooses its own statuses."""
        call = attempt.call
        self.observer.answered(
            call,
            status=status,
            outcome="ok" if completed else "",
            arm=call.choice.arm if call.choice is not None else "",
            dispatched_ns=attempt.dispatched_ns,
            ended_ns=attempt.ended_ns,
            picos=attempt.picos,
            first_byte_ms=first_byte_ms if is_stream else 0.0,
            streamed=is_stream,
            completed=completed,
        )

    def waited(self, priority: str, seconds: float) -> None:
        """Count a call of this priority that got a slot after waiting."""
        self._wait.labels(priority).observe(seconds)

    def answered_warm(
        self, target: CallTarget, status: int, *, exec_s: float, queued_s: float = 0.0
    ) -> None:
        """Count a call that did not wait for a start and was answered by a worker."""
        tally = self._tally(target)
        tally.answered(status, exec_s, queued_s)

    def exemplify(
        self, target: CallTarget, *, exec_s: float, queued_s: float, trace_id: str, at: float
    ) -> None:
        """Attach a kept trace to the histograms of a call with these durations."""
        tally = self._tally(target)
        tally.execution.exemplify(exec_s, trace_id, at)
        tally.queue_wait.exemplify(queued_s, trace_id, at)

    def count_aborted(self, target: CallTarget | None = None, arm: str = "") -> None:
        """Count a request whose caller left. `target`: its function, if the call was not counted
        yet."""
        self._refusals.counted(ABORTED)
        if target is not None:
            self.observer.refused(target, ABORTED, arm=arm)

    def count_rejected(
        self, error: PilotlightError, tenant: str, target: CallTarget | None = None, arm: str = ""
    ) -> None:
        """Count a request that was answered with an error of the platform, and its reason: quota,
        budget or shedding. `tenant`: id, "" if unknown. `target`: its function, if the call was not
        counted yet."""
        self._refusals.counted(error.status)
        self._refusals.explained(error, tenant)
        if target is not None:
            self.observer.refused(target, error.status, error, arm=arm)

    def unbilled(self) -> None:
        """Count a call that was served without a billing record."""
        self._unbilled.inc()

    def gpu_time(self, subject: UsageSubject, gpu: str, state: GpuState, seconds: float) -> None:
        """Count recorded GPU seconds of a function."""
        labels = self.functions.of(subject.tenant, subject.app, subject.function)
        self._gpu_seconds.labels(*labels, gpu, state.value).inc(seconds)

    def instance_ready(self, target: CallTarget, info: InstanceInfo, seconds: float) -> None:
        """Count an instance that has started."""
        self.observer.started(target, ok=True)
        self._starts.ready(target, info, seconds)

    def instance_lost(self, target: CallTarget, reason: str) -> None:
        """Count an instance that ended unexpectedly."""
        self.observer.lost(target, reason)
        self.language.lost(target, reason)

    def engine_seen(self, target: CallTarget, view: EngineState) -> None:
        """Count a scrape of an engine."""
        if view.kv_use is not None:
            self.observer.cache_used(target, view.kv_use)

    def start_failed(self, target: CallTarget, code: str) -> None:
        """Count a failed start."""
        self.observer.started(target, ok=False)
        self._starts.failed(target, code)

    def collect_journal(self, lag: Callable[[], Lag]) -> None:
        """Export how far the ledger is behind, read at each scrape."""
        self._journal_lag.set_function(lambda: lag().records)
        self._journal_lag_s.set_function(lambda: lag().seconds)

    def collect_instances(
        self, states: Callable[[], Mapping[tuple[str, str, str, str], int]]
    ) -> None:
        """Export instances by state, read at each scrape; keys are (tenant, app, function,
        state)."""
        self.registry.register(InstanceCollector(states, self.functions))

    def collect_waiting(self, waiting: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Export waiting calls, read at each scrape; keys are (tenant, priority)."""
        self.registry.register(WaitingCollector(waiting, self.tenants))

    def collect_tenants(self, names: Callable[[], Mapping[str, str]]) -> None:
        """Export names of tenants by their ids, read at each scrape, to join with metrics by id."""
        self.registry.register(TenantCollector(names, self.tenants))

    def collect_shared(self, statistics: Callable[[], SharedStatistics]) -> None:
        """Export the state shared by several activators, read at each scrape."""
        self.registry.register(SharedCollector(statistics, self._series))

    def collect_autoscaler(self, leads: Callable[[], bool]) -> None:
        """Export whether this activator scales the functions of its cluster."""
        Gauge(
            "pilotlight_autoscaler_leader",
            "1 while this activator decides how many pods functions have (class pilotlight.dev).",
            registry=self.registry,
        ).set_function(lambda: int(leads()))

    async def sweep(self, deployed: Callable[[], AbstractSet[tuple[str, ...]]]) -> None:
        """Forget functions that are not in `deployed` (tenant, app, function), twice SWEEP_S apart:
        their last calls have been scraped then. Runs until cancelled."""
        gone: AbstractSet[tuple[str, ...]] = frozenset()
        while True:
            await asyncio.sleep(SWEEP_S)
            gone = self.delete_removed(deployed(), gone)

    def delete_removed(
        self, deployed: AbstractSet[tuple[str, ...]], gone: AbstractSet[tuple[str, ...]]
    ) -> AbstractSet[tuple[str, ...]]:
        """Forget the functions in `gone` that are still not deployed; return the others that are
        not."""
        missing = self.functions.names() - deployed
        for labels in missing & gone:
            self._remove(labels)
        return missing - gone

    def _remove(self, labels: tuple[str, ...]) -> None:
        named = dict(zip(FUNCTION, labels, strict=True))
        for metric in (
            *(self._cold, self._degraded_features, self._gpu_seconds),
            *self._starts.by_function,
        ):
            metric.remove_by_labels(named)
        for part in (self.batches, self._indicators, self.language, self.response_caches):
            part.forget(labels)
        self._by_labels.pop(labels, None)
        self.functions.forget(labels)

    def _labels(self, target: CallTarget) -> tuple[str, ...]:
        return self.functions.of(target.tenant, target.app, target.function)

    def _tally(self, target: CallTarget) -> FunctionTally:
        labels = self._labels(target)
        tally = self._by_labels.get(labels)
        if tally is None:
            tally = self._by_labels[labels] = FunctionTally(labels)
        return tally


class _Starts:
    """Counts starts of instances. `by_function`: metrics with a function's labels."""

    def __init__(
        self, registry: CollectorRegistry, labels_of: Callable[[CallTarget], tuple[str, ...]]
    ) -> None:
        self._labels_of = labels_of
        self._seconds = Histogram(
            "pilotlight_start_seconds",
            "Time to start an instance, by start kind.",
            (*FUNCTION, "start_kind"),
            buckets=FAST,
            registry=registry,
        )
        self._phases = Counter(
            "pilotlight_start_phase_seconds",
            "Time spent in each phase of starts, by start kind.",
            ("start_kind", "phase"),
            registry=registry,
        )
        self._failures = Counter(
            "pilotlight_start_failures",
            "Starts that failed, by the error's code.",
            (*FUNCTION, "code"),
            registry=registry,
        )
        self.by_function = (self._seconds, self._failures)

    def ready(self, target: CallTarget, info: InstanceInfo, seconds: float) -> None:
        kind = info.start_kind.value
        self._seconds.labels(*self._labels_of(target), kind).observe(seconds)
        for phase, ms in info.phases_ms.items():
            if ms >= 0:  # NaN is not: what is added once stays in the sum
                self._phases.labels(kind, phase).inc(min(ms / 1000, seconds))

    def failed(self, target: CallTarget, code: str) -> None:
        self._failures.labels(*self._labels_of(target), code).inc()


class _Refusals:
    """Counts requests without a worker's answer, and their reasons."""

    def __init__(self, registry: CollectorRegistry, tenants: LabelLimiter) -> None:
        self._tenants = tenants
        self._refused = Counter(
            "pilotlight_requests_refused",
            "Requests answered with an error before or instead of a worker's answer.",
            ("status",),
            registry=registry,
        )
        self._quota = Counter(
            "pilotlight_quota_refusals",
            "Calls over a quota, by its name.",
            ("tenant", "of", "quota"),
            registry=registry,
        )
        self._shed = Counter(
            "pilotlight_shed_calls",
            "Waiting calls that were shed for others.",
            ("tenant", "priority"),
            registry=registry,
        )
        self._budget = Counter(
            "pilotlight_budget_refusals",
            "Calls refused for a budget: `over-budget`, `insufficient-credit` (402) or "
            "`budget-reserved` (429).",
            ("tenant", "type"),
            registry=registry,
        )

    def counted(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def explained(self, error: PilotlightError, tenant: str) -> None:
        (name,) = self._tenants.of(tenant)
        if isinstance(error, OverQuota):
            self._quota.labels(
                name, str(error.detail.get("of", "")), str(error.detail.get("quota", ""))
            ).inc()
        elif isinstance(error, Shed):
            self._shed.labels(name, str(error.detail.get("priority", ""))).inc()
        elif isinstance(error, OverBudget | BudgetReserved):
            self._budget.labels(name, error.type).inc()

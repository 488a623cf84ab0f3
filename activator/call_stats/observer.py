"""Counts every finished call, by revision and arm, and returns the counts as observations. Owner:
the event loop.

A finished call is in exactly one of `answered`, `failed`, `refused` and `cancelled`. Of the
answered ones, a degraded one is in no clock; each other one is in exactly one of the clocks `cold`
(it waited for a start), `first_byte` (it streamed) and `warm`, so that no call counts against two
of the budgets that use these clocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pilotlight.errors import DeadlineExceeded, PilotlightError, WorkerCrashed
from pilotlight.spec.observations import LATENCY_BOUNDS, MAX_BUCKET, SHADOW_ARM, Observation
from pilotlight.spec.policies import DEFAULT_OBJECTIVES, Objectives

if TYPE_CHECKING:
    from activator.calls.call import Call
    from activator.quotas.token_reservation import TokenReservation
    from activator.routing.call_target import CallTarget

_OWN_WORDS = (501, 503)
"""Statuses by which a function may deliberately report that it does not do something, or not
now."""
_CLIENT_LEFT = 499
_BY_STATUS = {502: "crashed", 504: "late"}
"""The outcome by the status of an attempt, if its worker reported none."""
AT_ONCE_MS = 1.0
"""A call that reached its worker within this time had each earlier stage in bucket 0: it is counted
once, not stage by stage."""
_BEFORE = ("route", "admit", "queue")
_WHY = frozenset({"raised", "invalid", "crashed", "late"})


class StatsBucket:
    """Counters of one revision and arm between two posts: plain numbers and lists, because every
    call adds to them.

    Attributes:
        warm: answered calls that waited for nothing, by latency: what is counted of them elsewhere
            follows from it, so that each adds to few numbers.
        delayed: those of them that did not reach their worker at once (AT_ONCE_MS).
        is_drained: its counts were taken: later calls count in another bucket."""

    __slots__ = (
        "answered",
        "at_once_ms",
        "budgets_ms",
        "cancelled",
        "clocks",
        "cold",
        "compared",
        "cost_picos",
        "crashed",
        "degraded",
        "delayed",
        "exec",
        "exec_budget_ms",
        "exec_ms",
        "failed",
        "invalid",
        "is_drained",
        "late",
        "matched",
        "out_of_memory",
        "overruns",
        "raised",
        "records",
        "refused",
        "skipped",
        "starts",
        "starts_failed",
        "streams",
        "streams_completed",
        "tokens_cached",
        "tokens_in",
        "tokens_out",
        "warm",
    )

    def __init__(self, objectives: Objectives) -> None:
        self.answered = self.failed = self.refused = self.cancelled = 0
        self.degraded = self.cold = self.raised = self.invalid = self.crashed = self.late = 0
        self.starts = self.starts_failed = self.streams = self.streams_completed = 0
        self.records = self.cost_picos = self.tokens_in = self.tokens_out = self.tokens_cached = (
            self.out_of_memory
        ) = 0
        self.compared = self.matched = self.skipped = 0
        self.exec_ms = 0.0
        self.is_drained = False
        self.delayed = 0
        self.warm = [0] * (MAX_BUCKET + 1)
        self.exec = [0] * (MAX_BUCKET + 1)
        self.clocks: dict[str, dict[int, int]] = {}
        self.overruns: dict[str, int] = {}
        self.budgets_ms = {
            stage: seconds * 1000 for stage, seconds in objectives.budgets_s().items()
        }
        self.exec_budget_ms = self.budgets_ms["exec"]
        self.at_once_ms = min(AT_ONCE_MS, *(self.budgets_ms[stage] for stage in _BEFORE))

    def __repr__(self) -> str:
        return (
            f"<StatsBucket {self.answered + sum(self.warm)} answered, {self.failed} failed, "
            f"{self.refused} refused, "
            f"{self.cancelled} cancelled>"
        )

    def clock(self, name: str, ms: float) -> None:
        """Add a call to a clock."""
        buckets = self.clocks.setdefault(name, {})
        bucket = bisect_left(LATENCY_BOUNDS, ms)
        buckets[bucket] = buckets.get(bucket, 0) + 1

    def add(self, name: str, counts: Mapping[int, int]) -> None:
        """Add several calls, by bucket."""
        _add(self.clocks, name, counts)

    def stages(self, stages_ms: Mapping[str, float]) -> None:
        """Add the stages of an answered call, and count the ones over their budget."""
        for stage, ms in stages_ms.items():
            self.clock(stage, ms)
            if ms > self.budgets_ms[stage]:
                self.overruns[stage] = self.overruns.get(stage, 0) + 1

    def failure(self, why: str) -> None:
        """Count a call that failed in the platform or the function: `raised`, `invalid`, `crashed`,
        `late`, or another reason."""
        self.failed += 1
        if why in _WHY:
            setattr(self, why, getattr(self, why) + 1)

    def to_observation(
        self, *, tenant: str, function_id: str, revision: str, arm: str, minute: int
    ) -> Observation:
        """The counts as an observation."""
        latency = {name: dict(buckets) for name, buckets in self.clocks.items()}
        for name, counts in (("warm", self.warm), ("exec", self.exec)):
            _add(latency, name, {bucket: count for bucket, count in enumerate(counts) if count})
        warm = sum(self.warm)
        if at_once := warm - self.delayed:
            for name in (*_BEFORE, "start"):
                _add(latency, name, {0: at_once})
        counted: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        counted["answered"] += warm
        return Observation(
            tenant=tenant,
            function_id=function_id,
            revision=revision,
            arm=arm,
            minute=minute,
            **counted,
            calls_billed=self.records + warm,
            exec_ms=round(self.exec_ms),
            overruns=dict(self.overruns),
            latency=latency,
        )


_PLAIN = (
    "answered",
    "failed",
    "refused",
    "cancelled",
    "degraded",
    "cold",
    "raised",
    "invalid",
    "crashed",
    "late",
    "starts",
    "starts_failed",
    "streams",
    "streams_completed",
    "cost_picos",
    "tokens_in",
    "tokens_out",
    "tokens_cached",
    "out_of_memory",
    "compared",
    "matched",
    "skipped",
)


def _add(latency: dict[str, dict[int, int]], name: str, counts: Mapping[int, int]) -> None:
    if counts:
        buckets = latency.setdefault(name, {})
        for bucket, count in counts.items():
            buckets[bucket] = buckets.get(bucket, 0) + count


class CallStats:
    """The counts since the last `drain`; `on_taken` is called with the target and observation of
    each."""

    def __init__(self, on_taken: Callable[[CallTarget, Observation], None] | None = None) -> None:
        self._on_taken = on_taken
        self._buckets: dict[tuple[CallTarget, str], StatsBucket] = {}

    def __repr__(self) -> str:
        return f"<CallStats {len(self._buckets)} buckets>"

    def answered(
        self,
        call: Call,
        *,
        status: int,
        outcome: str = "",
        arm: str = "",
        ended_ns: int,
        dispatched_ns: int,
        picos: int = 0,
        first_byte_ms: float = 0.0,
        streamed: bool = False,
        completed: bool = True,
        is_awaited: bool = True,
        is_degraded: bool = False,
    ) -> None:
        """Count a call that a worker answered.

        Args:
            status: of the answer, 499 if its caller left meanwhile.
            outcome: the worker's own outcome (HEADER_OUTCOME); "" if there is none.
            first_byte_ms: of a stream: milliseconds from the call's beginning to its first bytes;
                0: none came.
            completed: of a stream: it ended by itself.
            is_awaited: False if its duration counts for no clock of this function: a submitted
                call, or a call in place of another's.
            is_degraded: its online features were defaults."""
        tally = self.bucket(call.target, arm)
        tally.records += 1
        tally.cost_picos += picos
        exec_ms = (ended_ns - dispatched_ns) / 1e6
        tally.exec_ms += exec_ms
        if call.tokens is not None:
            _count_tokens(tally, call.tokens, is_cold=call.start_ms > 0)
        if status >= 400 and not (streamed and not completed and status != _CLIENT_LEFT):
            _count_error(
                tally, status, outcome or _BY_STATUS.get(status, ""), is_own_word=outcome == "ok"
            )
            return
        tally.answered += 1
        tally.degraded += is_degraded
        is_cold = call.start_ms > 0
        tally.cold += is_cold
        if streamed:
            tally.streams += 1
            tally.streams_completed += completed
        if not is_awaited:
            return
        whole_ms = (ended_ns - call.began_ns) / 1e6
        tally.clock(
            "cold" if is_cold else "first_byte" if streamed else "warm", first_byte_ms or whole_ms
        )
        tally.stages({**stages_before(call, dispatched_ns), "exec": exec_ms})

    def degraded(self, target: CallTarget, status: int = 200, *, arm: str = "") -> None:
        """Count a call of `target` that was answered by a variant, or by its fallback ladder."""
        tally = self.bucket(target, arm)
        if status >= 400:
            _count_error(tally, status, "")
            return
        tally.answered += 1
        tally.degraded += 1

    def refused(
        self,
        target: CallTarget,
        status: int,
        error: PilotlightError | None = None,
        *,
        arm: str = "",
    ) -> None:
        """Count a call that ended without a worker's answer; 499: its caller left."""
        why = (
            "crashed"
            if isinstance(error, WorkerCrashed)
            else "late"
            if isinstance(error, DeadlineExceeded)
            else ""
        )
        _count_error(self.bucket(target, arm), status, why)

    def started(self, target: CallTarget, *, ok: bool) -> None:
        """Count a start that has ended."""
        tally = self.bucket(target)
        tally.starts += 1
        tally.starts_failed += not ok

    def lost(self, target: CallTarget, reason: str) -> None:
        """Count an instance that ended unexpectedly, for this reason."""
        if reason == "out_of_memory":
            self.bucket(target).out_of_memory += 1

    def cache_used(self, target: CallTarget, share: float) -> None:
        """Record the share (0 to 1) of an engine's cache in use at a scrape."""
        self.bucket(target).add("kv", {round(min(1.0, max(0.0, share)) * 100): 1})

    def shadowed(
        self, target: CallTarget, *, status: int, exec_ms: float, matched: bool | None
    ) -> None:
        """Count a mirrored call that was answered; `matched` None: there was nothing to compare."""
        tally = self.bucket(target, SHADOW_ARM)
        tally.exec_ms += exec_ms
        if status >= 400:
            _count_error(tally, status, "")
        else:
            tally.answered += 1
            tally.clock("warm", exec_ms)
        if matched is not None:
            tally.compared += 1
            tally.matched += matched

    def skipped(self, target: CallTarget) -> None:
        """Count a call that was not mirrored."""
        self.bucket(target, SHADOW_ARM).skipped += 1

    def drain(self, minute: int) -> list[Observation]:
        """Return and reset the counts since the last call of this method, as of this minute."""
        taken, self._buckets = self._buckets, {}
        observations = []
        for (target, arm), tally in taken.items():
            tally.is_drained = True
            one = tally.to_observation(
                tenant=target.tenant,
                function_id=target.function_id,
                revision=target.revision,
                arm=arm,
                minute=minute,
            )
            if self._on_taken is not None:
                self._on_taken(target, one)
            observations.append(one)
        return observations

    def bucket(self, target: CallTarget, arm: str = "") -> StatsBucket:
        """Return where the calls of a revision and arm are counted until they are drained."""
        bucket = self._buckets.get((target, arm))
        if bucket is None:
            bucket = StatsBucket(target.spec.objectives or DEFAULT_OBJECTIVES)
            self._buckets[target, arm] = bucket
        return bucket


def _count_tokens(tally: StatsBucket, use: TokenReservation, *, is_cold: bool) -> None:
    """Add the tokens of a language model's call, however it ended."""
    tally.tokens_in += use.tokens_in
    tally.tokens_out += use.tokens_out
    tally.tokens_cached += use.tokens_cached
    if use.first_token_ns and not is_cold:
        tally.clock("ttft", (use.first_token_ns - use.began_ns) / 1e6)
    tally.add("itl", use.gaps)


def _count_error(tally: StatsBucket, status: int, why: str, *, is_own_word: bool = False) -> None:
    if status == _CLIENT_LEFT:
        tally.cancelled += 1
    elif status < 500 or (is_own_word and status in _OWN_WORDS):
        tally.refused += 1
    else:
        tally.failure(why)


def stages_before(call: Call, dispatched_ns: int) -> dict[str, float]:
    """The stages of a call before its worker, in milliseconds. Time that was not spent on a start,
    nor before admission, counts as queued."""
    return {
        "route": (call.routed_ns - call.began_ns) / 1e6,
        "admit": (call.received_ns - call.routed_ns) / 1e6,
        "queue": max(0.0, (dispatched_ns - call.received_ns) / 1e6 - call.start_ms),
        "start": call.start_ms,
    }

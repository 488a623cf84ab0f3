"""Counts every finished call, by revision and arm, and returns the counts as observations.

The hot path is `answered_warm`: a dictionary lookup, two bisections and some additions. Owner: the
event loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from activator.call_stats.bucket import StatsBucket, stages_of
from pilotlight.errors import DeadlineExceeded, PilotlightError, WorkerCrashed
from pilotlight.spec.observations import LATENCY_BOUNDS, SHADOW_ARM, Observation
from pilotlight.spec.policies import DEFAULT_OBJECTIVES

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


class CallStats:
    """The counts since the last `drain`; `on_taken` is called with the target and observation of
    each."""

    def __init__(self, on_taken: Callable[[CallTarget, Observation], None] | None = None) -> None:
        self._on_taken = on_taken
        self._plain: dict[CallTarget, StatsBucket] = {}
        self._armed: dict[tuple[CallTarget, str], StatsBucket] = {}

    def __repr__(self) -> str:
        return f"<CallStats {len(self._plain) + len(self._armed)} tallies>"

    def answered_warm(
        self, call: Call, arm: str, *, ended_ns: int, dispatched_ns: int, picos: int
    ) -> None:
        """Count a call that did not wait and was answered completely and successfully by its own
        function."""
        target = call.target
        tally = (self._plain.get(target) if not arm else None) or self._tally(target, arm)
        exec_ms = (ended_ns - dispatched_ns) / 1e6
        before_ms = (dispatched_ns - call.began_ns) / 1e6
        tally.answered += 1
        tally.records += 1
        tally.cost_picos += picos
        tally.exec_ms += exec_ms
        tally.warm[bisect_left(LATENCY_BOUNDS, before_ms + exec_ms)] += 1
        tally.exec[bisect_left(LATENCY_BOUNDS, exec_ms)] += 1
        if exec_ms > tally.exec_budget_ms:
            tally.overruns["exec"] = tally.overruns.get("exec", 0) + 1
        if before_ms <= tally.at_once_ms:
            tally.at_once += 1
        else:
            tally.stages(_before(call, dispatched_ns))

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
    ) -> None:
        """Count a call that a worker answered.

        Args:
            status: of the answer, 499 if its caller left meanwhile.
            outcome: the worker's own outcome (HEADER_OUTCOME); "" if there is none.
            first_byte_ms: of a stream: milliseconds from the call's beginning to its first bytes;
                0: none came.
            completed: of a stream: it ended by itself.
            is_awaited: False if its duration counts for no clock of this function: a submitted
                call, or a call in place of another's."""
        tally = self._tally(call.target, arm)
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
        tally.stages({**_before(call, dispatched_ns), "exec": exec_ms})

    def degraded(self, target: CallTarget, status: int = 200, *, arm: str = "") -> None:
        """Count a call of `target` that was answered by a variant, or by its fallback ladder."""
        tally = self._tally(target, arm)
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
        _count_error(self._tally(target, arm), status, why)

    def started(self, target: CallTarget, *, ok: bool) -> None:
        """Count a start that has ended."""
        tally = self._tally(target, "")
        tally.starts += 1
        tally.starts_failed += not ok

    def lost(self, target: CallTarget, reason: str) -> None:
        """Count an instance that ended unexpectedly, for this reason."""
        if reason == "out_of_memory":
            self._tally(target, "").out_of_memory += 1

    def cache_used(self, target: CallTarget, share: float) -> None:
        """Record the share (0 to 1) of an engine's cache in use at a scrape."""
        self._tally(target, "").add("kv", {round(min(1.0, max(0.0, share)) * 100): 1})

    def shadowed(
        self, target: CallTarget, *, status: int, exec_ms: float, matched: bool | None
    ) -> None:
        """Count a mirrored call that was answered; `matched` None: there was nothing to compare."""
        tally = self._tally(target, SHADOW_ARM)
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
        self._tally(target, SHADOW_ARM).skipped += 1

    def drain(self, minute: int) -> list[Observation]:
        """Return and reset the counts since the last call of this method, as of this minute."""
        plain, self._plain = self._plain, {}
        armed, self._armed = self._armed, {}
        found = [(target, "", tally) for target, tally in plain.items()]
        found += [(target, arm, tally) for (target, arm), tally in armed.items()]
        observations = []
        for target, arm, tally in found:
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

    def _tally(self, target: CallTarget, arm: str) -> StatsBucket:
        if not arm:
            tally = self._plain.get(target)
            if tally is None:
                tally = self._plain[target] = StatsBucket(
                    target.spec.objectives or DEFAULT_OBJECTIVES
                )
            return tally
        tally = self._armed.get((target, arm))
        if tally is None:
            tally = self._armed[target, arm] = StatsBucket(
                target.spec.objectives or DEFAULT_OBJECTIVES
            )
        return tally


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


def _before(call: Call, dispatched_ns: int) -> dict[str, float]:
    """The stages of a call before its worker, in milliseconds. Time that was not spent on a start,
    nor before admission, counts as queued."""
    stages = stages_of(
        route_ms=(call.routed_ns - call.began_ns) / 1e6,
        admit_ms=(call.received_ns - call.routed_ns) / 1e6,
        queue_ms=max(0.0, (dispatched_ns - call.received_ns) / 1e6 - call.start_ms),
        start_ms=call.start_ms,
        exec_ms=0.0,
    )
    del stages["exec"]
    return stages

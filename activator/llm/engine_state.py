"""The state of one engine: its last metrics, the number of calls it can take, and its recent
performance.

The limit of its calls follows from its KV memory: the average use per sequence is measured (share
in use ÷ running sequences) and smoothed, and as many sequences fit as fill it to `kv_target`. A
sequence grows as it is generated, so the measure lags behind a burst: if more memory than the
target is in use, the limit follows from the running sequences at once."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from activator.llm.engine_metrics import EngineMetrics, Histogram

KV_TARGET = 0.9
"""Target share of KV memory: running sequences still grow, and an engine with full memory restarts
sequences."""
RISE = 0.5
"""Weight of a measurement above the estimate: adopted after two."""
FALL = 0.2
"""Weight of a measurement below it: new sequences use little."""
RECENT_S = 10.0
"""Maximum age of recent first tokens."""
PEAK_HALVES_S = 300.0
"""Half-life of the remembered peak throughput of an engine, while nothing was as fast."""
MAX_MISSED = 3
"""Consecutive failed scrapes after which the state of an engine is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The state of one engine at its last scrape. None = unknown.

    Attributes:
        at: monotonic seconds of the scrape.
        slots: concurrent calls: its sequences, limited by its KV memory.
        running, waiting, kv_use: see `engine_metrics.EngineMetrics`.
        prefix_hit_rate: share of prompt tokens since the previous scrape that were in the cache.
        prompt_tokens_per_s, generation_tokens_per_s: since the previous scrape.
        peak_prompt_tokens_per_s: the recent maximum.
        reading: all metrics, including counters since its start."""

    at: float
    slots: int
    running: int
    waiting: int
    kv_use: float | None
    prefix_hit_rate: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    peak_prompt_tokens_per_s: float | None
    reading: EngineMetrics

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length of the answered requests; 0 before the first."""
        first = self.reading.first_token_s
        return (
            (self.reading.prompt_tokens or 0.0) / first.count
            if first is not None and first.count
            else 0.0
        )


class EngineTracker:
    """Tracks one engine from scrape to scrape. Owner: the throttler of its revision.

    Attributes:
        view: None = unknown."""

    __slots__ = (
        "_first_tokens",
        "_kv_target",
        "_max_num_seqs",
        "_missed",
        "_peak",
        "_share",
        "due_at",
        "view",
    )

    def __init__(self, max_num_seqs: int, *, kv_target: float = KV_TARGET) -> None:
        self._max_num_seqs = max_num_seqs
        self._kv_target = kv_target
        self._share: float | None = None
        self._peak: float | None = None
        self._missed = 0
        self._first_tokens: deque[tuple[float, Histogram]] = deque()
        self.view: EngineState | None = None
        self.due_at = 0.0

    def __repr__(self) -> str:
        return f"<Watched {self.view.slots if self.view is not None else '?'}/{self._max_num_seqs} slots, missed {self._missed}>"

    def record(self, reading: EngineMetrics, now: float) -> EngineState:
        """Record the metrics of a scrape."""
        before, self._missed = self.view, 0
        self._share = share_after(self._share, reading)
        elapsed_s = now - before.at if before is not None else 0.0
        then = before.reading if before is not None else None
        prompt_per_s = _rate(
            then.prompt_tokens if then is not None else None, reading.prompt_tokens, elapsed_s
        )
        self._update_peak(prompt_per_s, elapsed_s)
        self._record_first_tokens(then, reading, now)
        self.view = EngineState(
            at=now,
            slots=slots(
                reading, self._share, max_num_seqs=self._max_num_seqs, kv_target=self._kv_target
            ),
            running=reading.running,
            waiting=reading.waiting,
            kv_use=reading.kv_use,
            prefix_hit_rate=_hit_rate(then, reading),
            prompt_tokens_per_s=prompt_per_s,
            generation_tokens_per_s=_rate(
                then.generation_tokens if then is not None else None,
                reading.generation_tokens,
                elapsed_s,
            ),
            peak_prompt_tokens_per_s=self._peak,
            reading=reading,
        )
        return self.view

    def record_miss(self) -> EngineState | None:
        """Record a failed scrape. The previous state stays valid for a while."""
        self._missed += 1
        if self._missed >= MAX_MISSED:
            self.view = None
            self._first_tokens.clear()
        return self.view

    def first_tokens_since(self, since: float) -> Histogram | None:
        """Times to first tokens of the last RECENT_S and not before `since`; None = there were
        none."""
        found = [histogram for at, histogram in self._first_tokens if at > since]
        if not found:
            return None
        together = found[0]
        for histogram in found[1:]:
            together = together.plus(histogram)
        return together

    def _update_peak(self, per_s: float | None, elapsed_s: float) -> None:
        if self._peak is not None:
            self._peak *= 0.5 ** (elapsed_s / PEAK_HALVES_S)
        if per_s:
            self._peak = max(per_s, self._peak or 0.0)

    def _record_first_tokens(
        self, before: EngineMetrics | None, reading: EngineMetrics, now: float
    ) -> None:
        """Record new first tokens. Those of the first scrape are skipped: they may be from before
        its snapshot."""
        if before is not None and reading.first_token_s is not None:
            fresh = reading.first_token_s.since(before.first_token_s)
            if fresh.count:
                self._first_tokens.append((now, fresh))
        while self._first_tokens and self._first_tokens[0][0] <= now - RECENT_S:
            self._first_tokens.popleft()


def share_after(before: float | None, reading: EngineMetrics) -> float | None:
    """Smoothed average share of KV memory per sequence after a scrape; None = unknown."""
    if reading.kv_use is None or not reading.running or not reading.kv_use:
        return before
    measured = reading.kv_use / reading.running
    if before is None:
        return measured
    return before + (RISE if measured > before else FALL) * (measured - before)


def slots(
    reading: EngineMetrics, share: float | None, *, max_num_seqs: int, kv_target: float = KV_TARGET
) -> int:
    """Concurrent calls of an engine: `max_num_seqs`, or fewer if its KV memory allows fewer; at
    least one."""
    bound = max_num_seqs
    if share:
        bound = math.floor(min(float(bound), kv_target / share))
    if reading.kv_use is not None and reading.kv_use > kv_target:
        bound = min(bound, math.floor(reading.running * kv_target / reading.kv_use))
    return max(1, bound)


def _rate(before: float | None, now: float | None, elapsed_s: float) -> float | None:
    if before is None or now is None or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s


def _hit_rate(before: EngineMetrics | None, now: EngineMetrics) -> float | None:
    if before is None or None in (
        before.prefix_queries,
        now.prefix_queries,
        before.prefix_hits,
        now.prefix_hits,
    ):
        return None
    asked = (now.prefix_queries or 0.0) - (before.prefix_queries or 0.0)
    return ((now.prefix_hits or 0.0) - (before.prefix_hits or 0.0)) / asked if asked > 0 else None

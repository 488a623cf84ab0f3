"""The token reservation of one call of a language model and its actual usage: counted while its
answer streams, settled at its end.

The engine's own count is authoritative. Without it (the caller left, or the engine died) the
delivered tokens count; a prompt that an engine had begun with when the caller left counts as
estimated. An attempt that broke before its first token used none. An answer without any count used
its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from activator.fairness.queue_priority import QueuePriority
from activator.quotas.admission import UNCOUNTED, Admission
from pilotlight.spec.engines import FINISH_REASONS, MAX_TOKENS
from pilotlight.spec.observations import LATENCY_BOUNDS
from pilotlight.spec.pricing import NOT_RUN

_ENGINE_WORDS = {"abort": "cancelled", "function_call": "tool_calls"}
"""Finish reasons of engines that have another name in FINISH_REASONS."""
_NS_PER_MS = 1_000_000


class TokenReservation:
    """The tokens of one call, over all its attempts. `*_ns` are monotonic. Owner: the call's task.

    Attributes:
        estimated_in: estimated tokens of its prompt.
        max_out: maximum tokens of all its answers together; 0 for embeddings.
        max_in: maximum tokens of its prompts together. Counts beyond `max_in` and `max_out` are cut
            to them: a server of user code may say anything.
        expected: the part of it that is reserved in quotas; usage beyond that becomes debt.
        cap: `max_tokens` to write into the request; None = no change.
        degraded: `output<=N` if its answer is shorter than requested, otherwise "".
        tokens_in, tokens_out, tokens_cached: usage of the current attempt so far.
        finish: why its answer ended; "" while it has not.
        is_counted: the engine itself reported the counts.
        first_token_ns, last_ns: time of the first and the latest piece; 0 = none yet.
        gaps: bucket (`observations.latency_bucket`) → number of intervals between two pieces.
        admission: its share of quotas; None = nothing is counted.
        revision: key of the answering one (`CallTarget.key`), possibly another function's than
            requested; "" before any."""

    __slots__ = (
        "_by_choice",
        "_on_end",
        "_out_of_choices",
        "_spent",
        "admission",
        "began_ns",
        "cap",
        "degraded",
        "estimated_in",
        "expected",
        "finish",
        "first_token_ns",
        "gaps",
        "is_counted",
        "last_ns",
        "max_in",
        "max_out",
        "revision",
        "tokens_cached",
        "tokens_in",
        "tokens_out",
    )

    def __init__(
        self,
        *,
        estimated_in: int,
        max_out: int,
        began_ns: int,
        expected: int | None = None,
        cap: int | None = None,
        degraded: str = "",
        admission: Admission = UNCOUNTED,
        on_end: Callable[[TokenReservation], None] | None = None,
    ) -> None:
        """`expected`: None = all of `max_out`. `on_end`: called when the call has ended."""
        self.estimated_in = estimated_in
        self.max_out = max_out
        self.max_in = MAX_TOKENS
        self.expected = max_out if expected is None else expected
        self.began_ns = began_ns
        self.cap = cap
        self.degraded = degraded
        self.admission = admission
        self._on_end = on_end
        self._spent = 0
        self.revision = ""
        self._reset()

    def _reset(self) -> None:
        self.tokens_in = self.tokens_out = self.tokens_cached = 0
        self.finish = ""
        self.is_counted = False
        self.first_token_ns = self.last_ns = 0
        self.gaps: dict[int, int] = {}
        self._by_choice: dict[int, int] | None = None
        self._out_of_choices = 0

    def drop_prompt(self) -> None:
        """Drop `on_end`: it would keep the prompt in memory until the end."""
        self._on_end = None

    def __repr__(self) -> str:
        return (
            f"<TokenReservation {self.tokens_in}/{self.estimated_in} in, "
            f"{self.tokens_out}/{self.max_out} out, {self.finish or 'open'}>"
        )

    @property
    def reserved(self) -> int:
        """Tokens reserved in quotas."""
        return self.estimated_in + self.expected

    @property
    def used(self) -> int:
        """Tokens that all its attempts used, in and out."""
        return self._spent + self.tokens_in + self.tokens_out

    @property
    def first_token_ms(self) -> int:
        """Whole milliseconds from the request to the first token of a stream, at least 1; 0 without
        one."""
        return (
            max(1, (self.first_token_ns - self.began_ns) // _NS_PER_MS)
            if self.first_token_ns
            else 0
        )

    def rank(self, rank: QueuePriority) -> QueuePriority:
        """Its queue priority, with its reserved tokens as cost."""
        return replace(rank, cost=float(max(1, self.reserved)))

    # -- while it runs -----------------------------------------------------------------------------
    def begin(self, revision: str) -> None:
        """Begin an attempt on an engine of this revision. The usage of previous attempts
        remains."""
        self.revision = revision
        self._spent += self.tokens_in + self.tokens_out
        self._reset()

    def on_piece(self, now_ns: int, n_tokens: int = 1) -> None:
        """Count a piece of the answer with `n_tokens` tokens, as far as known. Call before
        `on_usage` of the same piece."""
        if self.last_ns:
            bucket = bisect_left(LATENCY_BOUNDS, (now_ns - self.last_ns) / 1e6)
            self.gaps[bucket] = self.gaps.get(bucket, 0) + 1
        else:
            self.first_token_ns = now_ns
        self.last_ns = now_ns
        self._set_out(self.tokens_out + n_tokens)

    def on_usage(
        self, prompt: int, completion: int, cached: int = 0, *, choice: int | None = None
    ) -> None:
        """Record the engine's own count: of the whole call, or in a stream of one of its choices so
        far (`choice`, from 0)."""
        self.is_counted = True
        self.tokens_in = min(prompt, self.max_in)
        self.tokens_cached = min(cached or self.tokens_cached, self.tokens_in)
        if choice is None or (choice == 0 and self._by_choice is None):
            self._set_out(completion)
            return
        if self._by_choice is None:
            self._by_choice = {0: self.tokens_out}
            self._out_of_choices = self.tokens_out
        # a running sum: a server may name thousands of choices in thousands of events
        self._out_of_choices += completion - self._by_choice.get(choice, 0)
        self._by_choice[choice] = completion
        self._set_out(self._out_of_choices)

    def _set_out(self, tokens: int) -> None:
        self.tokens_out = min(tokens, self.max_out)

    def on_finish(self, reason: str) -> None:
        """Record the engine's reason for the end of the answer, or of one of its choices."""
        reason = _ENGINE_WORDS.get(reason, reason)
        self.finish = reason if reason in FINISH_REASONS else "stop"

    # -- its end -----------------------------------------------------------------------------------
    def close(self, *, status: int, outcome: str) -> None:
        """Finalize the counts of an attempt that has ended and is about to be billed."""
        if outcome in NOT_RUN:
            self._reset()
        elif outcome == "cancelled":
            self.finish = self.finish or "cancelled"
            self.tokens_in = self.tokens_in or self.estimated_in
        elif outcome == "ok":
            if not self.is_counted:
                self.tokens_in = self.estimated_in
        else:
            if not self.tokens_out:
                self.tokens_in = self.tokens_cached = 0
            if status >= 500:
                self.finish = "error"

    def settle(self) -> None:
        """Settle and release the quotas of a call that has ended in any way. Idempotent."""
        admission, self.admission = self.admission, UNCOUNTED
        admission.settle_tokens(self.used)
        admission.release()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

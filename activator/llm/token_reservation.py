"""What one call of a language model reserved of tokens, and what it really took: counted while its
answer goes by, settled at its end.

The engine's own count is what counts. Where it did not say (its caller left, or it died) what was
delivered is; a prompt that an engine had begun with when the caller left is taken as long as it was
estimated. An attempt that broke before its first token took none. An answer that came without any
count took its prompt all the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from activator.call_stats.bucket import BOUNDS
from activator.fairness.queue_priority import QueuePriority
from activator.quotas.admission import Admission
from pilotlight.engines import FINISH_REASONS
from pilotlight.pricing import BUSY

_ENGINE_WORDS = {"abort": "cancelled", "function_call": "tool_calls"}
"""What engines call some of FINISH_REASONS."""
_NS_PER_MS = 1_000_000


class TokenReservation:
    """Of one call, over all its attempts. `*_ns` are monotonic. Owner: the call's task.

    Attributes:
        estimated_in: tokens that its prompt probably has. max_out: tokens that all its answers
        together may have; 0 of embeddings. expected: of these, what quotas set aside; what is used
        beyond is owed. cap: what to write as `max_tokens` into the request; None = leave it as it
        is. degraded: `output<=N` where its answer is shorter than it asked for, else "". tokens_in,
        tokens_out, tokens_cached: of the attempt that runs, so far. finish: why its answer ended;
        "" while it has not. is_counted: the engine itself said how many there were. first_token_ns,
        last_ns: when the first and the latest piece came; 0 = none did. gaps: bucket
        (`observations.bucket_of`) → times between two pieces. admission: what it holds of quotas;
        None = nothing is counted. revision: key of the one that answers (`Target.key`), which may
        be another function's than was asked; "" before any does.
    """

    __slots__ = (
        "_by_choice",
        "_on_end",
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
        admission: Admission | None = None,
        on_end: Callable[[TokenReservation], None] | None = None,
    ) -> None:
        """`expected`: None = all of `max_out`. `on_end`: told when the call has ended."""
        self.estimated_in = estimated_in
        self.max_out = max_out
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

    def forget_prompt(self) -> None:
        """Tell nobody at its end: who learns from it would hold the prompt until then."""
        self._on_end = None

    def __repr__(self) -> str:
        return (
            f"<TokenReservation {self.tokens_in}/{self.estimated_in} in, "
            f"{self.tokens_out}/{self.max_out} out, {self.finish or 'open'}>"
        )

    @property
    def reserved(self) -> int:
        """Tokens that quotas set aside for it."""
        return self.estimated_in + self.expected

    @property
    def used(self) -> int:
        """Tokens that all its attempts took, in and out."""
        return self._spent + self.tokens_in + self.tokens_out

    @property
    def first_token_ms(self) -> int:
        """Whole milliseconds from the request to the first token of a stream, 1 at least; 0 without
        one."""
        return (
            max(1, (self.first_token_ns - self.began_ns) // _NS_PER_MS)
            if self.first_token_ns
            else 0
        )

    def rank(self, rank: QueuePriority) -> QueuePriority:
        """Its place among those that wait: it weighs as much as it reserves."""
        return replace(rank, cost=float(max(1, self.reserved)))

    # -- while it runs -----------------------------------------------------------------------------
    def begin(self, revision: str) -> None:
        """An attempt goes to an engine of this revision: what the one before took stays taken."""
        self.revision = revision
        self._spent += self.tokens_in + self.tokens_out
        self._reset()

    def on_piece(self, now_ns: int, n_tokens: int = 1) -> None:
        """A piece of the answer came that holds tokens: `n_tokens` of them, as far as can be seen.
        Before `on_usage` of the same piece."""
        if self.last_ns:
            bucket = bisect_left(BOUNDS, (now_ns - self.last_ns) / 1e6)
            self.gaps[bucket] = self.gaps.get(bucket, 0) + 1
        else:
            self.first_token_ns = now_ns
        self.last_ns = now_ns
        self.tokens_out += n_tokens

    def on_usage(
        self, prompt: int, completion: int, cached: int = 0, *, choice: int | None = None
    ) -> None:
        """The engine's own count: of the whole call, or, while a stream runs, of one of its choices
        so far (`choice`, from 0)."""
        self.is_counted = True
        self.tokens_in = prompt
        self.tokens_cached = cached or self.tokens_cached
        if choice is None or (choice == 0 and self._by_choice is None):
            self.tokens_out = completion
            return
        if self._by_choice is None:
            self._by_choice = {0: self.tokens_out}
        self._by_choice[choice] = completion
        self.tokens_out = sum(self._by_choice.values())

    def on_finish(self, reason: str) -> None:
        """The engine said why the answer, or one of its choices, ended."""
        reason = _ENGINE_WORDS.get(reason, reason)
        self.finish = reason if reason in FINISH_REASONS else "stop"

    # -- its end -----------------------------------------------------------------------------------
    def close(self, *, status: int, outcome: str) -> None:
        """An attempt has ended, and is about to be billed: from now on the counts are what it
        took."""
        if outcome == BUSY:
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

    def leave(self) -> None:
        """The call has ended, on whatever path: its quotas are settled, its slot among the running
        is free. Again: nothing."""
        admission, self.admission = self.admission, None
        if admission is not None:
            admission.settle_tokens(self.used)
            admission.release()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

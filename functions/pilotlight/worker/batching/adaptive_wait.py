"""Learns how long it pays to wait for one more call, from the results of earlier waits.

A batch that runs now costs a·n + b; one more call in it saves the b that it would cost in a batch
of its own. During a wait each of the n waiting calls is delayed. So a silence pays while n times
its length is less than b: `worth` = b / n. For a single call that is as long as fixed costs alone
would fill the machine; for a large batch it is nearly zero, unless the next call is certain to
arrive at once.

The time until the next call is estimated per number of waiting calls, because it depends on it: of
eight callers that each wait for their answer, the eighth arrives at once and a ninth never. While
`n` were waiting, `came` calls joined in `waited_s` seconds, so the next one is expected in
`waited_s / came` (the maximum likelihood estimate of a constant rate from censored observations).
Without observations it is assumed to be `PRIOR` times `worth`. Evidence decays, so that waiting is
occasionally tried again.

A silence never lasts longer than `worth`, whatever was learned (the ski rental bound of Karlin et
al. 1988: at most twice the cost of an optimal decision). `docs/explanation/batches.md` compares
this rule with others in simulations."""

from __future__ import annotations

PRIOR = 0.5
"""Assumed time until the next call, in units of `worth`, weighted like one observation."""
FADE = 0.98
"""Decay of evidence per further observation: a fruitless wait is tried again after some 35 to 100
batches."""
MAX_CAME = 8.0
"""Maximum number of calls that evidence counts: after calls stop arriving, about this many
fruitless waits follow."""
MAX_SIZES = 64
"""Number of sizes with separate evidence; larger ones share theirs."""


class AdaptiveWait:
    """Results of waiting for one batch key. Pure except for its state; owned by the event loop."""

    def __init__(self) -> None:
        self._came: dict[int, float] = {}
        self._waited_s: dict[int, float] = {}

    def __repr__(self) -> str:
        known = ", ".join(
            f"{n}: {self._came[n]:.2g} in {s * 1000:.3g} ms"
            for n, s in sorted(self._waited_s.items())
        )
        return f"<AdaptiveWait {known or 'nothing known'}>"

    def seconds(self, size: int, fixed_s: float) -> float:
        """How long a batch of `size` may wait in silence if one more call saves `fixed_s`; 0 for
        not at all."""
        worth_s, size = fixed_s / size, min(size, MAX_SIZES)
        came, waited_s = self._came.get(size, 0.0), self._waited_s.get(size, 0.0)
        return min(worth_s, max(0.0, worth_s * (came + 1 - PRIOR) - waited_s))

    def note(self, size: int, waited_s: float, *, came: bool) -> None:
        """Record that a batch of `size` waited in silence for `waited_s`, until a call arrived or
        the batch was released."""
        size = min(size, MAX_SIZES)
        known = self._came.get(size, 0.0) * FADE + came
        kept = min(1.0, MAX_CAME / known) if known else 1.0
        self._came[size] = known * kept
        self._waited_s[size] = (self._waited_s.get(size, 0.0) * FADE + waited_s) * kept

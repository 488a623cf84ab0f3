"""How long it pays to wait for one more call, learnt from what waiting brought.

A batch that runs now costs a·n + b; one more call in it saves the b that it would cost in a batch
of its own. While it waits, each of the n that are there waits. So a silence pays while n times its
length is less than b: `worth` = b / n. For a single call that is as long as fixed costs alone would
fill the machine; for a large batch it is nearly nothing, unless the next call is certain to come at
once.

How far away the next call is, is counted by the number that is there already, because it depends on
that: of eight callers that each wait for their answer, the eighth comes at once and a ninth never.
While `n` were there, `came` calls joined in `waited_s` seconds of waiting, so the next one is
expected in `waited_s / came` (the maximum likelihood estimate for a constant rate from observations
of which some were cut off). Before anything is known it is taken for `PRIOR` of what it is worth.
Evidence fades, so that now and then waiting is tried again.

A silence never lasts longer than it is worth, whatever was learnt (the ski rental bound of Karlin
et al. 1988: at most twice the cost of knowing beforehand). `docs/batching.md` has what this did in
simulations beside other rules."""

from __future__ import annotations

PRIOR = 0.5
"""What one more call is taken to be away, in units of what it is worth, as if it had been seen
once."""
FADE = 0.98
"""What evidence counts after each further use of it: a fruitless wait is tried again after some 35
to 100 batches."""
MAX_CAME = 8.0
"""Evidence of more calls counts as that of so many: when they stop coming it takes as many
fruitless waits to believe it."""
MAX_SIZES = 64
"""Sizes that are told apart; larger ones share their evidence."""


class AdaptiveWait:
    """What waiting brought for one kind of call. Pure but for its own memory; owned by the event
    loop."""

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
        """For how long a batch of `size` may wait in silence, 0 for not at all, where one more call
        saves `fixed_s`."""
        worth_s, size = fixed_s / size, min(size, MAX_SIZES)
        came, waited_s = self._came.get(size, 0.0), self._waited_s.get(size, 0.0)
        return min(worth_s, max(0.0, worth_s * (came + 1 - PRIOR) - waited_s))

    def note(self, size: int, waited_s: float, *, came: bool) -> None:
        """A batch of `size` waited in silence for so long; then a call came, or none did and it was
        released."""
        size = min(size, MAX_SIZES)
        known = self._came.get(size, 0.0) * FADE + came
        kept = min(1.0, MAX_CAME / known) if known else 1.0
        self._came[size] = known * kept
        self._waited_s[size] = (self._waited_s.get(size, 0.0) * FADE + waited_s) * kept

"""What comparing two schemas may cost, counted before it is spent."""

from __future__ import annotations

MAX_STEPS = 20_000
"""Steps before a comparison is abandoned. A step is a pair of nodes that is compared, or some 10 µs
of other work; all together take tenths of a second."""
TEXT_PER_STEP = 2_000
"""Characters of schemas compared as text, per step."""


class ComparisonTooLarge(Exception):
    """Raised when two schemas are too large or too deeply nested to compare."""


class StepBudget:
    """The shared budget of several comparisons. Owner: the caller that compares."""

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._left = most

    def __repr__(self) -> str:
        return f"<StepBudget: {self._left} left>"

    def take(self, count: int = 1) -> None:
        """Charge steps before they are made. Raises ComparisonTooLarge."""
        self._left -= count
        if self._left < 0:
            raise ComparisonTooLarge(
                "the schemas are too large to compare: their compatibility is not known"
            )

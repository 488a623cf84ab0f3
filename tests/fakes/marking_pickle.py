"""A pickle that shows by a file whether anybody opened it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class MarkingPickle:
    """Arguments `{"x": 1}` whose pickle writes `mark` wherever it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.body = pickle.dumps(((), {"x": _Marking(mark)}))

    @property
    def was_opened(self) -> bool:
        """Whether anybody opened it."""
        return self.mark.exists()


class _Marking:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self._mark)!r}, 'w').close() or 1",)

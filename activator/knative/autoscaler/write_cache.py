"""What was written a moment ago, until the watch tells it: else the same would be written again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.cluster.changes import Key, key_of, version_of
from pilotlight.cluster.kinds import Kind

Object = Mapping[str, Any]


class Latest:
    """Answers to writes. Owner: one event loop."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Kind, Key], tuple[str, Object]] = {}

    def __repr__(self) -> str:
        return f"<Latest {len(self._answers)} answers>"

    def wrote(self, kind: Kind, before: Object | None, answer: Object) -> None:
        """`answer`: what came of a write to `before`; None = there was nothing."""
        self._answers[kind, key_of(answer)] = (version_of(before or {}), answer)

    def of(self, kind: Kind, key: Key, watched: Object | None) -> Object | None:
        """The object: as it was answered while the watch still has what it had before that write,
        else as the watch has it."""
        before, answer = self._answers.get((kind, key), ("", None))
        if answer is None:
            return watched
        if version_of(watched or {}) == before:
            return answer
        del self._answers[kind, key]
        return watched

    def forget(self, key: Key) -> None:
        """It is gone."""
        for known in [known for known in self._answers if known[1] == key]:
            del self._answers[known]

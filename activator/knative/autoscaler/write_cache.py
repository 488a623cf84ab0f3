"""Caches written objects until the watch reports them, because they would be written again
otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import Key, key_of, version_of

Object = Mapping[str, Any]


class Latest:
    """The answers to recent writes. Owner: one event loop."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Kind, Key], tuple[str, Object]] = {}

    def __repr__(self) -> str:
        return f"<Latest {len(self._answers)} answers>"

    def store(self, kind: Kind, before: Object | None, answer: Object) -> None:
        """Store the answer to a write to `before`; None = it was created."""
        self._answers[kind, key_of(answer)] = (version_of(before or {}), answer)

    def get(self, kind: Kind, key: Key, watched: Object | None) -> Object | None:
        """The current object: the answer while the watch still has the version before that write,
        otherwise the watched one."""
        before, answer = self._answers.get((kind, key), ("", None))
        if answer is None:
            return watched
        if version_of(watched or {}) == before:
            return answer
        del self._answers[kind, key]
        return watched

    def delete(self, key: Key) -> None:
        """Delete the answers for an object that is gone."""
        for known in [known for known in self._answers if known[1] == key]:
            del self._answers[known]

"""Concurrency limit of submitted calls: a function's calls are dispatched up to the capacity of its
instances; the others wait here, first in first out.

A call that waits for its quotas releases the revision's semaphore, but keeps the semaphore of its
own key, so that only as many calls of one key as could run retry their quotas."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from activator.routing.call_target import CallTarget


class AsyncConcurrencyLimiter:
    """Semaphores by revision and key; unused ones are garbage-collected. Owner: the event loop."""

    def __init__(self) -> None:
        self._gates: WeakValueDictionary[tuple[str, ...], asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AsyncConcurrencyLimiter {len(self._gates)}>"

    def for_revision(self, target: CallTarget) -> asyncio.Semaphore:
        """Return the semaphore of a revision."""
        return self._gate((target.key,), target)

    def for_key(self, key_id: str, target: CallTarget) -> asyncio.Semaphore:
        """Return the semaphore of one key's calls of a revision."""
        return self._gate((target.key, key_id), target)

    def _gate(self, whose: tuple[str, ...], target: CallTarget) -> asyncio.Semaphore:
        scaling = target.spec.scaling
        gate = self._gates.get(whose)
        if gate is None:
            gate = self._gates[whose] = asyncio.Semaphore(
                scaling.max_instances * scaling.max_inputs
            )
        return gate

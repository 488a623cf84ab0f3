"""How many submitted calls of a function are dispatched at once: as many as its instances can hold;
the rest wait here, first in first out.

A call that waits for its quotas leaves the function's gate to others, and keeps its place among
those of its own key: so no more calls of one key ask again and again than could run."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from activator.routing.call_target import CallTarget


class AsyncConcurrencyLimiter:
    """Gates that somebody holds or waits for; the others are forgotten. Owner: the event loop."""

    def __init__(self) -> None:
        self._gates: WeakValueDictionary[tuple[str, ...], asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AsyncConcurrencyLimiter {len(self._gates)}>"

    def of_all(self, target: CallTarget) -> asyncio.Semaphore:
        """That of a revision."""
        return self._gate((target.key,), target)

    def of_key(self, key_id: str, target: CallTarget) -> asyncio.Semaphore:
        """That of one key's calls of a revision."""
        return self._gate((target.key, key_id), target)

    def _gate(self, whose: tuple[str, ...], target: CallTarget) -> asyncio.Semaphore:
        scaling = target.spec.scaling
        gate = self._gates.get(whose)
        if gate is None:
            gate = self._gates[whose] = asyncio.Semaphore(
                scaling.max_instances * scaling.max_inputs
            )
        return gate

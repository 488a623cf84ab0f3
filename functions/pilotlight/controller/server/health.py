"""`/healthz` and `/readyz`, served with the metrics: a cluster's probes have no client
certificates, which the control plane's own listener requires.

Healthy: the event loop runs, and no background task has failed. Ready: requests are served, and the
database answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database.store import Store

PATIENCE_S = 3.0
"""Timeout of the database's answer to the simplest query."""


@dataclass(slots=True, kw_only=True)
class Probes:
    """Health probes. Owner: the event loop.

    Attributes:
        is_serving: whether requests are answered.
        tasks: background tasks that must not end with an error.
    """

    store: Store | None = None
    is_serving: Callable[[], bool] = lambda: False
    tasks: Sequence[asyncio.Task[None]] = field(default_factory=tuple)

    async def answer(self, path: str) -> tuple[int, str] | None:
        """Return status and text for a probe's path; None for any other path."""
        if path == "/healthz":
            return _answer(self._why_ill())
        if path == "/readyz":
            return _answer(self._why_ill() or await self._why_not_ready())
        return None

    def _why_ill(self) -> str:
        broken = [
            task.get_name()
            for task in self.tasks
            if task.done() and not task.cancelled() and task.exception() is not None
        ]
        return f"broken: {', '.join(broken)}" if broken else ""

    async def _why_not_ready(self) -> str:
        if not self.is_serving() or self.store is None:
            return "not serving: starting, stopping, or standing by for another controller"
        try:
            async with asyncio.timeout(PATIENCE_S):
                await anyio.to_thread.run_sync(self.store.ping, abandon_on_cancel=True)
        except TimeoutError:
            return f"the database has not answered for {PATIENCE_S:g} s"
        except SQLAlchemyError as e:
            return f"the database does not answer: {type(e).__name__}"
        return ""


def _answer(why_not: str) -> tuple[int, str]:
    return (503, why_not) if why_not else (200, "ok")

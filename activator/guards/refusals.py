"""Reports what guards refused to the controller's audit log: who, when, by which rule; never the
text.

Refusals of one kind (function, key, stage and rule) within `EVERY_S` are one entry with their
number, since callers choose how often they are refused, and entries are kept for ever. They are
kept while the controller does not answer, as far as `MAX_KEPT` goes; a report whose answer was lost
is sent again, and may be in the log twice. `kill -9` loses those of the last seconds, which are in
the activator's own log too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx

from activator.calls.call import Call
from activator.metrics.llm import LlmMetrics
from activator.routing.call_target import CallTarget
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import REFUSALS_PATH

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
MAX_KEPT: Final = 1000
MAX_OF_TENANT: Final = 32
"""Kinds of one tenant's refusals that are kept apart: its functions choose rules."""
BATCH: Final = 200
"""Entries of one report."""
OTHER: Final = "other"
"""The rule of refusals that are too many kinds to be kept apart."""
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
LAST_S: Final = 3.0
_Key = tuple[str, ...]


class AuditSink(Protocol):
    """Destination of refusals."""

    async def report(self, refusals: list[dict[str, Any]]) -> None:
        """Record refusals. Raises httpx.HTTPError if they did not arrive."""

    async def aclose(self) -> None:
        """Close connections."""


class ControllerAudit:
    """The controller's audit log."""

    def __init__(self, *, controller: Endpoint, token: str) -> None:
        self._client = controller_client(controller, token=token, timeout_s=10.0)

    async def report(self, refusals: list[dict[str, Any]]) -> None:
        """See AuditSink."""
        answer = await self._client.post(REFUSALS_PATH, json={"refusals": refusals})
        answer.raise_for_status()

    async def aclose(self) -> None:
        """See AuditSink."""
        await self._client.aclose()


@dataclass(slots=True)
class _Refusals:
    call: str
    first_at: float
    last_at: float
    calls: int = 1


class RefusalReporter:
    """Counts checks and reports refusals (`checks.CheckRecorder`). Owner: the event loop; `run` is
    one task."""

    def __init__(
        self,
        metrics: LlmMetrics,
        sink: AuditSink,
        *,
        clock: Callable[[], float] = time.time,
        every_s: float = EVERY_S,
    ) -> None:
        """`clock`: wall time in seconds since the epoch."""
        self._metrics = metrics
        self._sink = sink
        self._clock = clock
        self._every_s = every_s
        self._kept: dict[_Key, _Refusals] = {}
        self._kinds: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<RefusalReporter {len(self._kept)} entries to report>"

    def count_check(self, target: CallTarget, stage: str, outcome: str) -> None:
        """Count a check."""
        self._metrics.guarded(target, stage, outcome)

    def record_refusal(self, call: Call, stage: str, rule: str) -> None:
        """Record a refusal."""
        target, now = call.target, self._clock()
        log.info(
            "guard_refused call=%s function=%s key=%s stage=%s rule=%s",
            call.id,
            target.name,
            call.caller.key_id or "-",
            stage,
            rule,
        )
        key = (target.name, target.revision, call.caller.key_id, stage, rule)
        is_full = len(self._kept) >= MAX_KEPT or self._kinds[target.tenant] >= MAX_OF_TENANT
        if key not in self._kept and is_full:
            key = (target.name, "", "", stage, OTHER)
        known = self._kept.get(key)
        if known is not None:
            known.calls += 1
            known.last_at = now
        elif len(self._kept) < 2 * MAX_KEPT:
            self._kept[key] = _Refusals(call.id, now, now)
            self._kinds[target.tenant] += 1

    async def run(self) -> None:
        """Report until cancelled."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            if await self.flush():
                backoff.reset()
                await asyncio.sleep(self._every_s)
            else:
                await backoff.pause()

    async def flush(self) -> bool:
        """Report what is kept. Returns False where the controller did not take it."""
        while self._kept:
            kept = dict(list(self._kept.items())[:BATCH])
            for key in kept:
                del self._kept[key]
                self._kinds -= Counter((_tenant_of(key),))
            try:
                await self._sink.report([_entry(key, one) for key, one in kept.items()])
            except BaseException as e:
                self._requeue(kept)
                if not isinstance(e, httpx.HTTPError):
                    raise
                log.warning("guard_refusals_not_reported entries=%d error=%r", len(kept), e)
                return False
        return True

    def _requeue(self, kept: dict[_Key, _Refusals]) -> None:
        for key, one in kept.items():
            if (newer := self._kept.get(key)) is not None:
                one.calls += newer.calls
                one.last_at = newer.last_at
            else:
                self._kinds[_tenant_of(key)] += 1
            self._kept[key] = one

    async def aclose(self) -> None:
        """Report what is left, and close."""
        try:
            async with asyncio.timeout(LAST_S):
                await self.flush()
        except TimeoutError:
            log.warning("guard_refusals_lost entries=%d", len(self._kept))
        await self._sink.aclose()


def _tenant_of(key: _Key) -> str:
    return key[0].partition("/")[0]


def _entry(key: _Key, one: _Refusals) -> dict[str, Any]:
    name, revision, caller, stage, rule = key
    tenant, environment, app, function = name.split("/")
    return {
        "tenant": tenant,
        "function": f"{environment}/{app}/{function}",
        "revision": revision,
        "key": caller,
        "stage": stage,
        "rule": rule,
        "call": one.call,
        "calls": one.calls,
        "first_at": round(one.first_at, 3),
        "last_at": round(one.last_at, 3),
    }

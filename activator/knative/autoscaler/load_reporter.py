"""Reports this activator's loads to the autoscaler: each second, and at once when it needs pods
(`scale_request.ScaleDemand`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from activator.balancing.throttler import Throttler
from activator.knative.autoscaler.load_report import Load, Statement
from activator.knative.autoscaler.load_report_store import BoardUnreachable, LoadReportStore

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Interval between reports: a window's bucket."""
NOTHING = Load()


class LoadReporter:
    """Sends reports. Owner: the event loop.

    `loads`: loads of all revisions with calls or instances here, by key, without requested pods."""

    def __init__(self, board: LoadReportStore, *, loads: Callable[[], Statement]) -> None:
        self._board = board
        self._loads = loads
        self._asked: dict[str, int] = {}
        self._is_delivered = True

    def __repr__(self) -> str:
        return (
            f"<LoadReporter asks for {sum(self._asked.values())} pods of {len(self._asked)} "
            f"revisions>"
        )

    async def request(self, key: str, wanted: int) -> None:
        """Request pods of a revision and report at once."""
        self._asked[key] = wanted
        await self.report((key,))

    async def withdraw(self, key: str) -> None:
        """Withdraw the request. The next report contains it, because it is not urgent."""
        self._asked.pop(key, None)

    async def run(self) -> None:
        """Send reports until cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self, pokes: Collection[str] = ()) -> None:
        """Send one report. A failed one is corrected by the next."""
        loads = dict(self._loads())
        for key, wanted in self._asked.items():
            loads[key] = replace(loads.get(key, NOTHING), asked=wanted)
        try:
            await self._board.post(loads, pokes)
        except BoardUnreachable as e:
            if self._is_delivered:
                log.warning("load report not delivered to the autoscaler error=%s", e)
            self._is_delivered = False
        else:
            self._is_delivered = True

    async def aclose(self) -> None:
        """Withdraw all requests and close. Claims are released by their owners."""
        self._asked.clear()
        await self._board.delete()
        await self._board.aclose()


def loads_of(
    throttlers: Iterable[Throttler],
    concurrency: Mapping[str, float],
    held: Mapping[str, tuple[Sequence[str], str]],
    now: float,
    *,
    promoted: Collection[str] = (),
    promised: Callable[[str], int] = lambda _: 0,
) -> dict[str, Load]:
    """The loads of one activator.

    Args:
        concurrency: by revision key, of the last second.
        held: (instances, revision key) of each claimed pod, by its uid.
        promoted: uids of the promoted ones among these.
        promised: number of starts that wait for an instance in one, by revision key."""
    own: dict[str, dict[str, int]] = {}
    bridging: dict[str, dict[str, int]] = {}
    loads: dict[str, Load] = {}
    calls: dict[str, int] = {}
    for throttler in throttlers:
        calls |= {instance.id: instance.in_flight for instance in throttler.instances.values()}
        loads[throttler.target.key] = Load(
            concurrency=concurrency.get(throttler.target.key, 0.0),
            in_flight=throttler.in_flight,
            waiting=throttler.waiting,
            oldest_wait_s=throttler.oldest_wait_s(now) or 0.0,
            start_s=throttler.expected_start_s(),
            call_s=throttler.call_s(now),
        )
    for uid, (instances, key) in held.items():
        running = {instance: calls.get(instance, 0) for instance in instances}
        if uid in promoted:
            bridging.setdefault(key, {}).update(running)
        else:
            own.setdefault(key, {})[uid] = sum(running.values())
    return {
        key: replace(
            loads.get(key, NOTHING),
            held=own.get(key, {}),
            promoted=bridging.get(key, {}),
            promised=promised(key),
        )
        for key in loads.keys() | own.keys() | bridging.keys()
    }

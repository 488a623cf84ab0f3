"""Make before break: a revision that is assigned traffic gets it once it has an instance; until
then the previous revision answers.

When a route document moves traffic to a revision with an instance, it takes effect at once. For a
revision without one, the instances that its share of the traffic needs are started, and its units
stay with the previous revision until they are ready, at most for its startup clock. The previous
revision is not retired meanwhile. Calls that name a revision (by tag or pin) go to it, and wait for
it. A rollback (`TrafficDocument.at_once`) takes effect at once: calls wait for a good response
instead of getting a bad one.

Where there is no capacity for both (mostly GPUs), `rollout.strategy` of the new revision decides.
SURGE lets the startup clock run out, then calls go to the new revision, so that the old one is
scaled down. WAIT continues while capacity is missing. SWAP drains the old revision's instances, the
most idle first and one at a time, while the new one lacks capacity; if it then fails for another
reason, calls go back to the old revision until it starts.

Owner: the event loop, through `RouteTable`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial

from activator.balancing.throttler import Throttler
from activator.resilience.breaker import State
from activator.routing.call_target import CallTarget
from activator.routing.traffic_split import Cutover, FunctionRouter
from pilotlight.spec.policies import RolloutStrategy
from snapshotter.errors import NoCapacity

log = logging.getLogger(__name__)

AGAIN_S = 1.0


class CutoverTracker:
    """Begins and ends cutovers. `finish`: called with the function whose cutover has ended;
    `again_s`: least seconds between two starts after a failure; `running`: cutovers by function
    name."""

    def __init__(
        self,
        *,
        throttler_of: Callable[[CallTarget], Throttler],
        finish: Callable[[str], None],
        again_s: float = AGAIN_S,
    ) -> None:
        self._throttler_of = throttler_of
        self._finish = finish
        self.again_s = again_s
        self.running: dict[str, Cutover] = {}

    def __repr__(self) -> str:
        return f"<CutoverTracker {len(self.running)}>"

    def begin(self, name: str, routed: FunctionRouter, before: FunctionRouter) -> None:
        """Move a function from `before` to `routed`, with a cutover where new instances are
        needed."""
        if (old := self.running.pop(name, None)) is not None:
            _stop(old)
            for target in old.awaited.values():
                self._throttler_of(target).on_awaited_start = None
            if self._awaited(old.awaited.values()):
                before = old.previous
        live = {target.key: self._live(target) for target in before.answering}
        wanted = {
            target.key: target
            for target in routed.answering
            if routed.document.weights.get(target.revision)
        }
        awaited = self._awaited(target for key, target in wanted.items() if not live.get(key))
        held = tuple(
            target
            for target in before.answering
            if live[target.key] and target.revision not in routed.targets
        )
        if not awaited or not any(live.values()):
            return
        for target in awaited.values():
            share = routed.document.weights[target.revision] / 100
            if not routed.document.at_once:
                self._throttler_of(target).on_awaited_start = partial(self._start_ended, target)
            self._start(target, math.ceil(sum(live.values()) * share))
        if routed.document.at_once:
            return
        handover = routed.handover = self.running[name] = Cutover(
            before, awaited, held, self._serves
        )
        routed.only = None
        self._set_timer(name, handover)
        handover.ticker = asyncio.get_running_loop().call_later(self.again_s, self._tick, name)
        log.info(
            "cutover begins function=%s to=%s",
            name,
            ",".join(target.revision for target in awaited.values()),
        )

    def _set_timer(self, name: str, handover: Cutover) -> None:
        patience_s = max(target.spec.clocks.startup_s for target in handover.awaited.values())
        handover.timer = asyncio.get_running_loop().call_later(patience_s, self._on_timeout, name)

    def cancel(self, name: str) -> None:
        """Cancel the cutover of a function that was removed or whose route was replaced."""
        if (old := self.running.pop(name, None)) is not None:
            _stop(old)
            for target in old.awaited.values():
                self._throttler_of(target).on_awaited_start = None

    def clear(self) -> None:
        """Cancel all cutovers."""
        for name in list(self.running):
            self.cancel(name)

    async def aclose(self) -> None:
        """Cancel all cutovers."""
        self.clear()

    def _start_ended(self, target: CallTarget, failed: str) -> None:
        """A start of the revision ended, with the error's code or "": check whether its cutover can
        end."""
        handover = self.running.get(target.name)
        if handover is not None and target.key in handover.awaited:
            _mark(handover.lacking, target.key, is_so=failed == NoCapacity.code)
            _mark(handover.broken, target.key, is_so=failed not in ("", NoCapacity.code))
            asyncio.get_running_loop().call_soon(self._check_ready, target.name)

    def _check_ready(self, name: str) -> None:
        handover = self.running.get(name)
        if handover is None:
            return
        come = (
            handover.awaited.keys() - (awaited := self._awaited(handover.awaited.values())).keys()
        )
        for key in come:
            self._throttler_of(handover.awaited[key]).on_awaited_start = None
        handover.awaited = awaited
        if not handover.awaited:
            self._end(name, "done")

    def _tick(self, name: str) -> None:
        """Retry failed starts, and drain the old revision where the strategy requires it."""
        handover = self.running.get(name)
        if handover is None:
            return
        for target in handover.awaited.values():
            if target.spec.rollout.strategy is RolloutStrategy.SWAP and self._lacks_room(
                handover, target
            ):
                self._yield_instance(handover, target)
            throttler = self._throttler_of(target)
            if not throttler.starting and not throttler.is_start_paused:
                self._start(target, 1)
        handover.ticker = asyncio.get_running_loop().call_later(self.again_s, self._tick, name)

    def _lacks_room(self, handover: Cutover, target: CallTarget) -> bool:
        """Return whether its last start was refused, or all starts in progress wait for a quota or
        for room on the node."""
        throttler = self._throttler_of(target)
        return target.key in handover.lacking or 0 < throttler.starting <= throttler.blocked_starts

    def _yield_instance(self, handover: Cutover, target: CallTarget) -> None:
        """Drain the most idle instance of the previous revisions, unless one is already
        draining."""
        before = [
            self._throttler_of(old)
            for old in handover.previous.answering
            if old.key not in handover.awaited
        ]
        if any(throttler.is_yielding for throttler in before):
            return
        live = [
            (instance.in_flight, instance.idle_since, n)
            for n, throttler in enumerate(before)
            for instance in throttler.live()
        ]
        if not live:
            return
        throttler = before[min(live)[-1]]
        victim = min(
            throttler.live(), key=lambda instance: (instance.in_flight, instance.idle_since)
        )
        log.info(
            "draining instance for the next revision instance=%s function=%s to=%s",
            victim.id,
            target.name,
            target.revision,
        )
        throttler.drain(victim)

    def _on_timeout(self, name: str) -> None:
        handover = self.running[name]
        waits = [
            target
            for target in handover.awaited.values()
            if target.spec.rollout.strategy is RolloutStrategy.WAIT
        ]
        if any(self._lacks_room(handover, target) for target in waits):
            log.info(
                "cutover waits for capacity function=%s to=%s",
                name,
                ",".join(target.revision for target in waits),
            )
            self._set_timer(name, handover)
            return
        self._end(name, "out of time")

    def _end(self, name: str, why: str) -> None:
        log.info("cutover ends function=%s why=%s", name, why)
        self.cancel(name)
        self._finish(name)

    def _awaited(self, targets: Iterable[CallTarget]) -> dict[str, CallTarget]:
        return {target.key: target for target in targets if not self._is_ready(target)}

    def _is_ready(self, target: CallTarget) -> bool:
        """Return whether it has an instance, and no further start to wait for."""
        throttler = self._throttler_of(target)
        return self._live(target) > 0 and throttler.starting <= throttler.blocked_starts

    def _live(self, target: CallTarget) -> int:
        return sum(1 for _ in self._throttler_of(target).live())

    def _serves(self, target: CallTarget) -> bool:
        """Return whether it has an instance, and its calls do not fail."""
        health = self._throttler_of(target).health
        return self._live(target) > 0 and (health is None or health.breaker.state is State.CLOSED)

    def _start(self, target: CallTarget, count: int) -> None:
        throttler = self._throttler_of(target)
        throttler.is_retired = False
        if not throttler.starting:
            throttler.start(count)


def _mark(keys: set[str], key: str, *, is_so: bool) -> None:
    if is_so:
        keys.add(key)
    else:
        keys.discard(key)


def _stop(handover: Cutover) -> None:
    for timer in (handover.timer, handover.ticker):
        if timer is not None:
            timer.cancel()

"""The loop that decides on every active rollout each second and carries out the decision.

All state between two rounds is in the tables, so a restarted controller continues where the old one
stopped. The wall clock is compared with the monotonic clock: when the wall clock was changed, in
either direction, the steps restart, because their time and their minutes are no longer valid."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database.store import Store
from pilotlight.controller.release import traffic
from pilotlight.controller.rollouts import evidence, lifecycle, repository
from pilotlight.controller.rollouts.decision import decide
from pilotlight.controller.rollouts.records import Decision, RolloutState, RolloutStatus, Verdict
from pilotlight.controller.rollouts.repository import Rollout
from pilotlight.errors import NotFound, PilotlightError
from pilotlight.spec.pricing import Rates

log = logging.getLogger(__name__)

TICK_S = 1.0
JUMP_S = 5.0
"""Difference of the wall clock against the monotonic one that counts as a change of the clock: more
than a slow round, or the slewing of a time service, causes."""
REST = 20.0
"""A rollout is skipped for this many times the duration of its last evaluation, so that one takes
at most a twentieth of a core: steps may last days, and then many minutes must be summed."""
REST_BESIDE = 4.0
"""The same per active rollout, so that all together take at most a quarter of a core."""
NOTE_EVERY_S = 60.0
"""An unchanged decision is stored again this often, with its newest numbers."""


class RolloutController:
    """Decides on all active rollouts. Owner: the loop; `round` runs in one thread at a time.
    `clock`: wall time; `monotonic`: seconds of a clock that is never set."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        rates: Rates | None = None,
    ) -> None:
        self._store = store
        self._rates = rates
        self._clock = clock
        self._monotonic = monotonic
        self._looked_at: tuple[float, float] | None = None
        self._rests_until: dict[str, float] = {}
        self._rest = REST
        self.rounds = 0

    def __repr__(self) -> str:
        return f"<RolloutController rounds={self.rounds}>"

    async def run(self) -> None:
        """Decide in rounds until cancelled."""
        while True:
            try:
                await anyio.to_thread.run_sync(self.round)
            except (PilotlightError, SQLAlchemyError) as e:
                # a full disk, a lost database: the next round retries
                log.error("event=rollouts_failed error=%r", e)
            await asyncio.sleep(TICK_S)

    def round(self) -> int:
        """Evaluate each rollout once; returns how many changed or had a decision stored."""
        self.rounds += 1
        jumped = self._jumped()
        with self._store.read() as sql:
            found = repository.active(sql)
        self._rest = max(REST, REST_BESIDE * len(found))
        self._rests_until = {one.id: self._rests_until.get(one.id, -math.inf) for one in found}
        return sum(
            self._tried(rollout, jumped=jumped)
            for rollout in found
            if jumped or self._monotonic() >= self._rests_until[rollout.id]
        )

    def _tried(self, rollout: Rollout, *, jumped: bool) -> bool:
        """Call `_check` and contain its errors: a broken rollout stays where it is and does not
        block others."""
        try:
            return self._check(rollout, jumped=jumped)
        except (PilotlightError, SQLAlchemyError, ArithmeticError, ValueError) as e:
            log.error("event=rollout_not_judged rollout=%s error=%r", rollout.id, e)
            return False

    def _jumped(self) -> bool:
        wall, steady = self._clock(), self._monotonic()
        before, self._looked_at = self._looked_at, (wall, steady)
        return before is not None and abs((wall - before[0]) - (steady - before[1])) > JUMP_S

    def _check(self, rollout: Rollout, *, jumped: bool) -> bool:
        now = self._clock()
        if jumped or now < rollout.updated_at - JUMP_S:
            with self._store.write() as write:
                return lifecycle.start_over(
                    write, rollout, reason="the clock was changed: the step restarts"
                )
        began = self._monotonic()
        with self._store.read() as sql:
            if not is_traffic_as_planned(sql, rollout):
                decision = None
            else:
                decision = decide_rollout(sql, rollout, now=now, rates=self._rates)
                self._rests_until[rollout.id] = began + self._rest * (self._monotonic() - began)
                if _is_nothing_new(sql, rollout, decision, now):
                    return False
        if decision is None:
            with self._store.write() as write:
                return (
                    lifecycle.end(
                        write, rollout.function_id, reason="its traffic was changed manually"
                    )
                    is not None
                )
        return self._follow(rollout, decision)

    def _follow(self, rollout: Rollout, decision: Decision) -> bool:
        try:
            with self._store.write() as write:
                done = lifecycle.follow(write, rollout, decision)
        except PilotlightError as e:
            return self._refused(rollout, e)
        if done:
            words = (
                rollout.id,
                rollout.name,
                rollout.candidate,
                decision.verdict,
                decision.cause,
                decision.action,
            )
            log.info(
                "event=rollout_judged rollout=%s function=%s candidate=%s verdict=%s cause=%s "
                "action=%r",
                *words,
            )
        return done

    def _refused(self, rollout: Rollout, error: PilotlightError) -> bool:
        """Store, once, a hold because the traffic change was rejected (a cap, a revoked
        approval)."""
        log.warning("event=rollout_refused rollout=%s error=%s", rollout.id, error)
        held = Decision(
            verdict=Verdict.HOLD,
            cause="refused",
            reasons=(f"the traffic cannot be moved: {error}",),
        )
        with self._store.write() as write:
            if _is_nothing_new(write.sql, rollout, held, write.now):
                return False
            return lifecycle.follow(write, rollout, held)


def decide_rollout(
    sql: sa.Connection, rollout: Rollout, *, now: float, rates: Rates | None = None
) -> Decision:
    """The decision on a rollout now; changes nothing. `rates`: prices of instances."""
    standing = RolloutStatus(
        step=rollout.step,
        step_began_at=rollout.step_began_at,
        is_paused=rollout.state is RolloutState.PAUSED,
        is_told=repository.is_stall_notified(sql, rollout),
    )
    candidate, stable = evidence.gather(
        sql, rollout, repository.baseline_of(sql, rollout), now=now, rates=rates
    )
    return decide(rollout.plan, standing, candidate, stable, now=now)


def is_traffic_as_planned(sql: sa.Connection, rollout: Rollout) -> bool:
    """Whether the traffic still is what the rollout set: a manual change takes precedence."""
    try:
        weights = traffic.get(sql, rollout.function_id).weights
    except NotFound:
        return False
    return dict(weights) == lifecycle.split(rollout.candidate, rollout.stable, rollout.weight)


def _is_nothing_new(sql: sa.Connection, rollout: Rollout, decision: Decision, now: float) -> bool:
    if decision.verdict is not Verdict.HOLD or decision.tell:
        return False
    last = repository.decisions(sql, rollout.id, limit=1)
    return (
        bool(last)
        and last[0].evidence.get("signature") == decision.signature
        and 0 <= now - last[0].at < NOTE_EVERY_S
    )

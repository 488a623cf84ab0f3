"""Instances of one revision on their way up and on their way out: everything about them that takes
time.

The Throttler decides; this passes the gate (`fairness.gate`), waits for allowances where several
activators share them, asks the fleet, tries again while the agent is down or the node is full, and
says how it went. Owner: the Throttler; its methods are synchronous, the waiting is in tasks of its
own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from activator.balancing.fleet import Fleet, new_instance_id
from activator.balancing.instance import Instance
from activator.coordination.state import InstanceLeases
from activator.fairness.start_admission import StartAdmission
from activator.fairness.start_request import StartCancelled, StartRequest
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.types import Priority
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo

log = logging.getLogger(__name__)

AGENT_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between starts while the agent is down; the last one repeats as long as somebody waits."""
ALLOWANCE_RETRY_S = (0.02, 0.05, 0.1, 0.25)
"""Waits between requests for an allowance that the other activators hold; the last one repeats as
long as the start is needed."""
STOP_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: exit hooks and calls in flight get this long, an idle instance needs
none of it."""
USED_CPU = "cpu_ns"
"""In the detail of a start that failed: for the bill, and no caller's business."""
LAST_WORD_S = 1.0
"""After a stop the agent may still tell that the process had died before it, and of what."""
STUCK_GRACE_S = 5.0
"""The same for an instance with a call in it that did not end with its clock: enough for exit
hooks, and nothing to hope for beyond."""


class StartListener(Protocol):
    """Who asked: told of every outcome, asked whether a start is still wanted."""

    @property
    def is_needed(self) -> bool:
        """Whether somebody waits for the last of the starts under way, or fewer instances are there
        than are kept warm."""
        ...

    @property
    def priority(self) -> Priority:
        """The highest of the calls that wait."""
        ...

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready."""
        ...

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""
        ...

    def start_used(self, instance_id: str, cpu_ns: int) -> None:
        """The CPU time of a start that failed."""
        ...

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not be asked for."""
        ...


class StartObserver(Protocol):
    """Told of what happens to instances, for metrics and bills."""

    def instance_ready(self, target: CallTarget, info: InstanceInfo, seconds: float) -> None:
        """An instance came up after `seconds`."""
        ...

    def instance_lost(self, target: CallTarget, reason: str) -> None:
        """An instance ended unasked; `reason`: one word, see InstanceInfo.exit_reason."""
        ...

    def start_failed(self, target: CallTarget, code: str) -> None:
        """A start failed; `code` is the error's."""
        ...


class InstanceLifecycle:
    """Starts and stops under way."""

    def __init__(
        self,
        target: CallTarget,
        *,
        fleet: Fleet,
        secret_env: Callable[[CallTarget], dict[str, str]],
        allowance: InstanceLeases | None,
        gate: StartAdmission,
        owner: StartListener,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._fleet = fleet
        self._secret_env = secret_env
        self._allowance = allowance
        self._gate = gate
        self._owner = owner
        self._clock = clock
        self._asks: dict[str, StartRequest] = {}
        self._given_up = 0
        self._taken: dict[str, list[tuple[str, int]]] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, Instance] = {}

    def __repr__(self) -> str:
        return f"<InstanceLifecycle {len(self._starts)} starting, {len(self._stops)} stopping>"

    @property
    def starting(self) -> int:
        """Starts under way."""
        return len(self._starts) - self._given_up

    @property
    def stopping(self) -> int:
        """Stops under way."""
        return len(self._stops)

    def is_starting(self, instance_id: str) -> bool:
        """Whether this instance is one of the starts under way."""
        return instance_id in self._starts

    def retarget(self, target: CallTarget) -> None:
        """The same revision, with another launch from now on."""
        self._target = target

    # -- up ----------------------------------------------------------------------------------------
    def start(self, count: int) -> None:
        """Begin `count` starts."""
        for _ in range(count):
            instance_id = new_instance_id()
            self._starts[instance_id] = asyncio.create_task(
                self._start(instance_id), name=f"start {instance_id}"
            )

    async def _start(self, instance_id: str) -> None:
        ask = self._asks[instance_id] = self._gate.new_request(
            instance_id,
            self._target,
            priority=self._owner.priority,
            is_needed=lambda: self._owner.is_needed,
            on_cancel=self._one_less,
        )
        try:
            await self._gate.instance_quota.admit(ask)
            await self._wait_allowances(ask)
            info, began = await self._bring_up(ask)
        except BaseException as e:
            self._over(instance_id)
            self.give_back(instance_id)
            if isinstance(e, agent_errors.SnapshotterError):
                self._owner.start_used(instance_id, int(e.detail.get(USED_CPU) or 0))
                self._owner.start_failed(e)
            elif isinstance(e, errors.PilotlightError):
                self._owner.start_refused(e)
            elif not isinstance(e, StartCancelled):
                raise
        else:
            self._over(instance_id)
            self._owner.add(info, began)

    def _one_less(self) -> None:
        self._given_up += 1

    def _over(self, instance_id: str) -> None:
        self._starts.pop(instance_id, None)
        ask = self._asks.pop(instance_id, None)
        self._given_up -= ask is not None and ask.is_cancelled

    async def _wait_allowances(self, ask: StartRequest) -> None:
        """Until all activators together may hold one instance more. The calls meanwhile wait, each
        to its own deadline."""
        attempt = 0
        while not await self._take_allowances(ask):
            if not self._owner.is_needed:
                raise StartCancelled
            await asyncio.sleep(ALLOWANCE_RETRY_S[min(attempt, len(ALLOWANCE_RETRY_S) - 1)])
            attempt += 1

    async def _take_allowances(self, ask: StartRequest) -> bool:
        """Of the revision, and of its tenant: all or none."""
        if self._allowance is None:
            return True
        taken = self._taken.setdefault(ask.id, [])
        for key, amount, limit in (
            (self._target.key, 1, self._target.spec.scaling.max_instances),
            *self._gate.pools(self._target),
        ):
            if limit is None:
                self._allowance.hold(key, amount)
                taken.append((key, amount))
                continue
            granted = await self._allowance.take_instances(key, amount, limit)
            if granted:
                taken.append((key, granted))
            if granted < amount:
                self._give_back_allowances(ask.id)
                return False
        return True

    async def _bring_up(self, ask: StartRequest) -> tuple[InstanceInfo, float]:
        """The instance, and when the start that led to it began: what was waited for before is no
        part of it."""
        await self._gate.capacity.wait_turn(ask)
        attempt = 0
        while True:
            began = self._clock()
            try:
                info = await self._fleet.start(
                    self._target, InstanceId(ask.id), self._secret_env(self._target)
                )
            except agent_errors.NoCapacity as e:
                await self._gate.capacity.wait_for_room(
                    ask, e, start_error_for_caller(self._target, e)
                )
            except agent_errors.AgentUnavailable:
                if not self._owner.is_needed:
                    raise
                await asyncio.sleep(AGENT_RETRY_S[min(attempt, len(AGENT_RETRY_S) - 1)])
                attempt += 1
            else:
                return info, began

    def obstacle(self) -> errors.PilotlightError | None:
        """Why no start gets on, if none does."""
        obstacles = [ask.obstacle for ask in self._asks.values()]
        return obstacles[0] if obstacles and all(obstacles) else None

    @property
    def held_up(self) -> int:
        """Starts that wait for a quota, or for room on the node."""
        return sum(ask.obstacle is not None for ask in self._asks.values())

    def adopted(self, instance_id: str) -> None:
        """An instance that was there already counts as well."""
        self._gate.adopt(instance_id, self._target)
        if self._allowance is not None:
            pools = [
                (self._target.key, 1),
                *((key, amount) for key, amount, _ in self._gate.pools(self._target)),
            ]
            self._taken[instance_id] = pools
            for key, amount in pools:
                self._allowance.hold(key, amount)

    # -- out ---------------------------------------------------------------------------------------
    def stop(self, instance: Instance) -> None:
        """End an instance that takes no more calls."""
        self._leaving[instance.id] = instance
        task = asyncio.create_task(self._stop(instance), name=f"stop {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop(self, instance: Instance) -> None:
        try:
            await self._fleet.stop(
                instance.info.id, grace_s=STUCK_GRACE_S if instance.is_stuck else STOP_GRACE_S
            )
        except agent_errors.SnapshotterError as e:
            log.warning("stop failed instance=%s error=%s", instance.id, e)
        finally:
            asyncio.get_running_loop().call_later(LAST_WORD_S, self._no_word, instance.id)
            self.give_back(instance.id)

    def last_word(self, instance_id: str, reason: str, cpu_ns: int | None = None) -> bool:
        """The agent's word on an instance that is being stopped: calls that broke with it wait for
        it. False when it is not."""
        leaving = self._leaving.pop(instance_id, None)
        if leaving is not None:
            leaving.settle_cpu(cpu_ns)
            leaving.mark_gone(reason)
        return leaving is not None

    def _no_word(self, instance_id: str) -> None:
        leaving = self._leaving.pop(instance_id, None)
        if leaving is not None:
            leaving.settle_cpu(None)

    def give_back(self, instance_id: str) -> None:
        """An instance is gone: others may have its place."""
        self._give_back_allowances(instance_id)
        self._gate.release(instance_id)

    def _give_back_allowances(self, instance_id: str) -> None:
        for key, amount in self._taken.pop(instance_id, ()):
            if self._allowance is not None:
                self._allowance.give_back(key, amount)

    async def aclose(self) -> None:
        """Abandon the starts, finish the stops."""
        tasks = [*self._starts.values(), *self._stops]
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def start_error_for_caller(
    target: CallTarget, error: agent_errors.SnapshotterError
) -> errors.PilotlightError:
    """What the caller is told of a failed start: user errors are theirs to mend, the platform's
    carry Retry-After."""
    name = f"{target.app}/{target.function}"
    detail = {key: value for key, value in error.detail.items() if key != USED_CPU}
    if isinstance(error, agent_errors.StartTimeout):
        return errors.DeadlineExceeded(
            f"{name} did not start in time: {error}", clock="startup", retry_after_s=5, **detail
        )
    if isinstance(error, agent_errors.StartFailed):
        return errors.StartFailed(f"{name} could not start: {error}", **detail)
    if isinstance(error, agent_errors.NoCapacity):
        return errors.Unavailable(f"no room for {name}: {error}", retry_after_s=5, **detail)
    return errors.Unavailable(f"{name} cannot start now: {error}", retry_after_s=2, **detail)

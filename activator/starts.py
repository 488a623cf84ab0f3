"""Instances of one revision on their way up and on their way out: everything about them that takes time.

The Throttler decides; this asks the fleet, waits for an allowance where several activators share one, tries again while the agent is
down, and
says how it went. Owner: the Throttler; its methods are synchronous, the waiting is in tasks of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from activator.fleet import Fleet, new_instance_id
from activator.instances import Instance
from activator.routes import Target
from activator.shared.state import Allowance
from pilotlight import errors
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceInfo

log = logging.getLogger(__name__)

AGENT_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between starts while the agent is down; the last one repeats as long as somebody waits."""
ALLOWANCE_RETRY_S = (0.02, 0.05, 0.1, 0.25)
"""Waits between requests for an allowance that the other activators hold; the last one repeats as long as the start is needed."""
STOP_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL: exit hooks and calls in flight get this long, an idle instance needs none of it."""
LAST_WORD_S = 1.0
"""After a stop the agent may still tell that the process had died before it, and of what."""
STUCK_GRACE_S = 5.0
"""The same for an instance with a call in it that did not end with its clock: enough for exit hooks, and nothing to hope for beyond."""


class Owner(Protocol):
    """Who asked: told of every outcome, asked whether a start is still wanted."""

    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        ...

    @property
    def is_short(self) -> bool:
        """Whether there are fewer instances than are kept warm."""
        ...

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready."""
        ...

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""
        ...

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not be asked for."""
        ...


class _NotNeeded(Exception):
    """Raised when nobody waits any more for a start that had no allowance yet."""


class Comings:
    """Starts and stops under way."""

    def __init__(
        self,
        target: Target,
        *,
        fleet: Fleet,
        secret_env: Callable[[Target], dict[str, str]],
        allowance: Allowance | None,
        owner: Owner,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._fleet = fleet
        self._secret_env = secret_env
        self._allowance = allowance
        self._owner = owner
        self._clock = clock
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, Instance] = {}

    def __repr__(self) -> str:
        return f"<Comings {len(self._starts)} starting, {len(self._stops)} stopping>"

    @property
    def starting(self) -> int:
        """Starts under way."""
        return len(self._starts)

    @property
    def stopping(self) -> int:
        """Stops under way."""
        return len(self._stops)

    def is_starting(self, instance_id: str) -> bool:
        """Whether this instance is one of the starts under way."""
        return instance_id in self._starts

    def retarget(self, target: Target) -> None:
        """The same revision, with another launch from now on."""
        self._target = target

    # -- up -----------------------------------------------------------------------------------------------------------
    def start(self, count: int) -> None:
        """Begin `count` starts."""
        for _ in range(count):
            instance_id = new_instance_id()
            self._starts[instance_id] = asyncio.create_task(self._start(instance_id), name=f"start {instance_id}")

    async def _start(self, instance_id: str) -> None:
        began = self._clock()
        try:
            await self._wait_allowance()
            info = await self._start_with_allowance(instance_id)
        except _NotNeeded:
            del self._starts[instance_id]
        except agent_errors.SnapshotterError as e:
            del self._starts[instance_id]
            self._owner.start_failed(e)
        except errors.PilotlightError as e:
            del self._starts[instance_id]
            self._owner.start_refused(e)
        except BaseException:
            self._starts.pop(instance_id, None)
            raise
        else:
            del self._starts[instance_id]
            self._owner.add(info, began)

    async def _wait_allowance(self) -> None:
        """Until all activators together may hold one instance more. The calls meanwhile wait, each to its own deadline."""
        if self._allowance is None:
            return
        attempt = 0
        while not await self._allowance.take_instances(self._target.key, 1, self._target.spec.scaling.max_instances):
            if not self._owner.waiting and not self._owner.is_short:
                raise _NotNeeded
            await asyncio.sleep(ALLOWANCE_RETRY_S[min(attempt, len(ALLOWANCE_RETRY_S) - 1)])
            attempt += 1

    async def _start_with_allowance(self, instance_id: str) -> InstanceInfo:
        try:
            return await self._start_despite_outage(instance_id)
        except BaseException:
            self.give_back()
            raise

    async def _start_despite_outage(self, instance_id: str) -> InstanceInfo:
        attempt = 0
        while True:
            try:
                return await self._fleet.start(self._target, instance_id, self._secret_env(self._target))  # type: ignore[arg-type]
            except agent_errors.AgentUnavailable:
                if not self._owner.waiting and not self._owner.is_short:
                    raise
                await asyncio.sleep(AGENT_RETRY_S[min(attempt, len(AGENT_RETRY_S) - 1)])
                attempt += 1

    # -- out ----------------------------------------------------------------------------------------------------------
    def stop(self, instance: Instance) -> None:
        """End an instance that takes no more calls."""
        self._leaving[instance.id] = instance
        task = asyncio.create_task(self._stop(instance), name=f"stop {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop(self, instance: Instance) -> None:
        try:
            await self._fleet.stop(instance.info.id, grace_s=STUCK_GRACE_S if instance.is_stuck else STOP_GRACE_S)
        except agent_errors.SnapshotterError as e:
            log.warning("stop failed instance=%s error=%s", instance.id, e)
        finally:
            asyncio.get_running_loop().call_later(LAST_WORD_S, self._leaving.pop, instance.id, None)
            self.give_back()

    def last_word(self, instance_id: str, reason: str) -> bool:
        """The agent's word on an instance that is being stopped: calls that broke with it wait for it. False when it is not."""
        leaving = self._leaving.pop(instance_id, None)
        if leaving is not None:
            leaving.mark_gone(reason)
        return leaving is not None

    def give_back(self) -> None:
        """An instance is gone: others may have its place."""
        if self._allowance is not None:
            self._allowance.give_back(self._target.key)

    async def aclose(self) -> None:
        """Abandon the starts, finish the stops."""
        tasks = [*self._starts.values(), *self._stops]
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_answer(target: Target, error: agent_errors.SnapshotterError) -> errors.PilotlightError:
    """What the caller is told of a failed start: user errors are theirs to mend, the platform's carry Retry-After."""
    name = f"{target.app}/{target.function}"
    if isinstance(error, agent_errors.StartTimeout):
        return errors.DeadlineExceeded(f"{name} did not start in time: {error}", clock="startup", retry_after_s=5, **error.detail)
    if isinstance(error, agent_errors.StartFailed):
        return errors.StartFailed(f"{name} could not start: {error}", **error.detail)
    if isinstance(error, agent_errors.NoCapacity):
        return errors.Unavailable(f"no room for {name}: {error}", retry_after_s=5, **error.detail)
    return errors.Unavailable(f"{name} cannot start now: {error}", retry_after_s=2, **error.detail)

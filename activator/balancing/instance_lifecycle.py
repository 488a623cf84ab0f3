"""Starts and stops of the instances of one revision.

The Throttler decides; this module passes start admission (`fairness.start_admission`), requests
starts from the fleet, retries while the agent is unavailable or the node is full, and reports the
outcome. Owner: the Throttler. Methods are
synchronous; background tasks wait."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from activator.balancing.fleet import Fleet
from activator.balancing.instance import Instance
from activator.fairness.start_admission import StartAdmission
from activator.fairness.start_request import StartCancelled, StartRequest
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.core.backoff import Backoff
from pilotlight.spec.identifiers import Priority
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo

log = logging.getLogger(__name__)

FIRST_AGENT_RETRY_S, MAX_AGENT_RETRY_S = 0.05, 2.0
"""Seconds between start attempts while the agent is unavailable, as long as calls wait."""
UNSUPPORTED_HINT = (
    "Do what the error says; `pilotlight doctor` shows what this machine supports. Another attempt "
    "fails in the same way."
)
STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for exit hooks and calls in flight."""
USED_CPU = "cpu_ns"
"""Field in the detail of a failed start: used for billing, not shown to callers."""
LAST_WORD_S = 1.0
"""Time after a stop in which the agent may still report that the process had died before it, and
why."""
STUCK_GRACE_S = 5.0
"""Grace period of an instance with a call that exceeded its clock: enough for exit hooks."""


class StartListener(Protocol):
    """Requester of starts: gets every outcome, and states whether a start is still needed."""

    @property
    def is_needed(self) -> bool:
        """Whether a call waits for the last of the starts in progress, or there are fewer instances
        than must be kept warm."""

    @property
    def priority(self) -> Priority:
        """The highest priority of the waiting calls."""

    def add(self, info: InstanceInfo, began: float | None = None) -> None:
        """An instance is ready."""

    def start_failed(self, error: agent_errors.SnapshotterError) -> None:
        """A start ended without an instance."""

    def start_used(self, instance_id: str, cpu_ns: int) -> None:
        """The CPU time of a start that failed."""

    def start_refused(self, error: errors.PilotlightError) -> None:
        """A start could not be requested."""


class StartObserver(Protocol):
    """Observes starts and exits of instances, for metrics and billing."""

    def instance_ready(self, target: CallTarget, info: InstanceInfo, seconds: float) -> None:
        """An instance started after `seconds`."""

    def instance_lost(self, target: CallTarget, reason: str) -> None:
        """An instance exited unexpectedly; `reason`: one word, see InstanceInfo.exit_reason."""

    def start_failed(self, target: CallTarget, code: str) -> None:
        """A start failed; `code` is the error's."""


@dataclass(slots=True)
class InstanceProvisioner:
    """What starts of all revisions share.

    Attributes:
        fleet: runs instances.
        secret_env: returns the secrets that a function gets. Raises Unavailable for a missing one.
        gate: admission of starts."""

    fleet: Fleet
    secret_env: Callable[[CallTarget], dict[str, str]]
    gate: StartAdmission = field(default_factory=StartAdmission)


def new_instance_id() -> InstanceId:
    """Return the id of an instance that is going to be started: `i-` and 16 hex digits."""
    return InstanceId("i-" + os.urandom(8).hex())


class InstanceLifecycle:
    """Starts and stops in progress."""

    def __init__(
        self,
        target: CallTarget,
        *,
        provisioner: InstanceProvisioner,
        owner: StartListener,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._provisioner = provisioner
        self._gate = provisioner.gate
        self._owner = owner
        self._clock = clock
        self._requests: dict[str, StartRequest] = {}
        self._cancelled = 0
        self._is_ending = False
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._stopping_instances: dict[str, Instance] = {}

    def __repr__(self) -> str:
        return f"<InstanceLifecycle {len(self._starts)} starting, {len(self._stops)} stopping>"

    @property
    def starting(self) -> int:
        """Number of starts in progress."""
        return len(self._starts) - self._cancelled

    @property
    def stopping(self) -> int:
        """Number of stops in progress."""
        return len(self._stops)

    def is_starting(self, instance_id: str) -> bool:
        """Return whether this instance is being started."""
        return instance_id in self._starts

    def retarget(self, target: CallTarget) -> None:
        """Use another launch of the same revision for later starts."""
        self._target = target

    # -- up ----------------------------------------------------------------------------------------
    def start(self, count: int) -> None:
        """Begin `count` starts; none after `end_starts`."""
        for _ in range(0 if self._is_ending else count):
            instance_id = new_instance_id()
            self._starts[instance_id] = asyncio.create_task(
                self._start(instance_id), name=f"start {instance_id}"
            )

    async def _start(self, instance_id: str) -> None:
        request = self._requests[instance_id] = self._gate.new_request(
            instance_id,
            self._target,
            priority=self._owner.priority,
            is_needed=lambda: self._owner.is_needed,
            on_cancel=self._on_cancelled,
        )
        try:
            await self._gate.admit(request)
            info, began = await self._start_instance(request)
        except BaseException as e:
            self._over(instance_id)
            self.release(instance_id)
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

    def _on_cancelled(self) -> None:
        self._cancelled += 1

    def _over(self, instance_id: str) -> None:
        self._starts.pop(instance_id, None)
        request = self._requests.pop(instance_id, None)
        self._cancelled -= request is not None and request.is_cancelled

    async def _start_instance(self, request: StartRequest) -> tuple[InstanceInfo, float]:
        """Start the instance. Returns it and when the successful attempt began: earlier waiting
        does not count."""
        backoff = Backoff(first_s=FIRST_AGENT_RETRY_S, max_s=MAX_AGENT_RETRY_S)
        while True:
            began = self._clock()
            try:
                info = await self._provisioner.fleet.start(
                    self._target,
                    InstanceId(request.id),
                    self._provisioner.secret_env(self._target),
                )
            except agent_errors.NoCapacity as e:
                await self._gate.capacity.wait_for_room(
                    request, e, start_error_for_caller(self._target, e)
                )
            except agent_errors.AgentUnavailable:
                if not self._owner.is_needed:
                    raise
                await backoff.pause()
            else:
                await self._require_price(info)
                return info, began

    async def _require_price(self, info: InstanceInfo) -> None:
        """Stop an instance whose GPUs have no price, and raise StartFailed with their kind: its
        calls could not be billed."""
        missing = self._target.missing_price(info.gpus)
        if missing is not None:
            try:
                await self._provisioner.fleet.stop(info.id, grace_s=STUCK_GRACE_S)
            except agent_errors.SnapshotterError as e:
                log.warning("stop failed instance=%s error=%s", info.id, e)
            raise agent_errors.StartFailed(str(missing))

    def obstacle(self) -> errors.PilotlightError | None:
        """Return why all starts are blocked; None when one is not."""
        obstacles = [request.obstacle for request in self._requests.values()]
        return obstacles[0] if obstacles and all(obstacles) else None

    @property
    def blocked_starts(self) -> int:
        """Number of starts that wait for a quota, or for room on the node."""
        return sum(request.obstacle is not None for request in self._requests.values())

    def adopted(self, instance_id: str) -> None:
        """Count an instance that existed before."""
        self._gate.adopt(instance_id, self._target)

    # -- out ---------------------------------------------------------------------------------------
    def stop(self, instance: Instance) -> None:
        """Stop an instance that takes no more calls."""
        self._stopping_instances[instance.id] = instance
        instance.stop_billing()
        task = asyncio.create_task(self._stop(instance), name=f"stop {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop(self, instance: Instance) -> None:
        try:
            await self._provisioner.fleet.stop(
                instance.info.id, grace_s=STUCK_GRACE_S if instance.is_stuck else STOP_GRACE_S
            )
        except agent_errors.SnapshotterError as e:
            log.warning("stop failed instance=%s error=%s", instance.id, e)
        finally:
            asyncio.get_running_loop().call_later(
                LAST_WORD_S, self._on_exit_unreported, instance.id
            )
            self.release(instance.id)

    def interrupt(self, instance: Instance) -> None:
        """Stop an instance on which calls run: they end when the agent reports its exit."""
        task = asyncio.create_task(self._interrupt(instance), name=f"stop {instance.id}")
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _interrupt(self, instance: Instance) -> None:
        try:
            await self._provisioner.fleet.stop(instance.info.id, grace_s=STUCK_GRACE_S)
        except agent_errors.SnapshotterError as e:
            log.warning("stop failed instance=%s error=%s", instance.id, e)
            instance.exit_reason = ""  # tried again

    def record_exit(self, instance_id: str, reason: str, cpu_ns: int | None = None) -> bool:
        """Record the exit, reported by the agent, of an instance that is being stopped: its
        interrupted calls wait for it. Returns False when it is not being stopped."""
        instance = self._stopping_instances.pop(instance_id, None)
        if instance is not None:
            instance.settle_stopped(cpu_ns)
            instance.mark_exited(reason)
        return instance is not None

    def _on_exit_unreported(self, instance_id: str) -> None:
        instance = self._stopping_instances.pop(instance_id, None)
        if instance is not None:
            instance.settle_stopped(None)

    def release(self, instance_id: str) -> None:
        """Release what an ended instance held."""
        self._gate.release(instance_id)

    def end_starts(self) -> None:
        """Begin no further starts."""
        self._is_ending = True

    async def aclose(self) -> None:
        """Cancel the starts, finish the stops."""
        self.end_starts()
        tasks = [*self._starts.values(), *self._stops]
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def start_error_for_caller(
    target: CallTarget, error: agent_errors.SnapshotterError
) -> errors.PilotlightError:
    """Return the error for callers of a failed start: user errors are not retryable, errors of the
    platform carry Retry-After. What the node can never do is not retryable either."""
    name = f"{target.app}/{target.function}"
    detail = {key: value for key, value in error.detail.items() if key != USED_CPU}
    if isinstance(error, agent_errors.StartTimeout):
        return errors.DeadlineExceeded(
            f"{name} did not start in time: {error}", clock="startup", retry_after_s=5, **detail
        )
    if isinstance(error, agent_errors.StartFailed):
        return errors.StartFailed(f"{name} could not start: {error}", **detail)
    if isinstance(error, agent_errors.Unsupported):
        hint = {"hint": UNSUPPORTED_HINT, **detail}
        return errors.StartFailed(f"{name} cannot start on this node: {error}", **hint)
    if isinstance(error, agent_errors.NoCapacity):
        return errors.Unavailable(f"no room for {name}: {error}", retry_after_s=5, **detail)
    return errors.Unavailable(f"{name} cannot start now: {error}", retry_after_s=2, **detail)

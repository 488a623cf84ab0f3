"""Further instances in promoted pods that this activator has claimed: forks of the pod's Template,
at ports of their own.

A claim is of a pod, and so of all its instances. The launcher knows them: it is asked every second
which have ended, after a restart of this activator which there are, and before a fork nothing: it
refuses what has no room. A pod whose last instance has stopped may stay for a while, claimed, with
its Template alone; the platform pays for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from activator.knative.forks import launcher_client
from activator.knative.forks.launcher_client import FORK_PORTS, NotForked, PodReport, TooEarly
from activator.knative.pod_registry import OwnedPod
from activator.knative.pod_watcher import Pod
from activator.knative.readiness_probe import WORKER_PORT, ReadinessListener, status_at
from activator.routing.route_table import CallTarget
from pilotlight.kubernetes import names
from pilotlight.spec.warm_shape import WarmShape
from snapshotter import errors
from snapshotter.types import AgentEvent, InstanceId

log = logging.getLogger(__name__)

REFUSED_S = 1.0
"""How long a pod that has refused a fork is not asked again."""
UNFORKABLE_S = 600.0
"""How long a revision of which a pod had no Template is expected to have none in other pods: its
worker has threads or processes of its own at its snapshot point, which no declaration says."""
EARLY_S, EARLY_RETRY_S = 1.0, 0.02
"""A pod's first instance answers some moments before its launcher knows that it serves: for so long
it is asked again."""
STRAY_GRACE_S = 30.0
"""How long the calls of an instance that this activator does not know may still run."""
ENDING_S = 0.2
"""Interval between checks whether an instance that was stopped has ended."""


class PodForks:
    """Owner: the event loop. It changes `OwnedPod.ports` of the pods that it is given."""

    def __init__(
        self,
        *,
        shapes: Sequence[WarmShape] = (),
        idle_templates: int = 0,
        idle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shapes`: of the cluster's warm pods. `idle_templates`: pods without an instance that are
        kept for one tenant; `idle_s`: how long."""
        self._shapes = {shape.name: shape for shape in shapes}
        self._idle_templates = idle_templates
        self._idle_s = idle_s
        self._clock = clock
        self._refused: dict[str, float] = {}
        self._unforkable: dict[str, float] = {}

    def __repr__(self) -> str:
        return (
            f"<PodForks keeps {self._idle_templates} idle pods of a tenant for {self._idle_s:g} s>"
        )

    # -- room --------------------------------------------------------------------------------------
    def room(self, target: CallTarget, pod: Pod | None = None) -> int:
        """How many instances of a function a promoted pod is expected to hold, this one or the
        next, which is of the smallest shape that fits. Its launcher counts in the same way, by
        memory."""
        launch = target.launch
        if (
            not launch.forkable
            or launch.gpu_count
            or launch.engine is not None
            or self._unforkable.get(target.key, 0.0) > self._clock()
        ):
            return 1
        shape = self._shapes.get(pod.labels.get(names.PROMOTED, "")) if pod is not None else None
        sizes = [
            one.memory_bytes
            for one in ([shape] if shape is not None else self._shapes.values())
            if not one.gpu_count
            and one.cpu >= launch.cpu
            and one.memory_bytes >= launch.memory_bytes
        ]
        most = min(len(FORK_PORTS) + 1, target.spec.scaling.max_instances)
        return max(1, min(most, min(sizes, default=0) // max(1, launch.memory_bytes)))

    def free(self, target: CallTarget, held: OwnedPod) -> int:
        """How many more instances a claimed pod is expected to hold."""
        if not self._may_fork(held):
            return 0
        return max(0, self.room(target, held.pod) - len(held.ports) - held.forking)

    # -- starts ------------------------------------------------------------------------------------
    async def start(
        self,
        target: CallTarget,
        instance_id: InstanceId,
        secret_env: Mapping[str, str],
        pods: Iterable[OwnedPod],
    ) -> tuple[OwnedPod, int, ReadinessListener] | None:
        """Fork an instance in one of these pods; it is then in its `ports`. None when none of them
        can. Raises StartFailed when the instance's own code does."""
        for held in pods:
            if not self._may_fork(held) or (self._shapes and not self.free(target, held)):
                continue
            held.forking += 1
            try:
                port = await self._fork(held, instance_id, secret_env)
                held.ports[instance_id], held.idle_since, held.has_template = port, None, True
            except NotForked as e:
                log.debug("not forked pod=%s why=%s", held.pod.name, e)
                await self._on_refused(held)
                continue
            finally:
                held.forking -= 1
            ready = None
            try:
                ready = await status_at(held.pod, port, within_s=target.launch.startup_timeout_s)
            finally:
                if ready is None:  # it has ended, or is stopped as one that is not known
                    self._remove(held, instance_id)
            if ready is not None:
                return held, port, ready
            await self._raise_failure(held, port)
        return None

    async def _fork(self, held: OwnedPod, instance: str, secrets: Mapping[str, str]) -> int:
        """Have the launcher fork, as soon as it can. Raises NotForked."""
        until = self._clock() + EARLY_S
        while True:
            try:
                return await launcher_client.fork(held.pod, instance, secrets)
            except TooEarly:
                if self._clock() >= until:
                    raise
                await asyncio.sleep(EARLY_RETRY_S)

    async def _on_refused(self, held: OwnedPod) -> None:
        """Remember that a pod does not fork now, and its revision where it never had a Template."""
        now = self._clock()
        self._refused = {life: at for life, at in self._refused.items() if at > now}
        self._refused[held.pod.life] = now + REFUSED_S
        if held.has_template:
            return
        report = await launcher_client.report(held.pod)
        if report is not None and not report.has_template:
            self._unforkable = {key: at for key, at in self._unforkable.items() if at > now}
            self._unforkable[held.pod.key] = now + UNFORKABLE_S

    def _remove(self, held: OwnedPod, instance_id: InstanceId) -> None:
        held.ports.pop(instance_id, None)
        self.mark_idle(held)

    def mark_idle(self, held: OwnedPod) -> None:
        """Note since when a pod has no instance."""
        held.idle_since = None if held.ports else self._clock()

    def _may_fork(self, held: OwnedPod) -> bool:
        return (
            held.pod.is_promoted
            and held.pod.is_usable
            and not (held.is_lost or held.is_told)
            and self._refused.get(held.pod.life, 0.0) <= self._clock()
        )

    async def _raise_failure(self, held: OwnedPod, port: int) -> None:
        """Raises StartFailed where the launcher says what the instance's code raised."""
        report = await launcher_client.report(held.pod)
        ended = report.ended.get(port) if report is not None else None
        if ended is not None and ended.error:
            raise errors.StartFailed(
                f"its worker raised {ended.error}", {"log_tail": [], "exit_reason": "exited"}
            )

    # -- ends --------------------------------------------------------------------------------------
    async def stop(self, held: OwnedPod, instance: InstanceId, *, grace_s: float) -> None:
        """Stop one instance of a pod that has others, or keeps its Template; waits for its end."""
        port = held.ports[instance]
        if await launcher_client.stop(held.pod, port, grace_s=grace_s):
            until = self._clock() + grace_s + 2 * ENDING_S
            while self._clock() < until and not held.pod.is_ending:
                report = await launcher_client.report(held.pod)
                if report is None or port not in report.living:
                    break
                await asyncio.sleep(ENDING_S)
        held.ports.pop(instance, None)

    def keeps_idle(self, held: OwnedPod, pods: Iterable[OwnedPod]) -> bool:
        """Whether the pod stays, with its Template alone, after its last instance. `pods`: all that
        this activator has claimed."""
        tenant = held.pod.labels.get(names.TENANT)
        idle = sum(
            one.idle_since is not None and one.pod.labels.get(names.TENANT) == tenant
            for one in pods
            if one is not held
        )
        return held.has_template and self._may_fork(held) and idle < self._idle_templates

    def longest_idle(self, pods: Iterable[OwnedPod]) -> OwnedPod | None:
        """The pod that has been idle for longest, of any tenant."""
        idle = [(one.idle_since, one) for one in pods if one.idle_since is not None]
        return min(idle, key=itemgetter(0))[1] if idle else None

    def overdue(self, pods: Iterable[OwnedPod]) -> list[OwnedPod]:
        """The pods that were idle for too long."""
        now = self._clock()
        return [
            one
            for one in pods
            if one.idle_since is not None and now - one.idle_since > self._idle_s
        ]

    async def ended(self, held: OwnedPod) -> list[AgentEvent]:
        """Forget instances of a pod that have ended by themselves; returns the events."""
        if not held.pod.is_promoted or held.pod.is_ending:
            return []
        known = dict(held.ports)
        report = await launcher_client.report(held.pod)
        if report is None:
            return []
        held.has_template = report.has_template
        if not held.forking:
            for port in report.living.keys() - set(held.ports.values()):
                # of an activator that had the pod before, or of a start that was cancelled
                await launcher_client.stop(held.pod, port, grace_s=STRAY_GRACE_S)
        found = []
        for instance, port in known.items():
            if port in report.living or held.ports.get(instance) != port:
                continue
            del held.ports[instance]
            reason, message = _reason(report, port)
            found.append(
                AgentEvent(kind="instance_gone", subject=instance, reason=reason, message=message)
            )
        return found

    async def adopt(self, held: OwnedPod) -> None:
        """Find the instances of a pod that was claimed before this activator's restart, or that
        another one had."""
        if not held.pod.is_promoted:
            return
        report = await launcher_client.report(held.pod)
        if report is None:
            return
        held.has_template = report.has_template
        held.ports = {
            held.instance if port == WORKER_PORT else InstanceId(one.name): port
            for port, one in report.living.items()
        }
        self.mark_idle(held)


def _reason(report: PodReport, port: int) -> tuple[str, str]:
    ended = report.ended.get(port)
    status = ended.status if ended is not None else None
    if status is None:
        return "lost", "its process has ended"
    if status > 128:
        return "killed", f"its process was ended by signal {status - 128}"
    return "exited", f"its process exited with status {status}"

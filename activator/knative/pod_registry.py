"""The pods that a fleet has claimed, and the instances in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from activator.knative.pod_watcher import Pod
from snapshotter.types import InstanceId


@dataclass(slots=True)
class OwnedPod:
    """A pod that this activator has claimed.

    Attributes:
        instance: the id of its first instance, under which the pod was claimed.
        ports: the port of each instance in it; its first one is at the worker's.
        has_template: whether its launcher has said that it can fork its instances.
        forking: number of forks whose ports are not known yet.
        idle_since: monotonic time since which a promoted pod has no instance, but its Template.
        is_told: its end was reported. is_lost: another activator has it."""

    pod: Pod
    instance: InstanceId
    ports: dict[InstanceId, int] = field(default_factory=dict)
    has_template: bool = False
    forking: int = 0
    idle_since: float | None = None
    is_told: bool = False
    is_lost: bool = False


class PodRegistry:
    """The claimed pods, by life and by instance. Owner: the event loop."""

    def __init__(self) -> None:
        self._pods: dict[str, OwnedPod] = {}
        self._lives: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<PodRegistry {len(self._pods)} pods>"

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[OwnedPod]:
        return iter(list(self._pods.values()))

    def __contains__(self, pod: Pod) -> bool:
        return pod.life in self._pods

    def get(self, life: str) -> OwnedPod | None:
        """The pod in that life; None when it is not claimed here."""
        return self._pods.get(life)

    def of_instance(self, instance: str) -> OwnedPod | None:
        """The pod of an instance."""
        life = self._lives.get(instance)
        return self._pods.get(life) if life is not None else None

    def of_revision(self, key: str) -> list[OwnedPod]:
        """The pods of a revision."""
        return [held for held in self._pods.values() if held.pod.key == key]

    def add(self, held: OwnedPod) -> None:
        """Add a pod with its instances."""
        self._pods[held.pod.life] = held
        for instance in held.ports:
            self._lives[instance] = held.pod.life

    def add_instance(self, held: OwnedPod, instance: InstanceId) -> None:
        """Add a further instance of a pod."""
        self._lives[instance] = held.pod.life

    def forget_instance(self, instance: str) -> None:
        """Forget an instance that has ended."""
        self._lives.pop(instance, None)

    def remove(self, life: str) -> OwnedPod | None:
        """Remove a pod and its instances; None when it is not there."""
        held = self._pods.pop(life, None)
        if held is not None:
            for instance in held.ports:
                self._lives.pop(instance, None)
        return held

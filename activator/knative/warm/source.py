"""What a fleet needs of warm pods: one to start an instance in, and the end of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from activator.knative.pod_watcher import Pod
from activator.routing.route_table import CallTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedPod:
    """A pod that the controller claimed for a start.

    Attributes:
        launch: signed launch document, as the pod gets it.
        took_ms: time until the pod had accepted its document."""

    namespace: str
    name: str
    uid: str
    ip: str
    launch: Mapping[str, Any]
    took_ms: float = 0.0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> PromotedPod:
        """Parse the controller's answer. Raises KeyError, TypeError."""
        return cls(
            namespace=str(body["namespace"]),
            name=str(body["name"]),
            uid=str(body["uid"]),
            ip=str(body["ip"]),
            launch=dict(body["launch"]),
        )


class WarmPodSource(Protocol):
    """Where promoted pods come from, and where they go."""

    async def promote(
        self,
        target: CallTarget,
        instance_id: str,
        secret_env: Mapping[str, str],
        *,
        is_needed: Callable[[], bool],
        on_late: Callable[[], None],
    ) -> PromotedPod | None:
        """Promote a warm pod to an instance of a revision; None when there is none, or none is
        needed any longer. `on_late` is called where a pod may have been claimed, but the answer
        takes too long for a start to wait for it alone."""

    async def delete(self, pod: Pod, reason: str) -> bool:
        """Delete a promoted pod; whether it is gone, or going."""

    async def aclose(self) -> None:
        """Finish what was begun."""

"""What a warm pod's control port answers: its state, for probes, and its promotion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.launcher.control_port import ControlRequest, Refused
from pilotlight.launcher.pod_environment import InvalidPod
from pilotlight.protocol import POD_PROMOTE, WORKER_STATUS
from snapshotter.types import LaunchSpec

Promote = Callable[[LaunchSpec, Mapping[str, str]], None]
"""Makes the pod run a launch document with these secrets. Raises InvalidPod."""
Answering = Callable[[ControlRequest], tuple[int, Mapping[str, Any]]]


class PodControl:
    """Answers requests. Owner: the launcher's loop."""

    def __init__(
        self,
        promote: Promote,
        state: Callable[[], tuple[str, bool]],
        more: Mapping[str, tuple[str, Answering]] | None = None,
    ) -> None:
        """`state`: of the launcher, and whether the pod is warm, or was promoted. `more`: further
        paths, with their methods."""
        self._promote = promote
        self._state = state
        self._promoted: LaunchSpec | None = None
        self._answers: dict[str, tuple[str, Answering]] = {
            **(more or {}),
            POD_PROMOTE: ("POST", self._on_promote),
            WORKER_STATUS: ("GET", self._on_state),
        }

    def answer(self, request: ControlRequest) -> tuple[int, Mapping[str, Any]]:
        """Status and document. Raises Refused."""
        path = request.path.partition("?")[0]
        if path not in self._answers:
            raise Refused(404, f"there is nothing at {path}")
        method, answer = self._answers[path]
        if request.method != method:
            raise Refused(405, f"{path} takes {method}")
        return answer(request)

    def _on_state(self, request: ControlRequest) -> tuple[int, Mapping[str, Any]]:
        state, is_ready = self._state()
        return 200 if is_ready else 503, {"state": state}

    def _on_promote(self, request: ControlRequest) -> tuple[int, Mapping[str, Any]]:
        """The first document promotes the pod. The same one again changes nothing, its secrets
        included."""
        document = request.document()
        secrets = document.get("secrets", {})
        if not isinstance(secrets, dict) or not all(
            isinstance(value, str) for value in secrets.values()
        ):
            raise Refused(400, "secrets must be an object of strings")
        try:
            launch = LaunchSpec.from_json(document["launch"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise Refused(
                400,
                f"the launch document is invalid or of another platform version: "
                f"{type(e).__name__}: {e}",
            ) from e
        if self._promoted is None:
            try:
                self._promote(launch, secrets)
            except InvalidPod as e:
                raise Refused(400, str(e)) from e
            self._promoted = launch
        elif launch != self._promoted:
            raise Refused(409, "this pod was promoted to another launch document")
        return 202, {"revision": launch.revision}

"""What a promoted pod's control port answers about its instances: which there are, a further one,
the end of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.launcher.control_port import ControlRequest, Refused
from pilotlight.launcher.pod_instances import PodInstances
from pilotlight.protocol import POD_FORK, POD_INSTANCES, POD_STOP

MAX_GRACE_S = 24 * 3600.0
Answer = tuple[int, Mapping[str, Any]]
Fork = Callable[[str, Mapping[str, str]], int]
"""Makes an instance with these secrets; returns its port. Raises Refused."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


class InstanceControl:
    """Answers requests. Owner: the launcher's loop."""

    def __init__(
        self, instances: PodInstances, fork: Fork, *, has_template: Callable[[], bool]
    ) -> None:
        self._instances = instances
        self._fork = fork
        self._has_template = has_template
        self.answers = {
            POD_FORK: ("POST", self._on_fork),
            POD_STOP: ("POST", self._on_stop),
            POD_INSTANCES: ("GET", self._on_instances),
        }

    def _on_fork(self, request: ControlRequest) -> Answer:
        document = request.document()
        name, secrets = document.get("instance"), document.get("secrets", {})
        if not isinstance(name, str) or not _NAME.match(name):
            raise Refused(400, "instance must be the id of an instance")
        if not isinstance(secrets, dict) or not all(
            isinstance(value, str) for value in secrets.values()
        ):
            raise Refused(400, "secrets must be an object of strings")
        known = self._instances.get(name)
        return 200, {"port": known.port if known is not None else self._fork(name, secrets)}

    def _on_stop(self, request: ControlRequest) -> Answer:
        document = request.document()
        port, grace_s = document.get("port"), document.get("grace_s")
        if not isinstance(port, int) or not isinstance(grace_s, int | float):
            raise Refused(400, "port and grace_s must be numbers")
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise Refused(400, f"grace_s must be 0 to {MAX_GRACE_S:g}")
        return 202, {"found": self._instances.stop(port, float(grace_s))}

    def _on_instances(self, request: ControlRequest) -> Answer:
        return 200, {"instances": self._instances.to_json(), "template": self._has_template()}

"""Validates a pod's announcement. Pure.

The cluster guarantees that the directory that a pod sees is its tenant's, and the kernel reports
its uid; the announcement must agree with both. Names become paths and are therefore validated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from snapshotter.agent.launch_signature import LABEL as SIGNATURE
from snapshotter.agent.launch_signature import LaunchSigner, verify_launch
from snapshotter.errors import SnapshotterError
from snapshotter.types import TENANT_LABEL, LaunchSpec

MAX_MOUNTS = 16
"""Maximum number of weights of one function (the controller's own limit is lower)."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")
_REVISION = re.compile(r"[!-~]{1,300}\Z")


class NotAdmitted(SnapshotterError):
    """Raised when an announcement is invalid, or names what does not belong to the pod."""

    code = "not_admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A pod's first message.

    Attributes:
        gpus: UUIDs or indices of its GPUs; () if it does not know them.
        signature: of the launch document, which is without it here; "" if it is not signed.
        running: its worker is running already: only provide what it uses.
        receives_booted: its launcher receives a worker that the agent booted.
    """

    pod: str
    namespace: str
    launch: LaunchSpec
    gpus: tuple[str, ...] = ()
    signature: str = ""
    running: bool = False
    receives_booted: bool = False

    @classmethod
    def of(
        cls,
        message: Mapping[str, Any],
        *,
        tenant: str,
        uid: int,
        own_uid: int,
        grants: LaunchSigner | None = None,
    ) -> Announcement:
        """Parse and validate the announcement of a pod in the directory of `tenant` whose process
        runs as `uid`; `own_uid`: the agent's. Raises NotAdmitted.

        `grants`: verifies the signature of the launch document; None: it is not signed.
        """
        if message.get("op") != "announce":
            raise NotAdmitted(
                f"the first message must be an announcement, not {str(message.get('op'))[:40]!r}"
            )
        try:
            launch = LaunchSpec.from_json(message["launch"])
            announced = cls(
                pod=str(message["pod"]),
                namespace=str(message.get("namespace", "")),
                launch=launch,
                gpus=tuple(str(gpu) for gpu in message.get("gpus", ())),
                running=bool(message.get("running", False)),
                receives_booted=bool(message.get("receives_booted", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise NotAdmitted(
                f"the announcement does not match this version of the platform: "
                f"{type(e).__name__}: {e}"
            ) from e
        if grants is not None and not grants.verify(launch):
            raise NotAdmitted(
                "the launch document was not written by the controller: its signature is "
                "missing or invalid"
            )
        signature = str(launch.labels.get(SIGNATURE, ""))
        announced = replace(announced, launch=verify_launch(launch), signature=signature)
        announced._check(tenant=tenant, uid=uid, own_uid=own_uid)
        return announced

    def _check(self, *, tenant: str, uid: int, own_uid: int) -> None:
        launch = self.launch
        # the names become part of log lines
        if not _NAME.match(self.pod) or not _REVISION.match(launch.revision):
            raise NotAdmitted(
                "names of pods and revisions must be short, without spaces or line breaks"
            )
        if (named := launch.labels.get(TENANT_LABEL)) != tenant:
            raise NotAdmitted(
                f"the launch document belongs to tenant {named!r}, but this directory to {tenant!r}"
            )
        if uid != (own_uid if launch.uid is None else launch.uid):
            raise NotAdmitted(
                f"the pod runs as uid {uid}, but its launch document requires {launch.uid}: set "
                f"runAsUser"
            )
        if not _DIGEST.match(launch.bundle) or not all(
            _DIGEST.match(mount.manifest) for mount in launch.weights
        ):
            raise NotAdmitted("bundles and weights must be named by the 64 hex digits of a sha256")
        if len(launch.weights) > MAX_MOUNTS:
            raise NotAdmitted(
                f"{len(launch.weights)} weights are announced, the limit is {MAX_MOUNTS}"
            )

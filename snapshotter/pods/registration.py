"""What a pod says of itself, and whether it may: pure.

The directory that a pod sees is its tenant's by the cluster's doing, and the uid it runs as is the
kernel's word; what it announces must agree with both. Names become paths, so they are what they
must be or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from snapshotter.errors import SnapshotterError
from snapshotter.grants import Grants, unsealed
from snapshotter.types import LaunchSpec

MAX_MOUNTS = 16
"""Weights of one function (the controller's own bound is lower)."""
TENANT_LABEL = "tenant"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")
_REVISION = re.compile(r"[!-~]{1,300}\Z")


class NotAdmitted(SnapshotterError):
    """Raised when a pod announces what is not its own, or nothing that can be understood."""

    code = "not_admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A pod's first words.

    Attributes:
        gpus: UUIDs or indices of the GPUs that it was given; () where it does not know.
        running: its worker runs already: it tells us only what to keep.
    """

    pod: str
    namespace: str
    launch: LaunchSpec
    gpus: tuple[str, ...] = ()
    running: bool = False

    @classmethod
    def of(
        cls,
        message: Mapping[str, Any],
        *,
        tenant: str,
        uid: int,
        own_uid: int,
        grants: Grants | None = None,
    ) -> Announcement:
        """Of a pod in the directory of `tenant`, whose process runs as `uid`; `own_uid`: the
        agent's. Raises NotAdmitted.

        Args:
            grants: what launch documents are sealed with; None: they are not.
        """
        if message.get("op") != "announce":
            raise NotAdmitted(
                f"a pod begins with an announcement, not with {str(message.get('op'))[:40]!r}"
            )
        try:
            launch = LaunchSpec.from_json(message["launch"])
            announced = cls(
                pod=str(message["pod"]),
                namespace=str(message.get("namespace", "")),
                launch=launch,
                gpus=tuple(str(gpu) for gpu in message.get("gpus", ())),
                running=bool(message.get("running", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise NotAdmitted(
                f"the announcement is none of this version of the platform: {type(e).__name__}: {e}"
            ) from e
        if grants is not None and not grants.holds(launch):
            raise NotAdmitted(
                "the launch document is not as the controller wrote it: its seal is missing or "
                "broken"
            )
        announced = replace(announced, launch=unsealed(launch))
        announced._check(tenant=tenant, uid=uid, own_uid=own_uid)
        return announced

    def _check(self, *, tenant: str, uid: int, own_uid: int) -> None:
        launch = self.launch
        # they are written into logs
        if not _NAME.match(self.pod) or not _REVISION.match(launch.revision):
            raise NotAdmitted(
                "names of pods and revisions are short, and have no spaces or line breaks"
            )
        if (named := launch.labels.get(TENANT_LABEL)) != tenant:
            raise NotAdmitted(
                f"the launch document is of tenant {named!r}, and this directory is of {tenant!r}"
            )
        if uid != (own_uid if launch.uid is None else launch.uid):
            raise NotAdmitted(
                f"the pod runs as uid {uid}, and its launch document says {launch.uid}: set "
                f"runAsUser"
            )
        if not _DIGEST.match(launch.bundle) or not all(
            _DIGEST.match(mount.manifest) for mount in launch.weights
        ):
            raise NotAdmitted("bundles and weights are named by the 64 hex digits of a sha256")
        if len(launch.weights) > MAX_MOUNTS:
            raise NotAdmitted(
                f"{len(launch.weights)} weights are announced, {MAX_MOUNTS} is the bound"
            )

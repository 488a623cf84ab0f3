"""The control group of a pod, named as a kubelet names it: `…/pod<uid>/<container>`. By it a node
agent knows which pod a process is in. Not below `kubepods`: a kubelet of this machine ends what it
does not know there.

Where this machine lets nobody make groups there is none."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_END_S = 2.0


class PodGroup:
    """One pod's group, and its only container's."""

    def __init__(self, uid: str, *, root: Path = _ROOT) -> None:
        # with cgroup v1 one hierarchy is enough; that of systemd has no controller and costs nothing
        hierarchy = root if (root / "cgroup.procs").exists() else root / "systemd"
        self._pod = hierarchy / "pilotlight-tests" / f"pod{uid}"

    def make(self) -> Path | None:
        """The file to which the container writes its pid; None where no group can be made."""
        group = self._pod / "user"
        for _ in range(3):
            try:
                group.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError:
                continue  # the end of another pod removed what both are in
            except OSError:
                return None
            return group / "cgroup.procs"
        return None

    def remove(self) -> None:
        """Remove it, once its last process has ended."""
        until = time.monotonic() + _END_S
        while self._pod.exists() and time.monotonic() < until:
            time.sleep(0.001)
            with contextlib.suppress(OSError):
                (self._pod / "user").rmdir()
                self._pod.rmdir()
                self._pod.parent.rmdir()  # unless another pod is there

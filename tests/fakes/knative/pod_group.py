"""The control group of a pod, named as a kubelet names it: `…/pod<uid>/<container>`. By it a node
agent knows which pod a process is in. Not below `kubepods`: a kubelet of this machine ends what it
does not know there.

Its memory limit is that of the kernel's `memory` controller, where this machine lets us use it: with
cgroup v1 below our own group, with v2 where no process of ours is in the way. Where this machine
lets nobody make groups there is none."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_END_S = 2.0
_TESTS = "pilotlight-tests"


class PodGroup:
    """One pod's group, and its only container's."""

    def __init__(self, uid: str, *, root: Path = _ROOT) -> None:
        self._is_v2 = (root / "cgroup.procs").exists()
        pod = Path(_TESTS) / f"pod{uid}"
        if self._is_v2:
            self._pods = [root / pod]
            self._memory: Path | None = root / pod
            self._limit, self._usage = "memory.max", "memory.current"
        else:
            # with cgroup v1 one hierarchy is enough for the name; that of systemd has no controller
            # and costs nothing
            self._memory = _memory_of_v1(root, pod)
            self._pods = [root / "systemd" / pod, *([self._memory] if self._memory else [])]
            self._limit, self._usage = "memory.limit_in_bytes", "memory.usage_in_bytes"

    def make(self) -> list[Path]:
        """The files to which the container writes its pid; none where no group can be made."""
        made = [group for pod in self._pods if (group := self._made(pod)) is not None]
        return [group / "cgroup.procs" for group in made]

    def _made(self, pod: Path) -> Path | None:
        group = pod / "user"
        for _ in range(3):
            try:
                group.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError:
                continue  # the end of another pod removed what both are in
            except OSError:
                return None
            return group
        return None

    def set_limit(self, memory_bytes: int) -> bool:
        """Bound the memory of the container and of its pod, in the order of a kubelet: the outer one
        first where it grows. Whether the kernel does so. Raises OSError for a limit below what is
        used."""
        if self._memory is None or not (self._memory / "user").is_dir():
            return False
        if self._is_v2:
            with contextlib.suppress(OSError):
                for parent in (self._memory.parent.parent, self._memory.parent, self._memory):
                    (parent / "cgroup.subtree_control").write_text("+memory")
        if not (before := self._read(self._limit).strip()):
            return False
        container = self._memory / "user"
        groups = [self._memory, container]
        if before.isdigit() and int(before) > memory_bytes:
            groups.reverse()
        for group in groups:
            (group / self._limit).write_text(str(memory_bytes))
        if self._is_v2:  # a kubelet's default: all of a container is killed
            (container / "memory.oom.group").write_text("1")
        return True

    def used_bytes(self) -> int:
        """Memory that the container uses, its files in the page cache included; 0 if unknown."""
        text = self._read(self._usage)
        return int(text) if text else 0

    def oom_kills(self) -> int:
        """How often the kernel killed a process of the container because its memory was used up."""
        text = self._read("memory.events" if self._is_v2 else "memory.oom_control")
        counts = dict(line.split(" ", 1) for line in text.splitlines())
        return int(counts.get("oom_kill", 0))

    def _read(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self._memory / "user" / name).read_text() if self._memory is not None else ""
        return ""

    def remove(self) -> None:
        """Remove it, once its last process has ended."""
        until = time.monotonic() + _END_S
        while any(pod.exists() for pod in self._pods) and time.monotonic() < until:
            time.sleep(0.001)
            for pod in self._pods:
                with contextlib.suppress(OSError):
                    (pod / "user").rmdir()
                    pod.rmdir()
                    pod.parent.rmdir()  # unless another pod is there


@functools.cache
def limits_memory() -> bool:
    """Whether this machine lets us limit the memory of pods."""
    group = PodGroup("probe")
    try:
        return bool(group.make()) and group.set_limit(1 << 30)
    finally:
        group.remove()


def _memory_of_v1(root: Path, pod: Path) -> Path | None:
    """The pod's group in the hierarchy of memory, below that of this process, whose limits stay."""
    for path in _paths_of_memory():
        if (parent := root / "memory" / path).is_dir():
            return parent / pod
    return None


def _paths_of_memory() -> Iterator[str]:
    for line in _OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield path.lstrip("/")
            yield ""  # in a container whose own group is the root

"""The memory limit of this container, as its control groups say it (cgroup v1 and v2)."""

from __future__ import annotations

import os
from pathlib import Path


def memory_limit(
    *, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """The smallest limit in bytes of the control groups that this process is in; without one the
    machine's memory. It may change while the process runs."""
    found = group_limit(groups=groups, root=root)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine if found is None else min(found, machine)


def group_limit(
    *, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The smallest limit in bytes of the control groups that this process is in and that are
    visible; None without one.

    In a container `root` is its own group, whatever path `groups` names (cgroups(7))."""
    found = []
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchy, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            hierarchy, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            text = _text(hierarchy / group / name).strip()
            if ".." not in group.parts and text.isdigit():
                found.append(int(text))
    return min(found, default=None)


def room(memory_bytes: int, limit: int, *, most: int) -> int:
    """How many instances of that size fit within the limit: 1 to `most`."""
    return max(1, min(most, limit // max(1, memory_bytes)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""

"""Descendants of a process and their open descriptors, from /proc (proc(5)). A process that ends
meanwhile has no open descriptors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator


def descendants(pid: int) -> list[int]:
    """All descendants of the process, parents first."""
    found, look = [], [pid]
    while look:
        below = children(look.pop())
        found += below
        look += below
    return found


def children(pid: int) -> list[int]:
    """The children of the process, those that have ended and were not waited for included."""
    try:
        texts = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as f:
                texts.append(f.read())
        return [int(child) for child in " ".join(texts).split()]
    except FileNotFoundError:  # it ended, or a kernel without CONFIG_PROC_CHILDREN
        return [other for other, parent, _ in all_processes() if parent == pid]


def all_processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent, state) of each visible process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    state, parent, *_ = f.read().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            yield int(entry), int(parent), state


def process_name(pid: int) -> str:
    """Name and pid of the process, such as `cat (17)`."""
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f"{f.read().strip()} ({pid})"
    except OSError:
        return str(pid)


def open_links(pid: int, leave_aside: Collection[int]) -> Iterator[tuple[int, str]]:
    """(descriptor, link target) of the process, except those in `leave_aside`."""
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it ended
        return
    for entry in sorted(entries, key=int):
        if int(entry) not in leave_aside:
            try:
                yield int(entry), os.readlink(f"/proc/{pid}/fd/{entry}")
            except OSError:  # the descriptor of the listing itself, or one closed meanwhile
                continue

"""TCP ports for processes that listen some time after they were told where."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_PORTS = 16_384
"""Ports below the kernel's own that are chosen from, at random: several runs on one machine seldom
choose the same."""


def free_port() -> int:
    """One that nobody holds at this moment, and that the kernel gives nobody."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many such ports in a row.

    A port of the kernel's own range (ip(7), `ip_local_port_range`) may be a connection's by the
    time that somebody listens on it: to those who ask for any port it gives odd ones, and to those
    who connect even ones, which are just behind them."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(_of_this_worker(max(1024, lowest - _PORTS), lowest)[:-count])
    random.shuffle(candidates)
    for first in candidates:
        if all(map(_is_free, range(first, first + count))):
            return first
    raise AssertionError(f"no {count} TCP ports in a row below {lowest} are free")


def _of_this_worker(first: int, end: int) -> range:
    """The worker's part of these ports: under pytest-xdist others look for free ports at the same
    time."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    size = (end - first) // workers
    return range(first + index * size, first + (index + 1) * size)


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False

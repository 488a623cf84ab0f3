"""Whose namespaces may be entered, told from what /proc says."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from snapshotter.errors import Unsupported
from snapshotter.pods.pod_process import demand_own_namespaces, pidfd_of_peer

OWN = {name: f"{name}:[2]" for name in ("mnt", "pid", "net", "ipc", "uts")}
NODES = {name: f"{name}:[1]" for name in OWN}


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def write(proc: Path, pid: int, namespaces: Mapping[str, str], numbers: str) -> None:
    (proc / str(pid) / "ns").mkdir(parents=True)
    for name, value in namespaces.items():
        (proc / str(pid) / "ns" / name).symlink_to(value)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nNSpid:\t{numbers}\n")


@pytest.mark.parametrize(
    "changes, numbers, words",
    [
        ({}, "4711 1", None),
        ({"net": "net:[1]"}, "4711 1", r"shares namespaces with its node \(net\)"),
        ({"pid": "pid:[1]", "mnt": "mnt:[1]"}, "4711 1", r"\(mnt, pid\)"),
        ({"user": "user:[9]"}, "4711 1", "user namespace"),
        ({}, "4711 7", "first process"),
    ],
)
def test_only_a_pod_whose_namespaces_are_all_its_own_is_entered(
    tmp_path: Path,
    stranger: subprocess.Popen[bytes],
    changes: Mapping[str, str],
    numbers: str,
    words: str | None,
) -> None:
    write(tmp_path, os.getpid(), {**NODES, "user": "user:[1]"}, "1")
    write(tmp_path, 1, {**NODES, "user": "user:[1]"}, "1")
    write(tmp_path, stranger.pid, {**OWN, "user": "user:[1]", **changes}, numbers)
    pidfd = os.pidfd_open(stranger.pid)
    try:
        if words is None:
            assert demand_own_namespaces(pidfd, proc=tmp_path) == stranger.pid
        else:
            with pytest.raises(Unsupported, match=words):
                demand_own_namespaces(pidfd, proc=tmp_path)
    finally:
        os.close(pidfd)


def test_the_peer_is_known_for_certain_or_not_at_all() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            pidfd = pidfd_of_peer(ours)
        except Unsupported as e:
            pytest.skip(str(e))
        with open(f"/proc/self/fdinfo/{pidfd}") as f:
            assert f"Pid:\t{os.getpid()}\n" in f.read()
        os.close(pidfd)

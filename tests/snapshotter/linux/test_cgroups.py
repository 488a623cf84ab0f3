"""Limits through cgroup v1 and v2: paths, files and words, on a tree of plain files; the real thing
is in test_node."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from snapshotter.linux.cgroups import MAX_PIDS, Cgroups, Group, max_pids, pids_of_all

V1 = """\
30 25 0:27 / {root}/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:28 / {root}/pids rw,relatime - cgroup cgroup rw,pids
32 25 0:29 / {root}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
"""
V2 = "30 25 0:27 / {root}/unified rw,relatime - cgroup2 cgroup2 rw\n"


def make_proc(root: Path, mounts: str, own: str) -> Path:
    proc = root / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(mounts.format(root=root))
    (proc / "cgroup").write_text(own)
    return proc


def test_v1_limits_go_below_our_own_group(tmp_path: Path) -> None:
    for name in ("memory/own", "pids", "cpu"):
        (tmp_path / name).mkdir(parents=True)
    proc = make_proc(tmp_path, V1, "3:memory:/own\n2:pids:/\n1:cpu,cpuacct:/\n")
    cgroups = Cgroups.find(Path("/run/x"), proc=proc)
    group = cgroups.make("i-1", memory_bytes=1000, cpu=0.5)

    assert (cgroups.version, cgroups.limits_memory, cgroups.limits_pids, cgroups.why_not) == (
        1,
        True,
        True,
        None,
    )
    base = group.directories["memory"].parent
    assert base.parent == tmp_path / "memory/own"
    assert (tmp_path / "cpu" / base.name / "cpu.shares").read_text() == str(
        1024 * len(os.sched_getaffinity(0))
    )
    assert (group.directories["memory"] / "memory.limit_in_bytes").read_text() == "1000"
    sockets = group.directories["memory"] / "memory.kmem.tcp.limit_in_bytes"
    assert sockets.read_text() == str(32 * 1024**2)
    assert (group.directories["cpu"] / "cpu.shares").read_text() == "512"
    assert len(group.procs) == 3
    assert cgroups.names() == {"i-1"}
    assert Group.from_json(group.to_json()) == group


@pytest.mark.parametrize(
    "pid_max, threads, of_one, of_all",
    [
        (32_768, 192_730, 768, 24_576),
        (4_194_304, 192_730, MAX_PIDS, 144_547),
        (4_096, 30_000, 512, 3072),
    ],
)
def test_all_instances_together_leave_the_machine_some_pids(
    tmp_path: Path, pid_max: int, threads: int, of_one: int, of_all: int
) -> None:
    (kernel := tmp_path / "sys/kernel").mkdir(parents=True)
    assert (max_pids(tmp_path), pids_of_all(tmp_path)) == (MAX_PIDS, None)
    (kernel / "pid_max").write_text(f"{pid_max}\n")
    (kernel / "threads-max").write_text(f"{threads}\n")
    assert (max_pids(tmp_path), pids_of_all(tmp_path)) == (of_one, of_all)


def test_names_and_counters_are_for_root_and_the_reader(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    proc = make_proc(tmp_path, V2, "0::/\n")
    for reader, mode in ((None, 0o700), (os.getgid(), 0o710)):
        directory = (
            Cgroups.find(Path("/run/x"), reader=reader, proc=proc)
            .make(f"i-{mode}", memory_bytes=1, cpu=1)
            .directories["memory"]
        )
        assert stat.S_IMODE(directory.stat().st_mode) == mode
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o711


def test_v2_delegates_controllers_and_has_one_directory(tmp_path: Path) -> None:
    (tmp_path / "unified/own").mkdir(parents=True)
    cgroups = Cgroups.find(Path("/run/x"), proc=make_proc(tmp_path, V2, "0::/own\n"))
    group = cgroups.make("i-1", memory_bytes=1000, cpu=1.0)

    [directory] = set(group.directories.values())
    assert (directory / "memory.max").read_text() == "1000"
    assert (directory / "cpu.weight").read_text() == "100"
    assert (directory / "pids.max").read_text() == str(max_pids())
    assert (directory.parent / "pids.max").read_text() == str(pids_of_all())
    (directory / "memory.events").write_text("oom 2\noom_kill 1\n")
    (directory / "cpu.stat").write_text("usage_usec 5\n")
    (directory / "memory.current").write_text("77\n")
    assert (group.oom_kills(), group.cpu_ns(), group.memory_bytes()) == (1, 5000, 77)


def test_v2_goes_to_the_root_where_its_own_group_has_processes_and_hands_nothing_on(
    tmp_path: Path,
) -> None:
    # cannot be written: the kernel says EBUSY
    (tmp_path / "unified/session/cgroup.subtree_control").mkdir(parents=True)
    proc = make_proc(tmp_path, V2, "0::/session\n")
    cgroups = Cgroups.find(Path("/run/x"), proc=proc)
    assert cgroups.limits_memory
    assert cgroups.why_not is None
    assert {base.parent for base in cgroups.bases.values()} == {tmp_path / "unified"}
    (tmp_path / "unified/cgroup.subtree_control").unlink()
    (tmp_path / "unified/cgroup.subtree_control").mkdir()
    assert str(Cgroups.find(Path("/run/x"), proc=proc).why_not).count("memory: ") == 2


def test_a_v1_group_counts_its_kills(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert Group(directories={"memory": tmp_path}, version=1).oom_kills() == 3


@pytest.mark.parametrize("mounts", ["", V2])
def test_without_a_writable_hierarchy_it_says_why(tmp_path: Path, mounts: str) -> None:
    cgroups = Cgroups.find(Path("/run/x"), proc=make_proc(tmp_path, mounts, "0::/own\n"))
    group = cgroups.make("i-1", memory_bytes=1, cpu=1.0)

    assert not cgroups.limits_memory
    assert cgroups.why_not
    assert (group.procs, group.oom_kills(), group.memory_bytes(), group.cpu_ns()) == (
        [],
        0,
        None,
        None,
    )

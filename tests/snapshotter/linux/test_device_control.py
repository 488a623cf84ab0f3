"""Rules of devices for control groups: tried by processes that enter a group of this machine, of
either version."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.linux import device_control
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.linux.device_control import STANDARD, DeviceRule
from tests.conftest import RequireOrSkip
from tests.fakes.allocated_slots import find_groups
from tests.fakes.gpu_nodes import unassigned_majors

root = pytest.mark.root
TRY = """
import errno, os, sys
groups, nodes = sys.argv[1].split(","), sys.argv[2:]
for file in groups:
    with open(file, "w") as f:
        f.write("0")
def tried(action, *arguments):
    try:
        action(*arguments)
    except OSError as e:
        return errno.errorcode[e.errno]
    return "done"
print(*(tried(os.open, node, os.O_RDWR) for node in nodes), tried(os.mknod, nodes[0] + "-made", 0o20666, os.lstat(nodes[0]).st_rdev))
"""


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def cgroups(
    request: pytest.FixtureRequest, tmp_path: Path, require_or_skip: RequireOrSkip
) -> Iterator[Cgroups]:
    """Groups that control devices; none is left."""
    found = find_groups(tmp_path / "run", tmp_path, version=request.param)
    if not found.controls_devices or found.version != request.param:
        require_or_skip(f"cgroup v{request.param}: {found.why_no_devices}")
    yield found
    assert found.names() == set()
    found.remove_empty()


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Three devices without a driver."""
    major = unassigned_majors()[0]
    paths = [str(tmp_path / f"node{minor}") for minor in range(3)]
    for minor, path in enumerate(paths):
        os.mknod(path, 0o20666, os.makedev(major, minor))
    return paths


def outcomes(group: Group, *nodes: str) -> list[str]:
    """What a root process in the group gets from opening each, and from making the first again."""
    done = subprocess.run(
        [sys.executable, "-c", TRY, ",".join(group.procs), *nodes],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def rule(node: str) -> DeviceRule:
    """Of a node."""
    return DeviceRule.of_node(Path(node))


@root
async def test_root_in_a_group_opens_what_its_rules_allow_and_makes_no_node(
    cgroups: Cgroups, nodes: list[str]
) -> None:
    group = cgroups.make("g", memory_bytes=1 << 27, cpu=1.0, devices=[rule(nodes[1])])
    try:
        assert outcomes(group, *nodes, "/dev/null", "/dev/urandom") == [
            "EPERM",
            "ENXIO",
            "EPERM",
            "done",
            "done",
            "EPERM",
        ]
    finally:
        await group.remove()


@root
async def test_new_rules_replace_the_earlier_ones(cgroups: Cgroups, nodes: list[str]) -> None:
    group = cgroups.make("g", memory_bytes=1 << 27, cpu=1.0, devices=[rule(nodes[0])])
    try:
        assert outcomes(group, *nodes)[:3] == ["ENXIO", "EPERM", "EPERM"]
        cgroups.make("g", memory_bytes=1 << 27, cpu=1.0, devices=[rule(nodes[2])])
        assert outcomes(group, *nodes)[:3] == ["EPERM", "EPERM", "ENXIO"]
        cgroups.make("g", memory_bytes=1 << 27, cpu=1.0)
        assert outcomes(group, *nodes)[:3] == ["EPERM"] * 3
    finally:
        await group.remove()


@root
async def test_a_group_that_may_not_have_a_device_is_not_made_without_rules(
    cgroups: Cgroups, nodes: list[str]
) -> None:
    """In v1 a group allows nothing that the group above it does not; the rule is named."""
    if cgroups.version != 1:
        pytest.skip("in v2 rules of groups above apply without a word")
    base = cgroups.bases["devices"]
    (base / "devices.deny").write_text("a")
    for allowed in STANDARD:
        (base / "devices.allow").write_text(str(allowed))
    try:
        with pytest.raises(OSError, match=rf"devices.allow 'c {rule(nodes[0]).major}:0 rw'"):
            cgroups.make("g", memory_bytes=1 << 27, cpu=1.0, devices=[rule(nodes[0])])
    finally:
        await cgroups.group("g").remove()


@root
async def test_looking_for_groups_again_changes_no_group(
    cgroups: Cgroups, nodes: list[str], tmp_path: Path
) -> None:
    """As a restarted agent does, while slots run."""
    group = cgroups.make("g", memory_bytes=1 << 27, cpu=1.0, devices=[rule(nodes[1])])
    try:
        again = find_groups(tmp_path / "run", tmp_path, version=cgroups.version)
        assert (again.bases, again.why_no_devices) == (cgroups.bases, None)
        assert outcomes(group, *nodes)[:3] == ["EPERM", "ENXIO", "EPERM"]
    finally:
        await group.remove()


def test_where_devices_cannot_be_controlled_the_reason_is_kept(tmp_path: Path) -> None:
    """A directory that is no control group refuses the program, a file that cannot be written the
    rule."""
    own = "9:memory:/\n0::/\n"
    for kind, options, name in (("cgroup2", "rw", "unified"), ("cgroup", "rw,devices", "devices")):
        proc = tmp_path / name
        (proc / "group").mkdir(parents=True)
        (proc / "mountinfo").write_text(f"30 25 0:27 / {proc}/group rw - {kind} {kind} {options}\n")
        (proc / "cgroup").write_text(f"{own}8:devices:/\n")
        if name == "devices":
            (proc / "group" / "blocked").mkdir()
        found = Cgroups.find(Path("/run/x"), proc=proc)
        assert not found.controls_devices
        assert found.why_no_devices is not None
        assert str(proc) in found.why_no_devices
        assert "devices" not in found.bases


def test_rules_are_of_device_nodes(tmp_path: Path) -> None:
    assert str(DeviceRule.of_node(Path("/dev/null"))) == "c 1:3 rw"
    assert str(DeviceRule(kind="b", major=8)) == "b 8:* rw"
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(ValueError, match="is not a device node"):
            DeviceRule.of_node(path)


rules = st.lists(
    st.builds(
        DeviceRule,
        kind=st.sampled_from(["b", "c"]),
        major=st.integers(0, 4),
        minor=st.none() | st.integers(0, 3),
    ),
    max_size=6,
)


@given(
    rules=rules,
    kind=st.sampled_from(["b", "c"]),
    access=st.integers(1, 7),
    major=st.integers(0, 4),
    minor=st.integers(0, 3),
)
def test_the_program_decides_as_the_rules_say(
    rules: list[DeviceRule], kind: str, access: int, major: int, minor: int
) -> None:
    """Run by an interpreter of the few instructions that it uses."""
    is_allowed = access & 1 == 0 and any(
        (r.kind, r.major) == (kind, major) and r.minor in (None, minor) for r in rules
    )
    context = struct.pack("<III", access << 16 | {"b": 1, "c": 2}[kind], major, minor)
    assert run(device_control.program(rules), context) == int(is_allowed)


def run(program: bytes, context: bytes) -> int:
    """What the program returns for this context (Documentation/bpf/standardization)."""
    registers: dict[int, int] = {}
    lines = [struct.unpack_from("<BBhi", program, at) for at in range(0, len(program), 8)]
    at = 0
    while True:
        code, both, offset, immediate = lines[at]
        target, source = both & 15, both >> 4
        at += 1
        match code:
            case 0x61:
                assert source == 1
                registers[target] = struct.unpack_from("<I", context, offset)[0]
            case 0xBC:
                registers[target] = registers[source]
            case 0xB4:
                registers[target] = immediate
            case 0x54:
                registers[target] &= immediate
            case 0x74:
                registers[target] >>= immediate
            case 0x55:
                at += offset if registers[target] != immediate else 0
            case 0x5D:
                at += offset if registers[target] != registers[source] else 0
            case 0x95:
                return registers[0]
            case _:
                raise ValueError(f"unknown instruction {code:#x}")


def test_errors_of_the_kernel_say_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="device program") as failed:
        device_control.allow_only(tmp_path, STANDARD, version=2)
    assert failed.value.errno in (errno.EBADF, errno.EPERM)
    with pytest.raises(OSError, match=r"devices.deny 'a' in .*: No such file"):
        device_control.allow_only(tmp_path, STANDARD, version=1)

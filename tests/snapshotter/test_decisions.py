"""The pure parts of starting: what is executed, which Template goes, why something ended, what is
refused."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from snapshotter.linux.cgroups import Group
from snapshotter.settings import SnapshotterSettings
from snapshotter.shim.sandbox import isolation
from snapshotter.shim.sandbox.system_calls import ALLOWED, DENIED, numbers
from snapshotter.slots import exit_reason, launch_plan
from snapshotter.slots.launch_plan import Sources
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.slot import Slot
from snapshotter.starts.templates import Template, Templates
from snapshotter.types import LaunchSpec, RevisionKey

LAUNCH = LaunchSpec(
    revision=RevisionKey("f@v1"),
    trust_domain="t",
    uid=20001,
    bundle="b",
    image=None,
    entry={"name": "f"},
    env={"OMP_NUM_THREADS": "8", "MODE": "fast"},
    memory_bytes=1024**3,
    cpu=1.0,
    startup_timeout_s=10.0,
)


@dataclass(frozen=True, kw_only=True)
class FakeLayout:
    """An image's layout, on paper."""

    python: Path = Path("/opt/py/bin/python3.11")
    prefix: Path = Path("/opt/py")
    site: tuple[Path, ...] = (Path("/opt/site-a"), Path("/opt/site-b"))
    env: Mapping[str, str] = field(default_factory=lambda: {"IMAGE": "1"})
    files: Path | None = None
    links: tuple[str, ...] = ()
    rootfs: Path | None = None
    rootfs_digest: str = ""


SOURCES = Sources(
    layout=FakeLayout(),
    code=Path("/code"),
    weights={"w": Path("/weights/w")},
    runtime={"pilotlight": Path("/src/pilotlight")},
)


def test_in_a_namespace_every_path_is_the_same_on_every_node() -> None:
    plan = launch_plan.plan(
        LAUNCH, SOURCES, directory=Path("/run/s-1"), uid=20001, namespaced=True, limits={}
    )
    root = "/run/pilotlight/slot"

    assert plan.order["argv"] == [
        f"{root}/python/bin/python3.11",
        "-I",
        "-S",
        "-B",
        f"{root}/runtime/pilotlight/worker/boot.py",
        f"{root}/launch.json",
    ]
    assert {name: source for source, name in plan.order["binds"]} == {
        "python": "/opt/py",
        "code": "/code",
        "launch.json": "/run/s-1/launch.json",
        "env/0": "/opt/site-a",
        "env/1": "/opt/site-b",
        "runtime/pilotlight": "/src/pilotlight",
        "weights/w": "/weights/w",
    }
    assert plan.launch_file["weights"] == {"w": f"{root}/weights/w"}
    assert plan.launch_file["site"] == [f"{root}/env/0", f"{root}/env/1"]


def test_without_namespaces_the_real_paths_are_named() -> None:
    plan = launch_plan.plan(
        LAUNCH, SOURCES, directory=Path("/run/s-1"), uid=None, namespaced=False, limits={}
    )
    assert plan.order["binds"] == []
    assert plan.launch_file["code"] == "/code"
    assert plan.launch_file["runtime"] == ["/run/s-1/runtime"]
    assert plan.order["env"]["HOME"] == plan.order["work"] == "/run/s-1/work"


def test_the_launch_environment_keeps_libraries_single_threaded_whatever_the_user_says() -> None:
    env = launch_plan.plan(
        LAUNCH, SOURCES, directory=Path("/run/s-1"), uid=None, namespaced=True, limits={}
    ).order["env"]
    assert (env["OMP_NUM_THREADS"], env["MODE"], env["IMAGE"], env["TMPDIR"]) == (
        "1",
        "fast",
        "1",
        "/tmp",
    )


def test_python_is_on_every_path_and_an_images_own_comes_first() -> None:
    def path(launch: LaunchSpec) -> list[str]:
        plan = launch_plan.plan(
            launch, SOURCES, directory=Path("/run/s-1"), uid=None, namespaced=True, limits={}
        )
        assert plan.order["python"] == "/run/pilotlight/slot/python/bin/python3.11"
        return str(plan.order["env"]["PATH"]).split(":")

    assert path(LAUNCH)[0] == "/run/pilotlight/slot/bin"
    own = path(replace(LAUNCH, env={"PATH": "/opt/own/bin:/bin"}))
    assert own == ["/opt/own/bin", "/bin", "/run/pilotlight/slot/bin"]


def test_rlimits_stand_in_for_absent_cgroups() -> None:
    with_groups = launch_plan.limits(LAUNCH, uid=20001, limits_memory=True, limits_pids=True)
    without = launch_plan.limits(LAUNCH, uid=20001, limits_memory=False, limits_pids=False)
    assert "DATA" not in with_groups
    assert (without["DATA"], without["CORE"]) == (1024**3, 0)
    assert "NPROC" in without


@pytest.mark.parametrize(
    "status,asked,oom,lost,word",
    [
        (0, "stopped", 0, False, "stopped"),
        (9, None, 1, False, "out_of_memory"),
        (9, None, 0, False, "killed"),
        (256, None, 0, False, "exited"),
        (None, None, 0, True, "template_lost"),
        (None, None, 0, False, "slot_lost"),
        (9, "killed", 1, False, "killed"),
        (15, "stopped", 0, False, "stopped"),
        (9, "stopped", 1, False, "out_of_memory"),
        (9, "stopped", 0, False, "killed"),
    ],
)
def test_an_end_has_one_word(
    status: int | None, asked: str | None, oom: int, lost: bool, word: str
) -> None:
    assert exit_reason.reason(status, requested=asked, oom_kills=oom, lost=lost) == word
    assert exit_reason.sentence("instance i-1", word, status, memory_bytes=1024**2).startswith(
        "instance i-1"
    )


def test_signals_are_named() -> None:
    assert exit_reason.detail(int(signal.SIGSEGV)) == {"signal": "SIGSEGV"}
    assert exit_reason.signal_name(40) == "signal 40"
    assert exit_reason.detail(3 << 8) == {"exit_status": 3}


@dataclass
class FakeSlot:
    """Only what a Template's choice looks at."""

    id: str
    running: dict[str, object] = field(default_factory=dict)


def template(
    name: str, *, used_at: float, pss: int, busy: bool = False, threads: tuple[str, ...] = ()
) -> Template:
    slot = FakeSlot(id=f"s-{name}", running={"i": object()} if busy else {})
    spec = LaunchSpec.from_json({**LAUNCH.to_json(), "revision": name})
    occupied = OccupiedSlot(
        slot=cast("Slot", slot), launch=spec, group=Group(directories={}, version=0)
    )
    return Template(
        occupied=occupied,
        threads=threads,
        phases_ms={},
        single=bool(threads),
        last_used_at=used_at,
        pss_bytes=pss,
    )


def test_the_least_recently_used_go_first_and_only_as_many_as_needed() -> None:
    templates = Templates()
    for t in (
        template("a", used_at=3, pss=10),
        template("b", used_at=1, pss=10, busy=True),
        template("c", used_at=2, pss=10),
    ):
        templates.add(t)

    assert [t.revision for t in templates.victims(need_bytes=15, unused_only=False)] == ["b", "c"]
    assert [t.revision for t in templates.victims(need_bytes=5, unused_only=True)] == ["c"]
    assert templates.victims(need_bytes=0, unused_only=False) == []
    templates.use(RevisionKey("b"), 9.0)
    assert [t.revision for t in templates.victims(need_bytes=5, unused_only=False)] == ["c"]
    assert templates.pss_bytes() == 30


def test_one_that_cannot_be_forked_is_handed_out_once() -> None:
    templates = Templates()
    templates.add(template("a", used_at=1, pss=1, threads=("pool",)))
    assert templates.use(RevisionKey("a"), 2.0) is not None
    assert templates.use(RevisionKey("a"), 3.0) is None
    assert templates.is_single(RevisionKey("a"))


def run_filter(
    program: bytes, *, arch: int, number: int, argument: int = 0, second: int = 0
) -> int:
    """A classic BPF machine, as far as the filter uses it: the kernel's answer for one system
    call."""
    lines = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    data = {0: number, 4: arch, 16: argument, 24: second}
    at, accumulator = 0, 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:
            accumulator = data[value]
        elif code == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_lets_pass_what_is_listed_and_nothing_else(machine: str) -> None:
    program, arch = (
        isolation.filter_program(machine),
        {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine],
    )
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    allowed, denied = (set(numbers(calls, machine).values()) for calls in (ALLOWED, DENIED))
    asked = {"x86_64": {41, 53, clone}, "aarch64": {198, 199, clone}}[machine]
    assert len(program) < 4096 * 8, "BPF_MAXINSNS"
    assert allowed.isdisjoint(denied | asked)

    for number in set(range(1024)) - asked:
        expected = (
            0x7FFF0000
            if number in allowed
            else 0x00050000 | (errno.EPERM if number in denied else errno.ENOSYS)
        )
        assert run_filter(program, arch=arch, number=number) == expected, number
    for number in isolation.ABSENT.values():
        assert run_filter(program, arch=arch, number=number) == 0x00050000 | errno.ENOSYS
    assert run_filter(program, arch=arch, number=clone, argument=0x11) == 0x7FFF0000
    assert (
        run_filter(program, arch=arch, number=clone, argument=0x10000011)
        == 0x00050000 | errno.EPERM
    )
    assert (
        run_filter(program, arch=arch, number={"x86_64": 53, "aarch64": 199}[machine], argument=1)
        == 0x7FFF0000
    )
    assert run_filter(program, arch=0x40000003, number=0) == 0x80000000


def test_the_numbers_of_this_machine_are_the_kernels() -> None:
    """As libc's headers have them, where they are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if os.uname().machine != "x86_64" or not header.exists():
        pytest.skip("no headers of libc for x86-64")
    known = {
        name: int(number)
        for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())
    }
    ours = {**numbers(ALLOWED, "x86_64"), **numbers(DENIED, "x86_64")}
    assert {
        name: number for name, number in ours.items() if known.get(name, number) != number
    } == {}


def test_linux_aio_whose_events_all_of_the_machine_shares_is_not_there() -> None:
    assert not [name for name in {**ALLOWED, **DENIED} if name.startswith("io_")]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_lets_sockets_of_listed_families_be_made_only(machine: str) -> None:
    program, arch = (
        isolation.filter_program(machine),
        {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine],
    )
    number = {"x86_64": 41, "aarch64": 198}[machine]
    answers = {
        family: run_filter(program, arch=arch, number=number, argument=family)
        for family in range(46)
    }

    allowed = {family for family, answer in answers.items() if answer == 0x7FFF0000}
    assert allowed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert answers[socket.AF_VSOCK] == 0x00050000 | errno.EAFNOSUPPORT
    assert set(answers.values()) == {0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_a_build_refuses_unix_sockets_that_could_reach_a_process_outside(
    machine: str,
) -> None:
    program, arch = (
        isolation.filter_program(machine, unix_sockets=False),
        {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine],
    )
    single, pair = {"x86_64": (41, 53), "aarch64": (198, 199)}[machine]

    def answer(number: int, domain: int, kind: int) -> int:
        return run_filter(program, arch=arch, number=number, argument=domain, second=kind)

    refused, allowed = 0x00050000 | errno.EAFNOSUPPORT, 0x7FFF0000
    assert {answer(single, 1, kind) for kind in (1, 2, 3, 5, 1 | 0o2000000)} == {refused}
    assert {answer(pair, 1, kind) for kind in (2, 3, 2 | 0o2000000, 3 | 0o4000)} == {refused}
    assert {answer(pair, 1, kind) for kind in (1, 5, 1 | 0o2000000)} == {allowed}
    assert {answer(single, domain, kind) for domain in (2, 10, 16) for kind in (1, 2, 3)} == {
        allowed
    }
    assert answer({"x86_64": 0, "aarch64": 63}[machine], 1, 2) == allowed, "read"
    assert (
        run_filter(
            program, arch=arch, number={"x86_64": 56, "aarch64": 220}[machine], argument=0x10000011
        )
        == 0x00050000 | errno.EPERM
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_max_bytes": 1},
        {"memory_bytes": 0},
        {"uid_base": 0},
        {"metrics_listen": "nowhere"},
        {"build_network": "none"},
        {"function_network": "bridge"},
        {"egress_denied": ["10.0.0.1/8"]},
        {"egress_allowed": ["mirror.example"]},
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(wrong: dict[str, object]) -> None:
    [name] = wrong
    with pytest.raises(ValueError, match=name):
        SnapshotterSettings(**wrong)  # type: ignore[arg-type]

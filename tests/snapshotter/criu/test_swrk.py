"""The conversation with `criu swrk`: whatever the other side does, it ends in time, with a reason,
and with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.criu import messages, operations
from snapshotter.criu.errors import CriuExited, CriuFailed, CriuReason, CriuTimeout, CriuUnavailable
from snapshotter.criu.processes import Criu
from tests.conftest import RequireOrSkip
from tests.fakes import fake_criu
from tests.fakes.local_slot import LocalSlot

SHORT_S = 0.6
LONG_S = 20.0


@pytest.fixture
def description(require_or_skip: RequireOrSkip) -> Path:
    found = messages.find_descriptor_set(os.environ, None)
    if found is None:
        require_or_skip("no description of CRIU's RPC (scripts/install-criu)")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


async def dump(
    slot: LocalSlot, tmp_path: Path, folder: int, description: Path, script: str, **how: float
) -> None:
    program = fake_criu.install(tmp_path / "bin", script=script, description=description)
    criu = Criu(binary=program, messages=messages.load(description))
    await operations.dump(
        slot,
        criu=criu,
        pid=7,
        images=folder,
        work=folder,
        uid=0,
        cgroup={},
        deadline_s=how.get("deadline_s", LONG_S),
    )


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


async def test_dump_answers_each_notification_and_leaves_nothing(
    tmp_path: Path, folder: int, description: Path
) -> None:
    program = fake_criu.install(tmp_path / "bin", script="good", description=description)
    criu = Criu(binary=program, messages=messages.load(description))
    steps: list[str] = []

    def on_notify(step: str, pid: int) -> bool:
        steps.append(step)
        return True

    slot, before = LocalSlot(), open_descriptors()
    await operations.dump(
        slot,
        criu=criu,
        pid=7,
        images=folder,
        work=folder,
        uid=0,
        cgroup={},
        deadline_s=LONG_S,
        on_notify=on_notify,
    )
    assert steps == list(fake_criu.NOTIFICATIONS["DUMP"])
    assert slot.runs[0].exited.done()
    assert open_descriptors() == before


async def test_restore_names_the_process(tmp_path: Path, folder: int, description: Path) -> None:
    program = fake_criu.install(tmp_path / "bin", script="good", description=description)
    criu = Criu(binary=program, messages=messages.load(description))
    found = await operations.restore(
        LocalSlot(), criu=criu, images=folder, work=folder, uid=0, cgroup={}, deadline_s=LONG_S
    )
    assert found.pid == fake_criu.RESTORED_PID
    assert found.lazy is None


async def test_notification_that_is_refused_ends_the_operation(
    tmp_path: Path, folder: int, description: Path
) -> None:
    program = fake_criu.install(tmp_path / "bin", script="good", description=description)
    criu = Criu(binary=program, messages=messages.load(description))
    with pytest.raises(CriuFailed, match="it logged no reason"):
        await operations.dump(
            LocalSlot(),
            criu=criu,
            pid=7,
            images=folder,
            work=folder,
            uid=0,
            cgroup={},
            deadline_s=LONG_S,
            on_notify=lambda *_: False,
        )


async def test_refusal_carries_the_cause_and_not_the_noise(
    tmp_path: Path, folder: int, description: Path
) -> None:
    with pytest.raises(CriuFailed) as caught:
        await dump(LocalSlot(), tmp_path, folder, description, "refuse")
    assert caught.value.reason is CriuReason.TCP_CONNECTION
    assert caught.value.errno == 3
    assert "RLIMIT_NOFILE" not in caught.value.cause + str(caught.value)
    assert any("Dumping FAILED" in line for line in caught.value.log_tail)


async def test_a_refusal_before_there_is_a_log_carries_what_was_printed(
    tmp_path: Path, folder: int, description: Path
) -> None:
    with pytest.raises(CriuFailed, match="Can't open images directory: Permission denied"):
        await dump(LocalSlot(), tmp_path, folder, description, "refuse_the_request")


@pytest.mark.parametrize("script", ["hang", "hang_at_notify"])
async def test_overrun_is_cut_short_and_criu_is_dead_then(
    tmp_path: Path, folder: int, description: Path, script: str
) -> None:
    slot, before, started = LocalSlot(), open_descriptors(), time.monotonic()
    with pytest.raises(CriuTimeout, match=r"not done within 0\.6 s"):
        await dump(slot, tmp_path, folder, description, script, deadline_s=SHORT_S)
    assert time.monotonic() - started < SHORT_S + 5
    assert slot.runs[0].exited.done()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    "script, words",
    [
        ("die", "killed by signal 9.*something broke"),
        ("die_at_notify", "killed by signal 9"),
        ("exit", "exit status 1"),
        ("garbage", "answer is invalid"),
        ("empty", "answered EMPTY to DUMP: Invalid req"),
        ("wrong_kind", "answered CHECK to DUMP"),
    ],
)
async def test_death_and_nonsense_are_told_apart(
    tmp_path: Path, folder: int, description: Path, script: str, words: str
) -> None:
    slot, before = LocalSlot(), open_descriptors()
    with pytest.raises(CriuExited, match=words):
        await dump(slot, tmp_path, folder, description, script)
    assert slot.runs[0].exited.done()
    assert open_descriptors() == before


async def test_cancelled_operation_leaves_no_process(
    tmp_path: Path, folder: int, description: Path
) -> None:
    slot, before = LocalSlot(), open_descriptors()
    task = asyncio.create_task(dump(slot, tmp_path, folder, description, "hang"))
    while not slot.runs:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slot.runs[0].exited.done()
    assert open_descriptors() == before


async def test_program_that_is_not_there_is_a_criu_that_is_gone(
    tmp_path: Path, folder: int, description: Path
) -> None:
    criu = Criu(binary=tmp_path / "nowhere", messages=messages.load(description))
    with pytest.raises(CriuExited, match="exit status 1"):
        await operations.dump(
            LocalSlot(),
            criu=criu,
            pid=7,
            images=folder,
            work=folder,
            uid=0,
            cgroup={},
            deadline_s=LONG_S,
        )


def test_option_that_criu_does_not_know_is_an_error(description: Path) -> None:
    with pytest.raises(CriuUnavailable, match="no_such_option"):
        messages.load(description).request("DUMP", {"no_such_option": True})


def test_descriptions_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rpc.desc").write_bytes(b"\x00 nonsense")
    with pytest.raises(CriuUnavailable, match="install-criu"):
        messages.load(tmp_path / "rpc.desc")
    with pytest.raises(CriuUnavailable, match="No such file"):
        messages.load(tmp_path / "absent.desc")


def test_description_is_found_where_it_is_installed(tmp_path: Path) -> None:
    own = tmp_path / "share" / "pilotlight" / "criu-rpc.desc"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"")
    assert messages.find_descriptor_set({}, tmp_path / "sbin" / "criu") == own
    assert messages.find_descriptor_set({messages.DESCRIPTOR_VARIABLE: str(own)}, None) == own
    assert (
        messages.find_descriptor_set(
            {messages.DESCRIPTOR_VARIABLE: "/nowhere"}, tmp_path / "sbin" / "criu"
        )
        is None
    )


def test_response_needs_its_required_fields(description: Path) -> None:
    with pytest.raises(messages.InvalidResponse):
        messages.load(description).response(b"")

"""Refused system calls are found in the kernel's log, and said by function and number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from snapshotter.linux.seccomp_log import AGAIN_S, KERNEL_LOG, SeccompLog
from snapshotter.shim.sandbox import isolation
from snapshotter.shim.sandbox.system_calls import DENIED, numbers
from tests.fakes.agent_home import AgentHome, instance_id
from tests.fakes.clock import ManualClock

LABELS = {"app": "shop", "function": "price", "tenant": "t-1"}
ROOT = Path(__file__).parents[3]
TRY = """
import ctypes, sys
from snapshotter.shim.sandbox import isolation
isolation.confine(uid=20001, limits={}, log_refused=True)
sys.exit(ctypes.CDLL(None).syscall(int(sys.argv[1]), b"x", 1) != -1)
"""
ACTIONS = Path("/proc/sys/kernel/seccomp/actions_logged")
LOGIN = Path("/proc/self/loginuid")
"""Where the kernel has its audit."""


def record(number: int, *, pid: int | None = None, code: str = "0x50000") -> str:
    return (
        f"4,1018,41239182712,-;audit: type=1326 audit(1795685381.304:2): auid=4294967295 "
        f"uid=20001 gid=20001 ses=4294967295 pid={pid or os.getpid()} "
        f'comm="python3" exe="/usr/bin/python3" sig=0 arch=c000003e syscall={number} compat=0 '
        f"ip=0x7f code={code}\n"
    )


def test_a_refusal_is_said_once_a_minute_for_each_call_of_a_function(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock(100.0)
    refusals = SeccompLog(lambda _: LABELS, machine="x86_64", clock=clock)
    for _ in range(3):
        refusals.on_record(record(101))
        refusals.on_record(record(700))
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        (
            f"system_call.refused call=ptrace number=101 function=shop/price tenant=t-1 "
            f"pid={os.getpid()}"
        ),
        (
            f"system_call.refused call=unknown number=700 function=shop/price tenant=t-1 "
            f"pid={os.getpid()}"
        ),
    ]
    clock.now += AGAIN_S
    refusals.on_record(record(101))
    assert len(caplog.records) == 3


def test_of_a_process_that_is_gone_or_another_ones_the_uid_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nobodys(groups: str) -> Mapping[str, str] | None:
        assert groups
        return None

    SeccompLog(nobodys, machine="x86_64").on_record(record(101))
    SeccompLog(nobodys, machine="x86_64").on_record(record(101, pid=2**22 + 1))
    assert [r.getMessage().split()[3:5] for r in caplog.records] == 2 * [["function=uid", "20001"]]


@pytest.mark.parametrize(
    "text",
    [
        record(101, code="0x7ffc0000"),
        record(isolation.ABSENT["clone3"]),
        "6,1,1,-;something else",
        "",
        record(101).replace("pid=", "pit="),
    ],
    ids=["allowed and logged", "what libraries do without", "another record", "nothing", "no pid"],
)
def test_what_is_no_refusal_is_left_out(caplog: pytest.LogCaptureFixture, text: str) -> None:
    SeccompLog(lambda _: LABELS, machine="x86_64").on_record(text)
    assert caplog.records == []


async def test_without_the_kernels_log_it_says_so_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await SeccompLog(lambda _: LABELS).watch(tmp_path / "none")
    assert "refused_calls.off" in caplog.text


def needs_the_kernels_log() -> None:
    logged = ACTIONS.read_text().split() if ACTIONS.exists() else []
    if "errno" not in logged or not LOGIN.exists() or not os.access(KERNEL_LOG, os.R_OK):
        pytest.skip("this kernel writes no refused system calls to /dev/kmsg")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_the_kernel_writes_it_down(caplog: pytest.LogCaptureFixture) -> None:
    needs_the_kernels_log()
    caplog.set_level(logging.WARNING)
    number = numbers(DENIED, os.uname().machine)["sethostname"]
    watching = asyncio.create_task(SeccompLog(lambda _: LABELS).watch())
    await asyncio.sleep(0)  # it is at the end of the log now
    # bounded by the test's own timeout
    while f"call=sethostname number={number}" not in caplog.text:
        tried = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRY, str(number), cwd=ROOT
        )
        assert await tried.wait() == 0
        await asyncio.sleep(0.2)  # the kernel drops records where it prints too many
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.usefixtures("criu_proof")
async def test_a_function_whose_refusals_are_logged_comes_back_from_its_snapshot(
    short_tmp: Path,
) -> None:
    home = AgentHome(short_tmp)
    launch = home.launch()
    async with home.agent(snapshots=True, log_refused_calls=True), home.client() as client:
        await client.checkpoint(launch)
        await client.drop_template(launch.revision)
        restored = await client.start(launch, instance_id=instance_id(), lessee="a", secret_env={})
        assert restored.start_kind == "RESTORE"
        await client.stop(restored.id, grace_s=0)

"""Tiles: another process is made to ask for them, and goes on as if nothing had been."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from snapshotter.linux import amx

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not amx.has_tiles(), reason="this processor has no tiles"),
]

SLEEPER = """
import ctypes, sys, threading
libc, found = ctypes.CDLL(None), ctypes.c_uint64()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("here", flush=True)
for line in sys.stdin:
    libc.syscall(158, 0x1022, ctypes.byref(found))
    print(line.strip(), found.value >> 18 & 1, flush=True)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a read."""
    argv = [sys.executable, "-S", "-c", SLEEPER]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


def ask(process: subprocess.Popen[str], word: str) -> str:
    """What it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(word, file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def test_a_process_gets_the_permission_and_goes_on_with_the_call_it_was_in(
    sleeper: subprocess.Popen[str],
) -> None:
    assert ask(sleeper, "before") == "before 0"

    amx.request_tile_permission([sleeper.pid])

    assert ask(sleeper, "after") == "after 1"


def test_a_process_that_is_gone_is_nobodys_failure(caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()

    amx.request_tile_permission([process.pid])

    assert "tiles.not_asked" in caplog.text

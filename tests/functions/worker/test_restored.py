"""Two real restores of one worker, by CRIU on the command line: what must differ between them, and
what they know of the time between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.fakes.fake_shim import call, function_spec
from tests.fakes.freezing_shim import FreezingShim, Frozen
from tests.functions.worker.test_checkpoint import UNIQUE

pytestmark = pytest.mark.root

FROZEN = """
    import os, time
    loaded = (time.time(), time.monotonic())

    def f():
        missed = (time.time() - loaded[0]) - (time.monotonic() - loaded[1])
        return [missed, float(os.environ["PILOTLIGHT_FROZEN_S"])]
"""


@pytest.fixture
def criu_binary(require_or_skip: Callable[[str], NoReturn]) -> str:
    """Where CRIU is, when it and unshare(1) are there."""
    found = shutil.which("criu") or shutil.which("criu", path="/usr/local/sbin:/usr/sbin")
    if found is None or shutil.which("unshare") is None:
        require_or_skip("CRIU or unshare is not installed")
    return found


def dump(criu: str, shim: FreezingShim, images: Path) -> Frozen:
    """Freeze a fork of the worker and have CRIU take it."""
    frozen = shim.checkpoint()
    pid = shim.wait_event("forked", instance="c-1")["pid"]
    done = subprocess.run(
        [criu, "dump", "-t", str(pid), "-D", str(images), "-o", "dump.log", "--link-remap"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (images / "dump.log").read_text()[-2000:]
    assert os.WTERMSIG(shim.wait_event("exited", instance="c-1")["status"]) == signal.SIGKILL
    return frozen


@contextlib.contextmanager
def restored(criu: str, shim: FreezingShim, frozen: Frozen, images: Path) -> Iterator[None]:
    """One restored copy in a PID namespace of its own, for as long as the context lasts; the shim
    speaks with it."""
    Path(frozen.path).unlink(missing_ok=True)
    script = (
        f"{criu} restore -D {images} -o restore.log --restore-detached && echo restored && read end"
    )
    command = [
        "unshare",
        "--pid",
        "--mount",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        script,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as box:
        assert box.stdout is not None
        try:
            assert box.stdout.readline() == "restored\n", (images / "restore.log").read_text()[
                -2000:
            ]
            shim.revive(frozen)
            yield
        finally:
            box.kill()


@pytest.mark.slow  # a real dump and two restores
def test_restores_of_one_process_have_nothing_random_in_common(
    criu_binary: str, tmp_path: Path
) -> None:
    with FreezingShim({"app.py": UNIQUE}, function_spec()) as shim:
        frozen = dump(criu_binary, shim, tmp_path)
        lives = []
        for n in range(2):
            with restored(criu_binary, shim, frozen, tmp_path):
                lives.append(call(shim.start(f"i-{n}", op="serve")))
        for source in lives[0]:  # type: ignore[attr-defined]
            values = [json.dumps(life[source]) for life in lives]  # type: ignore[index]
            assert len(set(values)) == 2, (source, values)


def test_a_restored_process_is_told_what_its_monotonic_clock_missed(
    criu_binary: str, tmp_path: Path
) -> None:
    with FreezingShim({"app.py": FROZEN}, function_spec()) as shim:
        frozen = dump(criu_binary, shim, tmp_path)
        with restored(criu_binary, shim, frozen, tmp_path):
            answer = call(shim.start("i-1", op="fork"))  # a restored copy is a Template, too
            assert isinstance(answer, list)
            missed, told = answer
            assert told > 0
            assert told == pytest.approx(missed, abs=0.02)

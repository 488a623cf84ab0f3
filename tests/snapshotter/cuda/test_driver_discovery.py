"""The way to the driver is found, and when there is none it is said why."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from snapshotter.cuda.binary import BinaryDriver
from snapshotter.cuda.core import CoreDriver
from snapshotter.cuda.driver_discovery import DriverLookup, find_driver
from snapshotter.cuda.gpu_usage import CudaNode
from tests.snapshotter.cuda.standins import write_package, write_program

SH = "/usr/bin:/bin"


def node(release: int | None) -> CudaNode:
    return CudaNode(
        release=release, version=f"{release}.86.10" if release else "", gpus=(), mps=False
    )


async def found(
    folder: Path, release: int | None, *, path: str = "", **environ: str
) -> DriverLookup:
    return await find_driver(
        node=node(release),
        environ={"PATH": path, "PYTHONPATH": str(folder), "STANDIN_CUDA": str(folder), **environ},
        deadline_s=20,
    )


async def test_no_driver_at_all(tmp_path: Path) -> None:
    assert (await found(tmp_path, None)) == DriverLookup(
        driver=None, why="no NVIDIA driver is loaded on this node"
    )


async def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    assert (
        (await found(tmp_path, 550)).why
        == "the display driver is 550.86.10: checkpointing a GPU requires 555 or later, 570 for "
        "cuda.core"
    )


async def test_the_helper_is_preferred(tmp_path: Path) -> None:
    write_package(tmp_path)
    write_program(tmp_path)
    it = await found(tmp_path, 570, path=f"{tmp_path}:{SH}")
    assert isinstance(it.driver, CoreDriver)
    assert it.why == ""
    await it.driver.aclose()


@pytest.mark.parametrize(
    "release, reason",
    [
        (560, "it requires driver 570, this node has 560.86.10"),
        (570, "ModuleNotFoundError: No module named 'cuda"),
    ],
)
async def test_the_program_is_next_and_says_why_it_is_not_the_helper(
    tmp_path: Path, release: int, reason: str
) -> None:
    write_program(tmp_path)
    # in front of one that is installed
    (tmp_path / "cuda.py").write_text("raise ModuleNotFoundError(\"No module named 'cuda'\")")
    it = await found(tmp_path, release, path=f"{tmp_path}:{SH}")
    assert isinstance(it.driver, BinaryDriver)
    assert it.driver.name == "cuda-checkpoint 570.86.10"
    assert reason in it.why
    await it.driver.aclose()


async def test_a_driver_that_does_not_initialise_is_no_way(tmp_path: Path) -> None:
    write_package(tmp_path)
    it = await found(tmp_path, 570, STANDIN_CUINIT="100")
    assert it.driver is None
    assert "cuInit failed: 100" in it.why
    assert "cuda-checkpoint is not in PATH" in it.why


async def test_a_program_of_the_first_generation_is_no_way(tmp_path: Path) -> None:
    write_program(tmp_path, "#!/bin/sh\necho 'Version 550.54. --toggle --pid'\n")
    it = await found(tmp_path, 560, path=f"{tmp_path}:{SH}")
    assert it.driver is None
    assert "it does not support --action" in it.why


async def test_a_helper_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    it = await find_driver(
        node=node(570),
        environ={"PATH": "", "PYTHONPATH": str(tmp_path)},
        helper=(sys.executable, "-S", "-c", "import sys; sys.stdin.read()"),
        deadline_s=0.05,
    )
    assert it.driver is None
    assert "its helper was not ready within 0.05 s" in it.why


async def test_this_machine_answers_one_way_or_the_other() -> None:
    from snapshotter.cuda.gpu_usage import cuda_node

    it = await find_driver(node=cuda_node(), environ=os.environ)
    assert it.driver is not None or it.why
    if it.driver is not None:
        await it.driver.aclose()

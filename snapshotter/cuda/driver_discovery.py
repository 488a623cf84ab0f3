"""Selection of the CUDA driver implementation for this machine, or the reason why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.cuda.binary import BinaryDriver
from snapshotter.cuda.core import HELPER_COMMAND, CoreDriver
from snapshotter.cuda.driver import CudaDriver
from snapshotter.cuda.errors import DriverFailed
from snapshotter.cuda.gpu_blockers import API_RELEASE, BINARY_RELEASE
from snapshotter.cuda.gpu_usage import CudaNode

START_S = 30.0
"""For a first `cuInit`, which takes seconds if the driver is not kept loaded (no persistence
daemon)."""
_PROGRAM = "cuda-checkpoint"
_VERSION = re.compile(r"Version (\d+(?:\.\d+)+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLookup:
    """The driver, or None and the reason (`why`) with the remedy. The caller closes the driver."""

    driver: CudaDriver | None
    why: str


async def find_driver(
    *,
    node: CudaNode,
    environ: Mapping[str, str],
    helper: Sequence[str] = HELPER_COMMAND,
    deadline_s: float = START_S,
) -> DriverLookup:
    """Try cuda.core (a persistent helper), then the program; within twice `deadline_s`."""
    if node.release is None:
        return DriverLookup(driver=None, why="no NVIDIA driver is loaded on this node")
    if node.release < BINARY_RELEASE:
        why = (
            f"the display driver is {node.version}: checkpointing a GPU requires {BINARY_RELEASE} "
            f"or later, {API_RELEASE} for cuda.core"
        )
        return DriverLookup(driver=None, why=why)
    core, no_core = await _core(node, environ, helper, deadline_s)
    if core is not None:
        return DriverLookup(driver=core, why="")
    program, no_program = await _program(environ, deadline_s)
    if program is not None:
        return DriverLookup(driver=program, why=f"cuda.core is faster, but: {no_core}")
    return DriverLookup(
        driver=None,
        why=f"neither cuda.core ({no_core}) nor {_PROGRAM} ({no_program}) is usable: "
        f"pip install cuda-core, or install {_PROGRAM}",
    )


async def _core(
    node: CudaNode, environ: Mapping[str, str], command: Sequence[str], deadline_s: float
) -> tuple[CudaDriver | None, str]:
    if (node.release or 0) < API_RELEASE:
        return None, f"it requires driver {API_RELEASE}, this node has {node.version}"
    driver = CoreDriver(command=command, environ=environ)
    why = ""
    try:
        async with asyncio.timeout(deadline_s):
            await driver.start()
    except DriverFailed as e:
        why = str(e)
    except TimeoutError:
        why = f"its helper was not ready within {deadline_s:g} s"
    except asyncio.CancelledError:
        await driver.aclose()
        raise
    if not why:
        return driver, ""
    await driver.aclose()
    return None, why


async def _program(environ: Mapping[str, str], deadline_s: float) -> tuple[CudaDriver | None, str]:
    path = shutil.which(_PROGRAM, path=environ.get("PATH", ""))
    if path is None:
        return None, f"{_PROGRAM} is not in PATH"
    try:
        child = await asyncio.create_subprocess_exec(
            path,
            "--help",
            env=dict(environ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as e:
        return None, f"{path} cannot be run: {e.strerror}"
    try:
        async with asyncio.timeout(deadline_s):
            out = (await child.communicate())[0].decode(errors="replace")
    except TimeoutError:
        return None, f"{path} --help did not end within {deadline_s:g} s"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if "--action" not in out:
        return None, f"{path} is too old: it does not support --action"
    found = _VERSION.search(out)
    return BinaryDriver(Path(path), version=found.group(1) if found else "", environ=environ), ""

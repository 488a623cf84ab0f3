"""CRIU with its libraries in one directory, for use in a tenant's root file system: pods, and slots
of images with their own root file system.

CRIU runs as root there. The bundled loader executes it, ignoring the tenant's library cache and
plugin directories (ld.so(8), criu(8)); its PATH contains no program of the tenant."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from snapshotter.errors import Unsupported
from snapshotter.linux.atomic_directory import staged
from snapshotter.shim import child

_RECIPE = 3
"""Increment when the copied content changes."""
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$")


@dataclass(frozen=True, kw_only=True)
class CriuBundle:
    """`directory`: bound as NAME below a slot's root, where `child.CRIU_KIT` executes it."""

    NAME: ClassVar[str] = "criu"
    directory: Path


async def make_bundle(binary: Path, beside: Path) -> CriuBundle:
    """Copy `binary` and its libraries into a new directory below `beside`, unless it exists. Raises
    Unsupported, OSError."""
    status = binary.stat()
    directory = beside / f"kit-{_RECIPE}-{status.st_size:x}-{status.st_mtime_ns:x}"
    if not directory.exists():
        libraries = await _libraries(binary)
        loader = next((path for path in libraries if path.name.startswith("ld-")), None)
        if loader is None:
            raise Unsupported(
                f"{binary} has no dynamic loader: it is linked in a way that a pod cannot use"
            )
        await asyncio.to_thread(_copy, binary, loader, libraries, directory)
    return CriuBundle(directory=directory)


async def _libraries(binary: Path) -> list[Path]:
    process = await asyncio.create_subprocess_exec(
        "ldd",
        str(binary),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    found = [
        Path(match[1])
        for line in out.decode(errors="replace").splitlines()
        if (match := _LIBRARY.match(line))
    ]
    if process.returncode or not found:
        raise Unsupported(
            f"ldd cannot list the libraries of {binary}: "
            f"{out.decode(errors='replace').strip()[-200:]}"
        )
    return found


def _copy(binary: Path, loader: Path, libraries: list[Path], directory: Path) -> None:
    with staged(directory) as temp:
        (temp / child.KIT_PLUGINS).mkdir(mode=0o700)
        for source, name in (
            (binary, "criu"),
            (loader, child.KIT_LOADER),
            *((path, path.name) for path in libraries),
        ):
            shutil.copyfile(source.resolve(), temp / name)
            (temp / name).chmod(0o500)  # executable by root only

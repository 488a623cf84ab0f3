"""The Python interpreters installed on this machine.

An interpreter is identified by what it reports, not by its path: a name on PATH may belong to a
virtual environment or be a version manager's shim. The result is the underlying installation, its
prefix and executable, which slots bind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import Unsupported
from snapshotter.images.spec import OLDEST_PYTHON
from snapshotter.linux.short_commands import run_command

_ASK = "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix, sep='\\n')"
_ASK_TIMEOUT_S = 10.0
"""A version manager's shim answers in 0.1 s; anything much slower is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """One installation: `version` such as "3.11", `prefix` its root, `executable` below it (the
    real binary, no shim, no environment)."""

    version: str
    prefix: Path
    executable: Path


def own_interpreter() -> Interpreter:
    """The installation that runs this process."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    return Interpreter(
        version=version, prefix=prefix, executable=prefix / "bin" / f"python{version}"
    )


async def find_interpreter(version: str, environ: Mapping[str, str]) -> Interpreter:
    """The best interpreter of `version`: the platform's own, then PATH, then pyenv's. Raises
    Unsupported with the installed versions."""
    found = await _find(version, environ)
    if found is not None:
        return found
    own = own_interpreter()
    there = ", ".join(
        sorted({i.version for i in await installed_interpreters(environ)}, key=_as_numbers)
    )
    raise Unsupported(
        f"no Python {version} on this machine; installed: {there}. Use "
        f"Image.python({own.version!r}), or install python{version} on PATH",
        {"wanted": version, "found": there.split(", ")},
    )


async def installed_interpreters(environ: Mapping[str, str]) -> list[Interpreter]:
    """The installed interpreters that an image may use, one per version: the platform's own first,
    then the newest."""
    own = own_interpreter()
    named = {c.name.removeprefix("python") for c in _candidates("python3.*", environ)}
    usable = [
        version
        for version in sorted(named, key=_as_numbers, reverse=True)
        if version != own.version and _as_numbers(version) >= OLDEST_PYTHON
    ]
    found = await asyncio.gather(*(_find(version, environ) for version in usable))
    return [own, *(interpreter for interpreter in found if interpreter is not None)]


async def _find(version: str, environ: Mapping[str, str]) -> Interpreter | None:
    """The best interpreter of `version`; None if there is none."""
    own = own_interpreter()
    if own.version == version:
        return own
    for candidate in _candidates(f"python{version}", environ):
        found = await _probe(candidate)
        if found is not None and found.version == version:
            return found
    return None


def _candidates(pattern: str, environ: Mapping[str, str]) -> list[Path]:
    """Executables matching `pattern`, without pyenv's shims, which run the selected version and not
    the one in their name."""
    folders = [
        Path(p)
        for p in environ.get("PATH", os.defpath).split(os.pathsep)
        if p and not p.endswith("shims")
    ]
    pyenv = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME", "/nonexistent")) / ".pyenv")
    folders += sorted(pyenv.glob("versions/*/bin"), reverse=True)
    matches = (m for folder in folders for m in sorted(folder.glob(pattern)))
    return [
        m for m in matches if m.name.removeprefix("python3.").isdigit() and os.access(m, os.X_OK)
    ]


async def _probe(candidate: Path) -> Interpreter | None:
    """What `candidate` reports about itself; None if it does not run or its installation is
    incomplete."""
    try:
        status, out = await run_command(candidate, "-I", "-S", "-c", _ASK, timeout_s=_ASK_TIMEOUT_S)
    except OSError:  # TimeoutError too
        return None
    lines = out.decode(errors="replace").splitlines()
    if status != 0 or len(lines) != 2:
        return None
    executable = Path(lines[1]) / "bin" / f"python{lines[0]}"
    return (
        Interpreter(version=lines[0], prefix=Path(lines[1]), executable=executable)
        if executable.exists()
        else None
    )


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

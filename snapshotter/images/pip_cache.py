"""A cache of pip as `venv` installs it, one per interpreter: creating it takes 3 s of CPU time,
copying it 0.1 s.

It is stored in the cache of the agent's user ($XDG_CACHE_HOME, XDG base directory specification)
and created by the platform from the wheel bundled with the interpreter (ensurepip, Python's
documentation). Builds copy it and never write to it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from pilotlight.core.threads import finish_in_thread
from snapshotter.images.interpreters import Interpreter
from snapshotter.linux.atomic_directory import expose, remove_tree, staged_in_thread, sweep

_log = logging.getLogger(__name__)
_TIMEOUT_S = 120.0


async def pip_of(interpreter: Interpreter, environ: Mapping[str, str]) -> Path | None:
    """A directory with pip's files for `site-packages`; None if it cannot be created or cached, in
    which case a build installs its own."""
    try:
        kept = _cache(environ) / f"pip-{_key(interpreter)}"
        if not kept.exists():
            await asyncio.to_thread(sweep, kept.parent)
            async with staged_in_thread(kept) as temp:
                await _make(interpreter, temp)
        return kept if _is_ours(kept) else None
    except (OSError, TimeoutError) as e:
        _log.info("pip.not_kept python=%s error=%s", interpreter.version, e)
        return None


def lend(pip: Path, to: Path) -> None:
    """Copy the cached pip to `to`, as hard links where the file system supports them. Blocking.
    Raises OSError."""
    shutil.copytree(pip, to, copy_function=_link)


async def _make(interpreter: Interpreter, into: Path) -> None:
    scratch = into / "venv"
    command = (str(interpreter.executable), "-I", "-m", "venv", str(scratch))
    environ = {"PATH": os.defpath, "HOME": str(into), "LANG": "C.UTF-8"}
    nothing = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(
        *command, cwd="/", env=environ, stdin=nothing, stdout=nothing, stderr=nothing
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status = await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    found = [
        *scratch.glob("lib/python*/site-packages/pip"),
        *scratch.glob("lib/python*/site-packages/pip-*.dist-info"),
    ]
    if status != 0 or len(found) != 2:
        raise OSError(
            f"python -m venv exited with status {status} and created {len(found)} of pip's two "
            f"directories"
        )
    for directory in found:
        directory.rename(into / directory.name)
    await finish_in_thread(remove_tree, scratch)
    await finish_in_thread(expose, into)


def _cache(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/root")) / ".cache"
    return Path(base) / "pilotlight"


def _key(interpreter: Interpreter) -> str:
    status = interpreter.executable.stat()
    what = f"{interpreter.executable} {interpreter.version} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def _is_ours(kept: Path) -> bool:
    """Whether no other user can have written to it."""
    status = kept.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or the maximum number of links
        shutil.copy2(source, target, follow_symlinks=False)

"""Where an image's steps run: as the tenant's uid, seeing the image at its final place and nothing of the platform.

With a uid (root only) every command gets a box of its own namespaces (`snapshotter/boxed.py`); without one it runs as the
agent's user, on the real paths, because there is nobody else to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.buildbounds import Enclosure
from snapshotter.interpreters import Interpreter

SLOT_ROOT = Path("/run/pilotlight/slot")
"""Where workers find their world (docs/architecture.md); builds use the same places, so that paths written into an image hold."""
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_LINE_BYTES = 64 * 1024
_CHILD = Path(__file__).with_name("boxed.py")

OnLine = Callable[[str], Awaitable[None]]
"""Receives one line of output, without its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBox:
    """A place for commands.

    Attributes:
        interpreter: the installation that the image is made for.
        image: host directory with `env/`, `files/` and `tmp/`, which the commands may write.
        uid: uid and gid of the commands; None keeps our own and makes no namespaces.
        enclosure: what the commands may take.
    """

    interpreter: Interpreter
    image: Path
    uid: int | None
    enclosure: Enclosure = field(default_factory=Enclosure)

    @property
    def python(self) -> Path:
        """The interpreter's executable as the commands see it."""
        inside = self.interpreter.executable.relative_to(self.interpreter.prefix)
        return self.interpreter.executable if self.uid is None else SLOT_ROOT / "python" / inside

    @property
    def env(self) -> Path:
        """The virtual environment as the commands see it."""
        return self.image / "env" if self.uid is None else SLOT_ROOT / "env"

    @property
    def files(self) -> Path:
        """The copied files, the working directory, as the commands see them."""
        return self.image / "files" if self.uid is None else SLOT_ROOT / "files"

    @property
    def tmp(self) -> Path:
        """The scratch directory as the commands see it."""
        return self.image / "tmp" if self.uid is None else Path("/tmp")  # private in the box

    def prepare(self) -> None:
        """Make the directories, owned by whoever runs the commands."""
        for name in ("env", "files", "tmp"):
            (self.image / name).mkdir(mode=0o755)
            self.give(name)

    def give(self, name: str) -> None:
        """Hand over to the commands' uid what we made at `name` below the image, and only we: links of theirs are not ours to give."""
        if self.uid is None:
            return
        top = self.image / name
        entries = [top, *(Path(folder, e) for folder, folders, files in os.walk(top) for e in [*folders, *files])]
        for entry in entries:
            os.chown(entry, self.uid, self.uid, follow_symlinks=False)

    async def run(self, argv: Sequence[str], *, variables: Mapping[str, str], on_line: OnLine) -> int:
        """Run one command to its end and return its exit status. Cancelling it kills everything that it started."""
        return await _obey(self._order(argv, variables), on_line)

    def _order(self, argv: Sequence[str], variables: Mapping[str, str]) -> Mapping[str, object]:
        binds = [
            (str(self.interpreter.prefix), str(SLOT_ROOT / "python"), False),
            (str(self.image / "env"), str(self.env), True),
            (str(self.image / "files"), str(self.files), True),
            (str(self.image / "tmp"), str(self.tmp), True),
        ]
        return {
            "parent": os.getpid(),
            "uid": self.uid,
            "root": str(SLOT_ROOT),
            "binds": binds,
            "cwd": str(self.files),
            "argv": list(argv),
            "environ": {**self._variables(), **variables},
            **self.enclosure.order(),
        }

    def _variables(self) -> dict[str, str]:
        out = {"PATH": f"{self.env}/bin:{self.python.parent}:{_SYSTEM_PATH}", "HOME": str(self.tmp), "TMPDIR": str(self.tmp)}
        out |= {"LANG": "C.UTF-8", "VIRTUAL_ENV": str(self.env), "PYTHONUNBUFFERED": "1"}
        if self.uid is not None and any(self.interpreter.prefix.glob("lib/libpython3*.so*")):
            out["LD_LIBRARY_PATH"] = str(SLOT_ROOT / "python" / "lib")  # its RPATH names the prefix on the host
        return out


async def run_on_machine(argv: Sequence[str], *, variables: Mapping[str, str], on_line: OnLine) -> int:
    """Run one command on the machine itself, as our own user and in nobody's environment, to its end even when cancelled."""
    environ = {"PATH": _SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", **variables}
    order = {"parent": None, "uid": None, "cwd": "/", "argv": list(argv), "environ": environ}
    job = asyncio.create_task(_obey(order, on_line), name=f"run {argv[0]}")
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])  # a package manager that is killed leaves a broken machine
        raise


async def _obey(order: Mapping[str, object], on_line: OnLine) -> int:
    """Start the child's half with its order, pass on its output, return its exit status."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", "-B", str(_CHILD)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,
    )
    assert child.stdin is not None  # asked for above
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
        while (line := await _read_line(child.stdout)) is not None:
            await on_line(line)
        return await child.wait()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _read_line(stream: asyncio.StreamReader) -> str | None:
    """The next line; one that is longer than the limit comes in pieces. None at the end."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        raw = e.partial
    except asyncio.LimitOverrunError as e:
        raw = await stream.readexactly(e.consumed or 1)
    return raw.decode(errors="replace").rstrip("\r\n") if raw else None

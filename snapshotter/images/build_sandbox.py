"""The sandbox of an image's build steps: they run as the tenant's uid and see the image at its
final path, and nothing of the platform.

With a uid (root only) every command gets its own namespaces (`sandbox_child.py`); without one it
runs as the agent's user, on the real paths. In an image with its own root file system the commands
run as root of a user namespace, with ids that are unused on the machine.

In the directory of an image being built, the commands' uid owns `env`, `files`, `tmp` and `rootfs`,
and the agent writes to none of them while commands can. Input for the commands (pip's
configuration, archives to copy) is in `given`, which the agent owns and the commands can only
read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.core.image_steps import ABSOLUTE
from snapshotter.images.build_limits import LimitedGroup
from snapshotter.images.build_network import Joined
from snapshotter.images.build_output import MAX_LINE_BYTES, Output
from snapshotter.images.interpreters import Interpreter
from snapshotter.images.pip_config import GLOBAL_FILES
from snapshotter.shim.sandbox import isolation

SLOT_ROOT = Path("/run/pilotlight/slot")
"""Paths that workers see (docs/reference/internals/slot.md). Builds use the same ones, so that
paths written into an image stay valid."""
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BATCH_LINES = 100
"""Lines passed on at a time; the event loop runs other tasks between two batches."""
_PAUSE_S = 0.01
"""Between two blocks of a command that prints more than is passed on, which limits it to some 10
MB/s at negligible cost."""
_END_TIMEOUT_S = 10.0
_WRITABLE, _GIVEN, _RESOLVER = ("env", "files", "tmp"), "given", "resolv.conf"
_CHILD = Path(__file__).with_name("sandbox_child.py")

OnLines = Callable[[Sequence[str]], Awaitable[None]]
"""Receives lines of output, without line ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSandbox:
    """A sandbox for commands.

    Attributes:
        interpreter: the installation that the image is built for: of this machine, or in the
            image's own root file system.
        image: host directory with `env/`, `files/` and `tmp/`, which the commands may write, and
            `given/`, which they may read.
        uid: uid and gid of the commands; None: the agent's own, without namespaces.
        ids: if set, the image has its own root file system, `rootfs` in its directory, and the
            commands run as its root.
        lent: paths of this machine that the commands can read besides its programs and settings:
            directories at their own paths, because indexes and pages of links contain
            relative links; files at other paths.
        enclosure: the resource limits of the commands.
        network: their network; without a uid the host's.
        links: names in the root directory that lead to copied files of absolute paths
            (`pilotlight.core.image_steps`); ignored without a uid, and in a root file system of the
            image's own, which has the files themselves.
    """

    interpreter: Interpreter
    image: Path
    uid: int | None
    ids: range | None = None
    lent: tuple[Path, ...] = ()
    enclosure: LimitedGroup = field(default_factory=LimitedGroup)
    network: Joined = field(default_factory=Joined)
    links: tuple[str, ...] = ()

    @property
    def has_own_python(self) -> bool:
        """Whether the interpreter is in the image's own root file system."""
        return self.ids is not None and self.interpreter.prefix.is_relative_to(self.rootfs)

    @property
    def python(self) -> Path:
        """The path of the interpreter's executable in the sandbox."""
        if self.has_own_python:
            return Path("/") / self.interpreter.executable.relative_to(self.rootfs)
        inside = self.interpreter.executable.relative_to(self.interpreter.prefix)
        return self.interpreter.executable if self.uid is None else SLOT_ROOT / "python" / inside

    @property
    def env(self) -> Path:
        """The path of the virtual environment in the sandbox."""
        return self.image / "env" if self.uid is None else SLOT_ROOT / "env"

    @property
    def files(self) -> Path:
        """The path in the sandbox of the copied files, which is the working directory."""
        return self.image / "files" if self.uid is None else SLOT_ROOT / "files"

    @property
    def tmp(self) -> Path:
        """The path of the scratch directory in the sandbox."""
        return self.image / "tmp" if self.uid is None else Path("/tmp")  # private in the sandbox

    @property
    def given(self) -> Path:
        """The path in the sandbox of the input for the commands."""
        return self.image / _GIVEN if self.uid is None else SLOT_ROOT / _GIVEN

    @property
    def rootfs(self) -> Path:
        """The host directory of its root file system."""
        return self.image / "rootfs"

    @property
    def owners(self) -> range | None:
        """Uids of the files that commands create; None without a uid."""
        return (
            self.ids if self.ids is not None or self.uid is None else range(self.uid, self.uid + 1)
        )

    def prepare(self) -> None:
        """Create the directories: three owned by the commands' user, and one by the agent."""
        for name in (*_WRITABLE, _GIVEN):
            (self.image / name).mkdir(mode=0o755)
            (self.image / name).chmod(0o755)  # regardless of our umask
        if self.uid is not None:
            owner = self.uid if self.ids is None else self.ids.start
            for name in _WRITABLE:
                os.chown(self.image / name, owner, owner, follow_symlinks=False)
            (self.image / "tmp").chmod(0o1777)  # several users of an image may use it
            if self.network.name_servers is not None:
                self.give(_RESOLVER, self.network.name_servers)

    def as_seen(self, text: str) -> str:
        """`text`, with lent paths replaced by their paths in the sandbox."""
        for path, place in self._lent_files():
            text = text.replace(str(path), place)
        return text

    def _lent_files(self) -> list[tuple[Path, str]]:
        return [
            (path, str(SLOT_ROOT / f"lent-{i}"))
            for i, path in enumerate(self.lent)
            if not path.is_dir()
        ]

    def give(self, name: str, text: str) -> Path:
        """Write a file for the commands to read; returns its path in the sandbox."""
        file = self.image / _GIVEN / name
        file.write_text(text)
        file.chmod(0o644)
        return self.given / name

    async def run(
        self, argv: Sequence[str], *, variables: Mapping[str, str], on_lines: OnLines
    ) -> int:
        """Run one command to completion and return its exit status. All processes it started are
        dead then, also when this is cancelled."""
        namespace = self.network.namespace if self.uid is not None else None
        try:
            return await _obey(
                self._order(argv, variables),
                on_lines,
                fds=() if namespace is None else (namespace,),
            )
        finally:
            self.enclosure.group.kill()

    def _order(self, argv: Sequence[str], variables: Mapping[str, str]) -> Mapping[str, object]:
        own = (str(self.interpreter.prefix), str(SLOT_ROOT / "python"), False)
        binds = [
            # not one of the image itself: steps could have replaced it by a link
            *(() if self.has_own_python else (own,)),
            (str(self.image / "env"), str(self.env), True),
            (str(self.image / "files"), str(self.files), True),
            (str(self.image / _GIVEN), str(self.given), False),
            *((str(path), place, False) for path, place in self._lent_files()),
            (str(self.image / "tmp"), str(self.tmp), True),  # last: it hides the host's /tmp
        ]
        has_resolver = self.uid is not None and self.network.name_servers is not None
        return {
            "parent": os.getpid(),
            "uid": self.uid,
            "root": str(SLOT_ROOT),
            "rootfs": None if self.ids is None else str(self.rootfs),
            "ids": None if self.ids is None else (self.ids.start, len(self.ids)),
            "binds": binds,
            "links": {name: f"{self.files}/{ABSOLUTE}/{name}" for name in self.links},
            "lent": [
                str(path)
                for path in self.lent
                if path.is_dir()
                and not path.is_relative_to("/etc")
                and not path.is_relative_to("/usr")
            ],
            "network": self.network.namespace,
            "resolver": str(self.given / _RESOLVER) if has_resolver else None,
            "hidden": [str(file) for file in GLOBAL_FILES],
            "cwd": str(self.files),
            "argv": list(argv),
            "environ": {**self._variables(), **variables},
            "filter": self._filter(),
            **self.enclosure.order(),
        }

    def _filter(self) -> str:
        """The system call filter for commands without root; "": none."""
        machine = os.uname().machine
        if self.uid is None or not isolation.has_filter(machine):
            return ""
        return isolation.filter_program(
            machine, unix_sockets=False, more=() if self.ids is None else ("chroot",)
        ).hex()

    def _variables(self) -> dict[str, str]:
        out = {
            "PATH": f"{self.env}/bin:{self.python.parent}:{_SYSTEM_PATH}",
            "HOME": str(self.tmp),
            "TMPDIR": str(self.tmp),
        }
        out |= {"LANG": "C.UTF-8", "VIRTUAL_ENV": str(self.env), "PYTHONUNBUFFERED": "1"}
        if (
            self.uid is not None
            and not self.has_own_python
            and any(self.interpreter.prefix.glob("lib/libpython3*.so*"))
        ):
            # its RPATH names the prefix on the host
            out["LD_LIBRARY_PATH"] = str(SLOT_ROOT / "python" / "lib")
        return out


async def run_on_machine(
    argv: Sequence[str], *, variables: Mapping[str, str], on_lines: OnLines
) -> int:
    """Run one command on the machine itself, as our own user and with a clean environment, to
    completion even when cancelled."""
    environ = {"PATH": _SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", **variables}
    order = {
        "parent": None,
        "uid": None,
        "cwd": "/",
        "argv": list(argv),
        "environ": environ,
        "filter": "",
    }
    job = asyncio.create_task(_obey(order, on_lines), name=f"run {argv[0]}")
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])  # killing a package manager leaves the machine broken
        raise


async def _obey(order: Mapping[str, object], on_lines: OnLines, *, fds: Sequence[int] = ()) -> int:
    """Start the child process with its order, pass on its output, and return its exit status."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", "-B", str(_CHILD)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
        pass_fds=fds,
    )
    assert child.stdin is not None  # requested above
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
        await _pass_on(child.stdout, on_lines)
        return await child.wait()
    finally:
        if child.returncode is None:
            await asyncio.shield(
                asyncio.create_task(
                    _end(child, is_watched=order["parent"] is not None), name=f"end {child.pid}"
                )
            )


async def _end(child: asyncio.subprocess.Process, *, is_watched: bool) -> None:
    """Kill a command and all its descendants. A watched child kills them on SIGTERM and exits after
    the last one."""
    if is_watched:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            child.terminate()
            async with asyncio.timeout(_END_TIMEOUT_S):
                await child.wait()
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _pass_on(stream: asyncio.StreamReader, on_lines: OnLines) -> None:
    """Pass on all output until its end. Yields to the event loop after each block, because reading
    buffered data does not suspend."""
    output = Output(now=time.monotonic())
    while block := await stream.read(MAX_LINE_BYTES):
        await _hand_out(output.feed(block, now=time.monotonic()), on_lines)
        await asyncio.sleep(_PAUSE_S if output.is_flooded else 0)
    await _hand_out(output.end(), on_lines)


async def _hand_out(lines: Sequence[str], on_lines: OnLines) -> None:
    for at in range(0, len(lines), _BATCH_LINES):
        await on_lines(lines[at : at + _BATCH_LINES])
        await asyncio.sleep(0)

"""Commands in a sandbox, with their output.

Output waits in memory until its reader has taken it, UNREAD_BYTES of each stream; then the command
waits in its next write, as with a full pipe. A reader names the offset from which it reads, which
drops what is before: an answer that was lost can be asked for again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.sandboxes import PIECE_BYTES, UNREAD_BYTES

STRAGGLE_S = 0.2
"""How long the output of a command that has ended is read on, while other processes that it started
have it open and write nothing."""
TIMED_OUT = 124
"""Return code of a command that exceeded its time, as of timeout(1)."""


class Output:
    """One stream of a command. Owner: the event loop.

    Attributes:
        is_ended: nothing follows what is kept.
    """

    def __init__(self) -> None:
        self._first = 0
        self._kept = bytearray()
        self.is_ended = False

    def __repr__(self) -> str:
        return f"<Output {self._first}+{len(self._kept)} {'ended' if self.is_ended else 'open'}>"

    @property
    def end(self) -> int:
        """Number of bytes that were written so far."""
        return self._first + len(self._kept)

    @property
    def is_full(self) -> bool:
        """Whether its reader has to take something first."""
        return len(self._kept) >= UNREAD_BYTES

    def append(self, data: bytes) -> None:
        """Keep what the command wrote."""
        self._kept += data

    def read(self, offset: int) -> bytes:
        """Return up to PIECE_BYTES from `offset` on, and drop what is before. Raises
        InvalidInput."""
        if not self._first <= offset <= self.end:
            raise InvalidInput(
                f"output from byte {offset}: bytes {self._first} to {self.end} are kept, those "
                f"before were read already",
                parameter="offset",
            )
        del self._kept[: offset - self._first]
        self._first = offset
        return bytes(self._kept[:PIECE_BYTES])

    def unread(self) -> bytes:
        """Return all that is kept."""
        return bytes(self._kept)


class SandboxProcess(asyncio.SubprocessProtocol):
    """One command. Owner: the event loop.

    Attributes:
        returncode: None while it runs; 128 + the number of the signal that ended it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.stdout, self.stderr = Output(), Output()
        self._outputs = {1: self.stdout, 2: self.stderr}
        self.returncode: int | None = None
        self._transport: Any = None
        """asyncio.SubprocessTransport, or uvloop's, which is not a subclass."""
        self._is_late = False
        self._is_stdin_open = True
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"ended {self.returncode}"
        return f"<SandboxProcess {self.number} {state}>"

    @classmethod
    async def start(
        cls, number: int, args: Sequence[str], *, workdir: str, env: Mapping[str, str]
    ) -> SandboxProcess:
        """Execute a command in a session of its own. Raises OSError, ValueError."""
        loop = asyncio.get_running_loop()
        _, process = await loop.subprocess_exec(
            lambda: cls(number), *args, cwd=workdir, env=dict(env), start_new_session=True
        )
        return process

    # -- asyncio.SubprocessProtocol ----------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It runs."""
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """It wrote something."""
        output = self._outputs[fd]
        output.append(data if isinstance(data, bytes) else data.encode())
        if output.is_full:
            self._transport.get_pipe_transport(fd).pause_reading()
        self._notify()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """One of its streams was closed."""
        if fd in self._outputs:
            self._outputs[fd].is_ended = True
        else:
            self._is_stdin_open = False
            self._writable.set()
        if self.is_ended:
            self._transport.close()
        self._notify()

    def process_exited(self) -> None:
        """It has ended."""
        code = self._transport.get_returncode()
        self.returncode = TIMED_OUT if self._is_late else code if code >= 0 else 128 - code
        if self.is_ended:
            self._transport.close()
        else:
            self._drain_output(-1)
        self._notify()

    def pause_writing(self) -> None:
        """It does not read its standard input."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It reads again."""
        self._writable.set()

    # -- requests ----------------------------------------------------------------------------------
    @property
    def is_ended(self) -> bool:
        """Whether it has ended, and its output too."""
        return self.returncode is not None and self.stdout.is_ended and self.stderr.is_ended

    def kill(self, *, is_late: bool = False) -> None:
        """Kill it with its session. `is_late`: it exceeded its time."""
        if self.returncode is None:
            self._is_late = is_late
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def read(self, stdout: int, stderr: int) -> tuple[bytes, bytes]:
        """Return what follows these offsets (`Output.read`). Raises InvalidInput."""
        found = self.stdout.read(stdout), self.stderr.read(stderr)
        for fd, output in self._outputs.items():
            if not output.is_full and not output.is_ended:
                self._transport.get_pipe_transport(fd).resume_reading()
        return found

    async def wait(self) -> int:
        """Return the return code, once it and its output have ended."""
        while not self.is_ended:
            await self._changed.wait()
        assert self.returncode is not None
        return self.returncode

    async def wait_output(self, stdout: int, stderr: int, wait_s: float) -> None:
        """Return once there is output behind these offsets, or it has ended, and after `wait_s` at
        the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (self.is_ended or self.stdout.end > stdout or self.stderr.end > stderr):
                    await self._changed.wait()

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """Write to its standard input, once it reads. Raises InvalidInput if that is closed."""
        await self._writable.wait()
        if not self._is_stdin_open:
            raise InvalidInput(
                f"command {self.number} no longer reads standard input", parameter="process"
            )
        pipe = self._transport.get_pipe_transport(0)
        pipe.write(data)
        await self._writable.wait()
        if is_last:
            self._is_stdin_open = False
            pipe.close()

    def _drain_output(self, before: int) -> None:
        """Read on after its end, until its streams are closed, or nothing has come for
        STRAGGLE_S."""
        written = self.stdout.end + self.stderr.end
        is_waiting = self.stdout.is_full or self.stderr.is_full
        if written == before and not is_waiting:
            self.stdout.is_ended = self.stderr.is_ended = True
            self._transport.close()
            self._notify()
        elif not self.is_ended:
            loop = asyncio.get_running_loop()
            loop.call_later(STRAGGLE_S, self._drain_output, written)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

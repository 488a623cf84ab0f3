"""Starts, watches and stops one supervised process.

The process reports readiness by writing a newline to an inherited descriptor (`--ready-fd N`). It
is watched through a pidfd, so nothing polls and no SIGCHLD handler is shared. The kernel stops it
when its supervisor dies (`PR_SET_PDEATHSIG`, prctl(2)). What a killed supervisor leaves all the
same, such as slots, `pilotlight down` ends, or the next node agent adopts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotlight.cli.supervisor.process_log import ProcessLog
from pilotlight.core import pid_file
from pilotlight.core.transport.public_listener import AddressInUse, open_listeners
from pilotlight.errors import PilotlightError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_TAIL_LINES = 20
_LAST_WORDS = 300
"""Characters of the last log line in an error message."""


class ProcessFailed(PilotlightError):
    """Raised when a process did not become ready. The message ends with its last log line; `detail`
    has `process`, `log_tail` and `log`."""

    type = "process-failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to supervise: its command, timeouts and sockets.

    Attributes:
        name: base name of the pid file and the log file. argv: the command; `--ready-fd N` is
        appended. ready_timeout_s: from spawn to the newline. grace_s: from SIGTERM to SIGKILL.
        listen: `host:port` of sockets opened for a start and passed as `--listen-fd N`; None =
        none. keeps_listeners: the sockets of `listen` stay open until a start fails or the process
        is stopped, so that connections made while it is restarted wait for it; False: new ones at
        each start, for a process beside which others listen at the same address. listen_fds:
        further sockets, owned by the supervisor and the same at each start.
        niceness: of the process's session relative to others (sched(7), "The autogroup feature");
        a negative value gives it priority and requires root.
    """

    name: str
    argv: tuple[str, ...]
    ready_timeout_s: float = 60.0
    grace_s: float = 30.0
    listen: str | None = None
    keeps_listeners: bool = False
    listen_fds: tuple[int, ...] = ()
    niceness: int = 0


class Child:
    """One supervised process. Owner: the supervisor's event loop; every method runs there, so no
    lock is needed."""

    def __init__(self, spec: ProcessSpec, *, run: Path, log: ProcessLog) -> None:
        self.spec = spec
        self.log = log
        self._pid_file = run / f"{spec.name}.pid"
        self._process: subprocess.Popen[bytes] | None = None
        self._gone: asyncio.Future[int] | None = None
        self._listeners: list[socket.socket] = []

    def __repr__(self) -> str:
        return f"<Child {self.spec.name} {f'pid {self.pid}' if self.is_alive else 'down'}>"

    @property
    def pid(self) -> int:
        """Pid of the process, 0 if it is not running."""
        return self._process.pid if self._process is not None and self.is_alive else 0

    @property
    def is_alive(self) -> bool:
        """True from spawn until the process is reaped."""
        return self._gone is not None and not self._gone.done()

    async def start(self) -> float:
        """Spawn the process and wait until it is ready; return the seconds it took. Raises
        ProcessFailed. Leaves nothing running on failure."""
        began = time.monotonic()
        offset = 0 if self.log.rotate() else self.log.size()
        ready = self._spawn()
        try:
            async with asyncio.timeout(self.spec.ready_timeout_s):
                said = await _newline(ready)
        except TimeoutError:
            await self.stop(grace_s=2)
            raise self._failed(
                f"was not ready within {self.spec.ready_timeout_s:g} s", offset
            ) from None
        except BaseException:
            await asyncio.shield(self.stop(grace_s=2))
            raise
        finally:
            os.close(ready)
        if not said:
            await self.stop(grace_s=2)
            raise self._failed(
                f"exited while starting ({describe_exit_status(self._status())})", offset
            )
        return time.monotonic() - began

    async def wait_gone(self) -> int:
        """Wait until the process ends; return its exit status, negative for a signal."""
        return 0 if self._gone is None else await asyncio.shield(self._gone)

    async def stop(self, *, grace_s: float | None = None) -> int:
        """Send SIGTERM, then SIGKILL after the grace period; return the exit status. Idempotent."""
        self._close_listeners()  # from here on, only a process that accepts has connections
        if self._gone is None or self._process is None:
            return 0
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.grace_s if grace_s is None else grace_s):
                return await self.wait_gone()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait_gone()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process is not running. This class reaps it, so the
        pid cannot belong to another process."""
        if self.is_alive and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _spawn(self) -> int:
        read_end, write_end = os.pipe()
        output = self.log.open()
        try:
            if self.spec.listen is not None and not self._listeners:
                self._listeners = open_listeners(self.spec.listen, is_shared=True)
            passed = (*(each.fileno() for each in self._listeners), *self.spec.listen_fds)
            given = [word for descriptor in passed for word in ("--listen-fd", str(descriptor))]
            self._process = subprocess.Popen(
                [*self.spec.argv, *given, "--ready-fd", str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_end, *passed),
                # only the supervisor receives Ctrl-C; it stops the processes in order
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - one system call, no lock is taken between fork and exec
            )
        except AddressInUse as e:
            os.close(read_end)
            raise ProcessFailed(
                f"{self.spec.name} cannot listen on {e.strerror}",
                process=self.spec.name,
                log_tail=[],
                log=str(self.log.path),
            ) from e
        except BaseException:
            os.close(read_end)
            self._close_listeners()
            raise
        finally:
            if not self.spec.keeps_listeners:
                # the kernel would give them connections that another process can accept
                self._close_listeners()
            os.close(output)
            os.close(write_end)
        if self.spec.niceness:
            # fails without root or autogroup, or if the process has ended (`start` reports it)
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_text(str(self.spec.niceness))
        pid_file.write(self._pid_file, self._process.pid)
        self._watch(self._process)
        return read_end

    def _close_listeners(self) -> None:
        for each in self._listeners:
            each.close()
        self._listeners = []

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[int] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._pid_file.unlink(missing_ok=True)
            gone.set_result(process.wait())

        loop.add_reader(pidfd, reap)
        self._gone = gone

    def _status(self) -> int:
        return self._gone.result() if self._gone is not None and self._gone.done() else 0

    def _failed(self, what: str, offset: int) -> ProcessFailed:
        tail = self.log.tail(_TAIL_LINES, since_byte=offset)
        last = f": {tail[-1].strip()[:_LAST_WORDS]}" if tail else ""
        return ProcessFailed(
            f"{self.spec.name} {what}{last}",
            process=self.spec.name,
            log_tail=tail,
            log=str(self.log.path),
        )


def describe_exit_status(status: int) -> str:
    """Format an exit status: `exit status 3`, or `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _die_with(parent: int) -> Callable[[], None]:
    def apply() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return apply


async def _newline(descriptor: int) -> bool:
    """Wait for a newline; False if all writers close the descriptor without one."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def readable() -> None:
        data = os.read(descriptor, 64)
        if not answer.done() and (not data or b"\n" in data):
            answer.set_result(bool(data))

    loop.add_reader(descriptor, readable)
    try:
        return await answer
    finally:
        loop.remove_reader(descriptor)

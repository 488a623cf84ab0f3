"""The engine's process tree: started in a process group below the worker, watched, and ended
together.

The server's stdout and stderr are one pipe, which a thread copies line by line to the worker's
stdout, so that the lines belong to the instance once the worker has become one; the last lines are
quoted when the engine dies. Owner: the worker's main thread; the copying thread only appends to
`_last`."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

from pilotlight.worker.engine.errors import EngineDied
from pilotlight.worker.snapshot.processes import descendants, process_name

_LAST_LINES = 20
_PIECE = 65536


class ProcessTree:
    """A running engine. `pid` is the server's; the other processes are its children."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, directory: str
    ) -> None:
        """Start it. Raises OSError."""
        readable, writable = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=writable,
                stderr=writable,
                process_group=0,
            )
        except OSError:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        self._last: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self._copying = threading.Thread(
            target=self._copy, args=(readable,), name="engine output", daemon=True
        )
        self._copying.start()

    def __repr__(self) -> str:
        return f"<ProcessTree pid={self.pid} status={self._process.poll()}>"

    @property
    def pid(self) -> int:
        """Pid of the server."""
        return self._process.pid

    def names(self) -> list[str]:
        """All processes, as `name (pid)`, parents first."""
        return [process_name(pid) for pid in (self.pid, *descendants(self.pid))]

    def wait_end(self, within_s: float) -> bool:
        """Wait for the server to end; False on timeout."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def demand_alive(self) -> None:
        """Raise EngineDied, with status and last lines, if the server has ended."""
        if (status := self._process.poll()) is not None:
            self._copying.join(1.0)
            raise EngineDied(f"{self.epitaph(status)}: {self.last_words()}")

    def epitaph(self, status: int) -> str:
        """A sentence about an exit status, in subprocess's notation."""
        if status < 0:
            return f"the engine was killed by {signal.Signals(-status).name}"
        return f"the engine ended with exit status {status}"

    def last_words(self) -> str:
        """The last lines of its output, oldest first."""
        return (
            "\n".join(line.decode(errors="replace") for line in self._last) or "it printed nothing"
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[ExitWatcher]:
        """Watch the current processes; the watcher becomes readable when one of them ends."""
        deaths = ExitWatcher((self.pid, *descendants(self.pid)))
        try:
            yield deaths
        finally:
            deaths.close()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the server, which ends the others, then SIGKILL to all that remain."""
        pids = [self.pid, *descendants(self.pid)]
        if self._process.poll() is None:
            self._process.terminate()
            self.wait_end(grace_s)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # orphaned processes are not descendants any longer, but still in the group
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _copy(self, readable: int) -> None:
        with open(readable, "rb", buffering=0) as pipe:
            rest = b""
            while piece := pipe.read(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                self._last.extend(lines)
                if len(rest) > _PIECE:
                    lines, rest = [*lines, rest], b""
                _write(b"".join(line + b"\n" for line in lines))
            _write(rest)


class ExitWatcher:
    """An epoll over pidfds (pidfd_open(2)). Owner: its creator."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._epoll = select.epoll()
        self._names: dict[int, str] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                self._names[pidfd] = process_name(pid)
                self._epoll.register(pidfd, select.EPOLLIN)

    def __repr__(self) -> str:
        return f"<ExitWatcher of {len(self._names)}>"

    def fileno(self) -> int:
        """The descriptor, which is readable once a process has ended."""
        return self._epoll.fileno()

    def names(self) -> list[str]:
        """Names of the processes that have ended."""
        return [self._names[fd] for fd, _ in self._epoll.poll(0)]

    def close(self) -> None:
        """Stop watching."""
        self._epoll.close()
        for pidfd in self._names:
            os.close(pidfd)
        self._names.clear()


def _write(data: bytes) -> None:
    """Write all of `data` to stdout; dropped if the pipe has no reader."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(1, view) :]

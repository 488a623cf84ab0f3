"""The process tree of a server: started below the worker, watched, and ended together.

The server's stdout and stderr are one pipe, which a thread copies line by line to the worker's
stdout, so that the lines belong to the instance once the worker has become one; the last lines are
quoted when the server dies. Owner: the worker's main thread; the copying thread only appends to
`_last`."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from pilotlight.worker.engine.errors import ServerDied
from pilotlight.worker.snapshot.processes import descendants, process_name
from pilotlight.worker.user_code import output

_LAST_LINES = 20
_PIECE = 65536


class ServerOutput:
    """The pipe that is a server's output, and the thread that copies it.

    Attributes:
        writable: the descriptor for the server's processes, until `close`.
    """

    def __init__(self) -> None:
        readable, self.writable = os.pipe()
        self._target = 1
        self._switching = threading.Lock()
        self._last: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self._copying = threading.Thread(
            target=self._copy, args=(readable,), name="server output", daemon=True
        )
        self._copying.start()

    def __repr__(self) -> str:
        return f"<ServerOutput lines={len(self._last)}>"

    def close(self) -> None:
        """Close this process' end: the copying ends with the server's processes."""
        os.close(self.writable)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Make it stdout and stderr of this process, which processes inherit that are started
        meanwhile."""
        output.finish()
        own = os.dup(1), os.dup(2)
        with self._switching:
            self._target = own[0]
            for descriptor in (1, 2):
                os.dup2(self.writable, descriptor)
        try:
            yield
        finally:
            output.finish()
            with self._switching:
                self._target = 1
                for descriptor, kept in zip((1, 2), own, strict=True):
                    os.dup2(kept, descriptor)
                    os.close(kept)

    def last_words(self) -> str:
        """The last lines, oldest first."""
        return (
            "\n".join(line.decode(errors="replace") for line in self._last) or "it printed nothing"
        )

    def wait_copied(self) -> None:
        """Wait until what the ended processes wrote has been copied."""
        self._copying.join(1.0)

    def _copy(self, readable: int) -> None:
        with open(readable, "rb", buffering=0) as pipe:
            rest = b""
            while piece := pipe.read(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                self._last.extend(lines)
                if len(rest) > _PIECE:
                    lines, rest = [*lines, rest], b""
                self._write(b"".join(line + b"\n" for line in lines))
            if rest:
                self._last.append(rest)
            self._write(rest)

    def _write(self, data: bytes) -> None:
        """Write all of `data` to the worker's stdout; dropped if the pipe has no reader."""
        view = memoryview(data)
        with self._switching, contextlib.suppress(OSError):
            while view:
                view = view[os.write(self._target, view) :]


class ProcessTree:
    """The processes of a server.

    Attributes:
        noun: what messages call the server.
        output: what it prints.
    """

    noun = "server"

    def __init__(self) -> None:
        self.output = ServerOutput()

    def pids(self) -> list[int]:
        """The current processes, parents first."""
        raise NotImplementedError

    def require_alive(self) -> None:
        """Raise ServerDied, with status and last lines, if the server has ended."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """All processes, as `name (pid)`, parents first."""
        return [process_name(pid) for pid in self.pids()]

    def died(self, status: int | None) -> ServerDied:
        """The error for an exit status in subprocess's notation; None: not known."""
        self.output.wait_copied()
        if status is None:
            how = "ended"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with exit status {status}"
        return ServerDied(f"the {self.noun} {how}: {self.output.last_words()}")

    @contextlib.contextmanager
    def watched(self) -> Iterator[ExitWatcher]:
        """Watch the current processes; the watcher becomes readable when one of them ends."""
        deaths = self._watcher()
        try:
            yield deaths
        finally:
            deaths.close()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the server, which ends its other processes, then SIGKILL to all that
        remain."""
        pids = self.pids()
        self._terminate(grace_s)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _watcher(self) -> ExitWatcher:
        return ExitWatcher(self.pids())

    def _terminate(self, grace_s: float) -> None:
        raise NotImplementedError


class EngineProcess(ProcessTree):
    """A running engine. `pid` is the server's; the other processes are its children."""

    noun = "engine"

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, directory: str
    ) -> None:
        """Start it, in a process group of its own. Raises OSError."""
        super().__init__()
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=self.output.writable,
                stderr=self.output.writable,
                process_group=0,
            )
        finally:
            self.output.close()

    def __repr__(self) -> str:
        return f"<EngineProcess pid={self.pid} status={self._process.poll()}>"

    @property
    def pid(self) -> int:
        """Pid of the server."""
        return self._process.pid

    def pids(self) -> list[int]:
        """The server and its children."""
        return [self.pid, *descendants(self.pid)]

    def wait_end(self, within_s: float) -> bool:
        """Wait for the server to end; False on timeout."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def require_alive(self) -> None:
        """Raise ServerDied, with status and last lines, if the server has ended."""
        if (status := self._process.poll()) is not None:
            raise self.died(status)

    def end(self, grace_s: float) -> None:
        """End all processes, also orphaned ones, which are still in the group."""
        super().end(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _terminate(self, grace_s: float) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.wait_end(grace_s)


class ExitWatcher:
    """An epoll over pidfds (pidfd_open(2)). Owner: its creator."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._epoll = select.epoll()
        self._names: dict[int, str] = {}
        self._add(pids)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._names)}>"

    def fileno(self) -> int:
        """The descriptor, which is readable once a process has ended."""
        return self._epoll.fileno()

    def names(self) -> list[str]:
        """Names of the processes that have ended."""
        return [self._names[fd] for fd, _ in self._epoll.poll(0)]

    def wait_all(self, within_s: float) -> None:
        """Wait until all have ended, at most for so long."""
        ends_at = time.monotonic() + within_s
        while self._names and (left_s := ends_at - time.monotonic()) > 0:
            for pidfd, _ in self._epoll.poll(left_s):
                os.close(pidfd)
                del self._names[pidfd]

    def close(self) -> None:
        """Stop watching."""
        self._clear()
        self._epoll.close()

    def _add(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                self._names[pidfd] = process_name(pid)
                self._epoll.register(pidfd, select.EPOLLIN)

    def _clear(self) -> None:
        for pidfd in self._names:
            os.close(pidfd)  # which unregisters it
        self._names.clear()

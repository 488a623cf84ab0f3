"""The one worker of a pod: booted by us, or put here by the node agent; ordered to serve in place,
forked never.

What is said on its control channel is the contract of a slot (docs/internals.md, "Shim and
worker"); the launcher is its shim."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any

from pilotlight.launcher.work_dir import WorkerCommand
from pilotlight.worker.process.shim_channel import MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS

_OPEN_FILES = 65536
_RESTORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE)


class WorkerProcess:
    """Owner: the launcher's loop, which polls `fileno`.

    Attributes:
        pid: in this container.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        control.setblocking(False)
        self.pid = pid
        self._control = control

    def __repr__(self) -> str:
        return f"<WorkerProcess pid {self.pid}>"

    @classmethod
    def boot(
        cls, command: WorkerCommand, control: socket.socket, theirs: socket.socket
    ) -> WorkerProcess:
        """Execute it; `theirs` is the end that the launch file names, and is closed here. A failure
        to start is exit status 127."""
        pid = os.fork()
        if pid == 0:
            _execute(command, theirs.fileno())
        theirs.close()
        return cls(pid, control)

    def fileno(self) -> int:
        """The control channel, for poll; -1 once it is closed."""
        return self._control.fileno()

    def hear(self) -> list[dict[str, Any]]:
        """What it said since; at its end the channel is closed. User code shares the descriptor:
        what is no event is dropped."""
        messages: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._control, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionError:
                    data, descriptors = b"", []
                for descriptor in descriptors:
                    os.close(descriptor)
                if not data:
                    self._control.close()
                    break
                with contextlib.suppress(ValueError, RecursionError):
                    message = json.loads(data)
                    if isinstance(message, dict):
                        messages.append(message)
        return messages

    def serve(
        self,
        instance: str,
        listener: socket.socket,
        env: Mapping[str, str],
        *,
        start: Mapping[str, Any],
    ) -> None:
        """Order it to become the instance. The environment travels on a channel of its own, as in a
        slot.

        Raises OSError: it is gone, or the environment is longer than one message may be (EMSGSIZE).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            body = json.dumps({"op": "serve", "instance": instance, "env": {}}).encode()
            socket.send_fds(self._control, [body], [listener.fileno(), 1, 2, theirs.fileno()])
            ours.send(json.dumps({"env": dict(env), "start": dict(start)}).encode())

    def signal(self, number: int) -> None:
        """Send it a signal; one that is gone needs none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _execute(command: WorkerCommand, control_fd: int) -> None:
    """Never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.set_inheritable(control_fd, True)
        signal.set_wakeup_fd(-1)
        for number in _RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        os.chdir(command.work)
        os.execve(command.argv[0], list(command.argv), dict(command.env))
    except (OSError, ValueError) as e:
        os.write(2, f"launcher.exec error={e}\n".encode(errors="replace"))
    finally:
        os._exit(127)

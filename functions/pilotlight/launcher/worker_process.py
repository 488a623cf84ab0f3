"""The one worker of a pod: booted by the launcher or restored by the node agent. It serves in
place, or is the Template from which instances are forked (`pod_instances`).

Its control channel has the protocol of a slot (docs/reference/internals/shim.md), in
which the launcher is the shim."""

from __future__ import annotations

import contextlib
import errno
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
    """A worker and its control channel. Owner: the launcher's loop, which polls `fileno`.

    Attributes:
        pid: its pid in this container.
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
        """Execute the command. `theirs` is the worker's end of the channel, named in the launch
        file, and is closed in this process. A failed start ends with exit status 127."""
        pid = os.fork()
        if pid == 0:
            _execute(command, theirs.fileno())
        theirs.close()
        return cls(pid, control)

    def fileno(self) -> int:
        """The control channel's descriptor, for poll; -1 once it is closed."""
        return self._control.fileno()

    def has_children(self) -> bool:
        """Whether it has started processes of its own, which forks of it would share."""
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{task}/children") as children:
                    if children.read().strip():
                        return True
        return False

    def hear(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Receive the worker's new messages, with descriptors that the caller closes; close the
        channel at its end. Invalid messages are dropped, because user code shares the
        descriptor."""
        messages: list[tuple[dict[str, Any], list[int]]] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._control, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionError:
                    data, descriptors = b"", []
                if not data:
                    self._control.close()
                    break
                try:
                    message = json.loads(data)
                except (ValueError, RecursionError):
                    message = None
                if isinstance(message, dict):
                    messages.append((message, descriptors))
                else:
                    close_all(descriptors)
        return messages

    def become(
        self,
        op: str,
        instance: str,
        listener: socket.socket,
        env: Mapping[str, str],
        *,
        start: Mapping[str, Any],
    ) -> None:
        """Make the worker (`serve`), or a fork of it (`fork`), become the instance. The environment
        is sent on a separate channel, as in a slot.

        Raises OSError if the worker has ended, or if the environment exceeds the maximum message
        size (EMSGSIZE).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            given = json.dumps({"env": dict(env), "start": dict(start)}).encode()
            if len(given) > MAX_DATAGRAM_BYTES:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            ours.send(given)
            body = json.dumps({"op": op, "instance": instance, "env": {}}).encode()
            socket.send_fds(self._control, [body], [listener.fileno(), 1, 2, theirs.fileno()])

    def signal(self, number: int) -> None:
        """Send the worker a signal; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that a message brought."""
    while descriptors:
        os.close(descriptors.pop())


def _execute(command: WorkerCommand, control_fd: int) -> None:
    """Execute the command in the forked child; never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if command.control_fd is not None:
            control_fd = os.dup2(control_fd, command.control_fd)
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

"""Makes slots: a small single-threaded process, executed before the agent has threads, that forks
shims into new namespaces.

The agent sends `{"slot", "directory", "logs", "log_max_bytes", "disk_floor_bytes", "groups",
"namespaces", "network", "name_servers"}` with the slot's listening socket. The reply is `{"slot",
"pid"}` with a pidfd, or `{"slot", "error"}`. A shim is forked, not executed: the interpreter is
loaded already, so a slot costs some milliseconds. The spawner exits when the agent does; shims keep
running.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from snapshotter.shim import child, seqpacket
from snapshotter.shim.main import Shim
from snapshotter.shim.sandbox import isolation, mounts, netns


def main(control_fd: int) -> None:
    """Serve the agent on `control_fd` until it disconnects."""
    # the agent's own files are private, but a slot's tree is for its tenant, and user code expects
    # this umask
    os.umask(0o022)
    os.setsid()
    isolation.become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    gc.freeze()
    agent = socket.socket(fileno=control_fd)
    agent.set_inheritable(False)
    while True:
        message, fds = seqpacket.receive(agent)
        if message is None:
            return
        answer, answer_fds = _make(message, fds[0] if fds else -1, agent)
        seqpacket.send(agent, seqpacket.encode(answer), answer_fds)
        seqpacket.close_all([*fds, *answer_fds])


def _reap() -> None:
    """Reap shims, which are our children, directly or as orphans. Runs between two bytecodes of the
    main thread: no lock needed."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _make(
    message: Mapping[str, Any], listener: int, agent: socket.socket
) -> tuple[dict[str, Any], list[int]]:
    readable, writable = os.pipe2(os.O_CLOEXEC)
    middle = os.fork()
    if middle == 0:
        os.close(readable)
        agent.close()
        _between(message, listener, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        reply = pipe.read().decode(errors="replace")
    with contextlib.suppress(ChildProcessError):  # the signal handler has reaped it
        os.waitpid(middle, 0)
    if not reply.isdigit():
        return {
            "slot": message["slot"],
            "error": reply or "the slot's process exited without a reply",
        }, []
    return {"slot": message["slot"], "pid": int(reply)}, [os.pidfd_open(int(reply))]


def _between(message: Mapping[str, Any], listener: int, report: int) -> None:
    """Runs in the intermediate process: create the namespaces, fork their PID 1, report its host
    pid, exit."""
    try:
        if message["namespaces"]:
            mounts.unshare()
        if message["network"]:
            netns.unshare()
        first = os.fork()
        if first == 0:
            _become_shim(message, listener, report)
        os.write(report, str(first).encode())
    except OSError as e:
        os.write(report, str(e).encode())
    finally:
        os._exit(0)


def _become_shim(message: Mapping[str, Any], listener: int, report: int) -> None:
    try:
        os.close(report)
        os.setsid()
        _redirect(f"{message['directory']}/shim.err")
        directory = os.open(message["directory"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        child.hold_groups(message["groups"])
        isolation.makes_huge_pages()
        root = ""
        if message["namespaces"]:
            mounts.enter_as_init()
            if message["name_servers"] is not None:
                netns.use_name_servers(
                    message["name_servers"], f"{message['directory']}/resolv.conf"
                )
            root = mounts.prepare(message["directory"])
        else:
            isolation.become_subreaper()
        shim = Shim(
            slot=message["slot"],
            listener=socket.socket(fileno=listener),
            directory=directory,
            log_directory=os.open(message["logs"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
            log_max_bytes=message["log_max_bytes"],
            disk_floor_bytes=message["disk_floor_bytes"],
            root=root,
        )
        shim.run()
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stderr.flush()
        os._exit(1)


def _redirect(errors: str) -> None:
    """Replace the standard streams: those of the agent may be closed at any time."""
    null = os.open("/dev/null", os.O_RDWR)
    log = os.open(errors, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    for fd, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(log)

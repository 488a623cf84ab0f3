"""Quiesces a process of a slot for a dump: a pristine fork of the Template, or the worker itself.
Runs in the shim.

One at a time. The process listens at `mounts.CONTROL`, where its restored copy will be reachable;
it reports on a separate channel that it is quiesced, and the dump consumes it. The agent is
notified when the process has closed that channel, too: CRIU cannot dump a process that is still
connected to the shim. Standard library only; one thread, the shim's loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshotter.shim import child, messages, seqpacket
from snapshotter.shim.event_loop import Peer, Poller
from snapshotter.shim.sandbox import mounts, workdir_archive
from snapshotter.shim.worker import ShimWorker

_SILENT = "the process exited, or closed its channel, before it was quiesced"
_MOST_TEXT = 4096
"""Limit of a failure message, in characters."""


@dataclass(kw_only=True)
class _Frozen:
    """The process being quiesced. `go`: pipe that releases a fork once it is in its cgroups; -1
    afterwards. `found`: its report that it is quiesced, without obstacles. `still`: it has closed
    its channel behind that report."""

    name: str
    in_place: bool
    cgroup: child.Cgroup
    joins: bool
    channel: Peer | None = None
    go: int = -1
    pidfd: int = -1
    found: Mapping[str, Any] | None = None
    still: bool = False


class Quiescer:
    """Quiesces one process at a time. `notify` sends `quiesced`, `checkpoint_failed` or `_gone`,
    `files_kept` or `_failed` to the agent. Owner: the shim's loop."""

    def __init__(
        self, shim_worker: ShimWorker, poller: Poller, notify: Callable[..., None]
    ) -> None:
        self._shim_worker = shim_worker
        self._poller = poller
        self._notify = notify
        self._frozen: _Frozen | None = None
        self._dumped: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"<Quiescer {self._frozen.name if self._frozen else 'empty'}>"

    def start(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Request a quiesced fork from the worker, or that it quiesces itself. `fds`: CRIU's kdat,
        or empty; the caller keeps them."""
        name, in_place, cgroup = (
            message["checkpoint"],
            message["in_place"],
            child.Cgroup(**message["cgroup"]),
        )
        joins = self._shim_worker.joins and bool(cgroup.tasks)
        if self._frozen is not None:
            self._fail(name, f"checkpoint {self._frozen.name} is in progress")
            return
        frozen = _Frozen(name=name, in_place=in_place, cgroup=cgroup, joins=joins)
        try:
            for kdat in fds:
                mounts.write_criu_kdat(kdat)
            self._request(frozen)
        except (OSError, seqpacket.MessageTooLong) as e:
            self._close(frozen)
            self._fail(name, str(e))
            return
        self._frozen = frozen

    def _request(self, frozen: _Frozen) -> None:
        worker = self._shim_worker.ready_peer()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        frozen.channel = Peer(
            ours,
            self._poller,
            lambda message, fds: self._on_channel_message(frozen, message, fds),
            lambda: self._on_channel_closed(frozen),
            paced=True,
        )
        with theirs, _listener() as listener:
            fds = [listener.detach(), theirs.detach()]
        op = "checkpoint_in_place" if frozen.in_place else "checkpoint"
        try:
            if frozen.in_place:
                self._watch(frozen, os.dup(self._shim_worker.pidfd))
            else:
                go_read, frozen.go = os.pipe2(os.O_CLOEXEC)
                fds += [go_read, *(frozen.cgroup.open_tasks() if frozen.joins else ())]
        except OSError:
            seqpacket.close_all(fds)
            raise
        worker.push({"op": op, "instance": frozen.name, "env": {}}, fds)

    def on_message(self, message: Mapping[str, Any], fds: list[int]) -> bool:
        """Handle a message of the worker; False if it does not concern the checkpoint. Raises
        KeyError, TypeError, ValueError, OSError."""
        frozen = self._frozen
        if frozen is None or message.get("instance") != frozen.name:
            return message.get("instance") in self._dumped  # its parent has reaped it
        if message["event"] == "forked" and frozen.pidfd < 0 and not frozen.in_place:
            child.pid_of(fds[0])
            self._watch(frozen, os.dup(fds[0]))
            self._admit(frozen)
        elif message["event"] == "failed":
            self._drop(frozen, str(message["error"]["message"])[:_MOST_TEXT])
        return True

    def _admit(self, frozen: _Frozen) -> None:
        try:
            if not frozen.joins:
                child.enter_group(frozen.cgroup, frozen.pidfd)
            os.write(frozen.go, b"\n")
        except OSError as e:
            self._drop(frozen, str(e))
            return
        os.close(frozen.go)
        frozen.go = -1

    def _watch(self, frozen: _Frozen, pidfd: int) -> None:
        frozen.pidfd = pidfd
        self._poller.watch(pidfd, lambda _: self._on_exit(frozen))

    def _on_channel_message(
        self, frozen: _Frozen, message: Mapping[str, Any], fds: list[int]
    ) -> None:
        """Handle a message on the process's channel, which user code may share. Raises ValueError
        for an invalid message."""
        seqpacket.close_all(fds)
        if message.get("event") != "quiesced" or frozen.pidfd < 0 or frozen.found is not None:
            return
        found = messages.quiesced_of(message)
        if not found["obstacles"]:
            frozen.found = found
        elif self._report(frozen, found):
            # a process quiesced in place waits for further requests
            self._drop(frozen, None, kill=not frozen.in_place)

    def _on_channel_closed(self, frozen: _Frozen) -> None:
        if frozen is not self._frozen:
            return
        if frozen.found is not None:
            frozen.still = True
            if frozen.in_place:
                self._shim_worker.on_quiesced()
            self._report(frozen, frozen.found)
        elif not frozen.in_place:
            # in place it closes the channel after a refusal as well; the refusal arrives on the
            # control channel, its exit by the pidfd
            self._drop(frozen, _SILENT)

    def _report(self, frozen: _Frozen, found: Mapping[str, Any]) -> bool:
        """Notify the agent that it is quiesced, or of its obstacles; False if it has exited."""
        try:
            pid = child.pid_of(frozen.pidfd)
        except OSError as e:
            self._drop(frozen, str(e))
            return False
        stdio = _pipes_of(pid) if frozen.still and frozen.in_place else None
        body = {"event": "quiesced", "checkpoint": frozen.name, "pid": pid, "stdio": stdio, **found}
        self._notify(body, frozen.pidfd)
        return True

    def _on_exit(self, frozen: _Frozen) -> None:
        if frozen.channel is not None and not frozen.still:
            frozen.channel.read_all()
        if frozen is not self._frozen:
            return
        self._drop(frozen, None if frozen.still else _SILENT)

    def end(self, name: str | None = None) -> None:
        """Kill the process of that checkpoint, or of any; called as well when the agent has
        disconnected."""
        if self._frozen is not None and name in (None, self._frozen.name):
            self._drop(self._frozen, None if self._frozen.still else "the checkpoint was cancelled")

    def dump_ended(self) -> None:
        """A CRIU process has exited: the dumped process has exited, or cannot be trusted after a
        partial dump."""
        if self._frozen is not None and self._frozen.still:
            self._kill(self._frozen)  # `_on_exit` follows

    def _drop(self, frozen: _Frozen, failure: str | None, *, kill: bool = True) -> None:
        if self._frozen is not frozen:
            return
        self._frozen = None
        if kill and (frozen.found is not None or not frozen.in_place):
            self._kill(frozen)
        self._close(frozen)
        self._dumped = {frozen.name: frozen.in_place}
        if failure is not None:
            self._fail(frozen.name, failure)
        else:
            self._notify({"event": "checkpoint_gone", "checkpoint": frozen.name})

    @staticmethod
    def _kill(frozen: _Frozen) -> None:
        if frozen.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(frozen.pidfd, signal.SIGKILL)

    def _close(self, frozen: _Frozen) -> None:
        if frozen.channel is not None:
            frozen.channel.close()
        if frozen.pidfd >= 0:
            self._poller.unwatch(frozen.pidfd)
        for fd in (frozen.go, frozen.pidfd):
            if fd >= 0:
                os.close(fd)
        frozen.go = frozen.pidfd = -1

    def _fail(self, name: str, message: str) -> None:
        self._notify({"event": "checkpoint_failed", "checkpoint": name, "message": message})

    # -- files of the checkpoint

    def save_files(self, name: str, destination: int) -> None:
        """Write the slot's files of the checkpoint, and those that CRIU added during the dump. The
        caller keeps the descriptor."""
        try:
            known = self._dumped | (
                {self._frozen.name: self._frozen.in_place} if self._frozen else {}
            )
            if name not in known:
                raise OSError(f"checkpoint {name} does not exist")
            size = self._write_files(destination, in_place=known[name])
        except (OSError, workdir_archive.ArchiveTooLarge) as e:
            self._notify({"event": "files_failed", "checkpoint": name, "message": str(e)})
            return
        self._notify({"event": "files_kept", "checkpoint": name, "bytes": size})

    def _write_files(self, destination: int, *, in_place: bool) -> int:
        archive = self._shim_worker.archive
        if in_place:
            workdir_archive.write(destination)
        else:
            if archive is not None:
                workdir_archive.copy(archive, destination)
            added = frozenset(workdir_archive.remapped(archive))
            workdir_archive.write(destination, wanted=lambda name: name in added)
            for name in added:
                workdir_archive.remove(name)
        return workdir_archive.finish(destination)


def _listener() -> socket.socket:
    """Listening socket for the restored copy; only root may connect. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(mounts.CONTROL)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(mounts.CONTROL)
        os.chmod(mounts.CONTROL, 0o600)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _pipes_of(pid: int) -> dict[str, str]:
    """Pipes behind stdout and stderr, for CRIU's `inherit_fd`; other kinds are omitted."""
    found = {}
    for name, fd in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return {name: link for name, link in found.items() if link.startswith("pipe:")}

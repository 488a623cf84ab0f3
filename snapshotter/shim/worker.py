"""The worker of a slot, managed by the shim: booted, or restored and resumed. Standard library
only; one thread, the shim's loop."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapshotter.shim import child, messages, seqpacket
from snapshotter.shim.event_loop import Peer, Poller
from snapshotter.shim.log_capture import LogCapture
from snapshotter.shim.log_file import LogFile
from snapshotter.shim.log_pipe import LogPipe
from snapshotter.shim.sandbox import mounts, workdir_archive
from snapshotter.shim.sandbox.workdir_archive import Archive

_STRAYS_NAMED = 100
"""Surplus processes that are named at a snapshot point; a single one prevents forking."""
_MESSAGE_TEXT = 1024
OnMessage = Callable[[Mapping[str, Any], list[int]], None]


class ShimWorker:
    """The worker of one slot. Owner: the shim's loop.

    Attributes:
        state: empty → booting → resident → serving → dead; or empty → furnished (a restore may
            begin) → resident; resident → frozen (quiesced as a whole for a dump); resident →
            proving → proven.
        pid: pid in the slot; 0 if there is none.
        point: the snapshot point once reached.
        failure: what user code raised during the start.
        archive: the files of the slot at the snapshot point; None if it cannot be forked for a
            snapshot.
    """

    def __init__(
        self,
        slot: str,
        *,
        poller: Poller,
        recorder: LogCapture,
        notify: Callable[..., None],
        root: str,
    ) -> None:
        """`root`: directory of the slot's root (`mounts.prepare`); "": the slot has no
        namespaces."""
        self._slot = slot
        self._poller = poller
        self._recorder = recorder
        self._notify = notify
        self._root = root
        self._namespaced = bool(root)
        self._log: LogFile | None = None
        self._pipes: list[LogPipe] = []
        self._archives_files = True
        self._has_lost_pages = False
        self.peer: Peer | None = None
        self.confinement: child.Confinement | None = None
        self.state = "empty"
        self.pid = 0
        self.pidfd = -1
        self.status: int | None = None
        self.point: Mapping[str, Any] = {}
        self.failure: Mapping[str, Any] | None = None
        self.archive: Archive | None = None

    def __repr__(self) -> str:
        return f"<ShimWorker {self.state} pid {self.pid}>"

    # -- start

    def boot(self, message: Mapping[str, Any], on_message: OnMessage) -> None:
        """Make the tree and execute the worker in it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if self._namespaced:
                mounts.reserve_low_pids()
                self._build(message)
            self._confine(message)
            ends = self.pipes()
            streams = {"stdout": ends[0], "stderr": ends[1], "control": theirs.fileno()}
            cgroup, confinement = child.Cgroup(**message["cgroup"]), self._confinement
            self.pid = child.execute(
                message["argv"], confinement, env=message["env"], cgroup=cgroup, **streams
            )
            seqpacket.close_all(ends)
        except OSError as e:
            ours.close()
            self._notify({"event": "boot_failed", "message": str(e)})
            return
        finally:
            theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        self.state = "booting"
        self.peer = Peer(ours, self._poller, on_message, lambda: None, paced=True)
        self._notify({"event": "booted", "pid": self.pid}, self.pidfd)

    def prepare_restore(self, message: Mapping[str, Any], kdat: int, files: int) -> None:
        """Make the tree and extract the snapshot's files into it, so that CRIU can restore a
        process. The caller keeps the descriptors."""
        try:
            if not self._namespaced or self.state != "empty":
                raise OSError(
                    f"cannot restore into this slot: it is "
                    f"{self.state if self._namespaced else 'without namespaces'}"
                )
            self._build(message)
            mounts.write_criu_kdat(kdat)
            end = workdir_archive.unpack(files)
            self.archive = Archive(fd=os.dup(files), end=end)
            self._confine(message)
        except (OSError, workdir_archive.InvalidArchive) as e:
            self._notify({"event": "boot_failed", "message": str(e)})
            return
        self.state = "furnished"
        self._notify({"event": "furnished"})

    def resume(self, message: Mapping[str, Any], on_message: OnMessage) -> None:
        """Connect to a process that CRIU has restored; it becomes the worker. With `boots` it is
        one without a function, and boots that of this slot; its snapshot point follows."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if self.state != "furnished":
                raise OSError(f"cannot resume a worker in a slot that is {self.state}")
            if self._has_lost_pages:
                raise OSError("its memory is lost: the page server failed")
            pid = int(message["pid"])
            if pid not in mounts.children():
                raise OSError(f"process {pid} is not a child of the slot's shim")
            connection.setblocking(False)
            connection.connect(mounts.CONTROL)
            os.unlink(mounts.CONTROL)
            mounts.reserve_low_pids()
            self.pidfd = os.pidfd_open(pid)
        except OSError as e:
            connection.close()
            self.kill_leftovers()
            self._notify({"event": "revive_failed", "message": str(e)})
            return
        self.pid = pid
        self.peer = Peer(connection, self._poller, on_message, lambda: None, paced=True)
        if message.get("boots"):
            self._boot_restored(self.peer)
        else:
            self.state, self.point = "resident", message["point"]
        self._notify({"event": "revived", "pid": pid}, self.pidfd)

    def _boot_restored(self, peer: Peer) -> None:
        self.state = "booting"
        if self.archive is not None:  # made anew at the snapshot point, with the function's files
            self._drop_archive()
        # a process that has exited already is reaped, and its exit reported
        with contextlib.suppress(OSError):
            peer.push({"op": "boot", "instance": "", "env": {}}, [])

    def kill_leftovers(self) -> None:
        """Kill what a failed restore left behind; the slot is unusable afterwards."""
        if self.state == "furnished":
            self.state = "dead"
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    -1, signal.SIGKILL
                )  # from PID 1: all processes of the namespace except itself

    def pipes(self) -> list[int]:
        """Create log pipes for a tree that is booted or restored; returns the write ends, owned by
        the caller. Raises OSError."""
        if self._log is None:
            self._log = self._recorder.open(self._slot)
        return self._recorder.pipes_into(self._log, self._pipes)

    def _build(self, message: Mapping[str, Any]) -> None:
        more = {name: message[name] for name in ("writable_bytes", "devices", "driver_files")}
        mounts.build(
            self._root,
            message["binds"],
            uid=message["uid"] or 0,
            rootfs=message.get("rootfs", ""),
            volumes=message.get("volumes", ()),
            links=message.get("links", {}),
            python=message.get("python", ""),
            **more,
        )

    def _confine(self, message: Mapping[str, Any]) -> None:
        names = ("uid", "limits", "env", "work")
        self.confinement = child.Confinement(
            **{name: message[name] for name in names},
            log_refused=bool(message.get("log_refused", False)),
        )
        self._archives_files = bool(message.get("snapshot", True)) and self._namespaced

    @property
    def _confinement(self) -> child.Confinement:
        if self.confinement is None:
            raise OSError("the slot is empty")
        return self.confinement

    # -- events and requests

    def reach_point(self, message: Mapping[str, Any]) -> None:
        """Handle the snapshot point. Archives the files written so far for its snapshots, because
        its forks will write as well. Raises ValueError."""
        point = messages.point_of(message)
        with self._poller.unmetered():
            strays = mounts.other_processes({os.getpid(), self.pid}) if self._namespaced else []
            point["threads"] += [f"process {name}" for name in strays[:_STRAYS_NAMED]]
            point["obstacles"] += (
                self._archive_files(point["threads"]) if self._archives_files else []
            )
        self.state, self.point = "resident", point
        self._notify({"event": "snapshot_point", **point})

    def _archive_files(self, threads: Sequence[str]) -> list[dict[str, Any]]:
        """Archive the slot's files; returns obstacles."""
        try:
            if threads:
                workdir_archive.measure()  # it is dumped as a whole, with its files
            else:
                self.archive = workdir_archive.pack(self._recorder.unnamed_file())
        except (workdir_archive.ArchiveTooLarge, OSError) as e:
            what = "files in the work directory, /tmp or /dev/shm"
            kind = (
                "disk"
                if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
                else "file"
            )
            return [
                {
                    "kind": kind,
                    "fd": None,
                    "what": what,
                    "where": None,
                    "message": str(e)[:_MESSAGE_TEXT],
                }
            ]
        return []

    @property
    def joins(self) -> bool:
        """Whether its forks enter their groups themselves."""
        return bool(self.point.get("joins"))

    def ready_peer(self) -> Peer:
        """The worker's channel. Raises ProcessLookupError if the worker does not accept
        requests."""
        if self.state != "resident" or self.peer is None:
            raise ProcessLookupError(f"the worker is {self.state}")
        return self.peer

    def serve(self) -> None:
        """The worker has become the instance: its forks are not snapshotted."""
        self.state = "serving"
        self._drop_archive()

    def on_quiesced(self) -> None:
        """The worker is quiesced as a whole, and its control channel is closed."""
        self.state = "frozen"
        if self.peer is not None:
            self.peer.close()

    def check_examples(self, message: Mapping[str, Any]) -> None:
        """Request that the worker runs its examples again, and compares with its own answers or
        those of the message. It exits afterwards, or with `records` when the slot ends."""
        records = bool(message.get("records"))
        order = {"op": "prove", "instance": "proof", "env": {}, "records": records}
        answers = message.get("answers") or {}
        try:
            self.ready_peer().push({**order, "answers": answers}, [])
        except OSError as e:
            error = {"type": type(e).__name__, "message": str(e), "traceback": ""}
            self._notify({"event": "proved", "ok": False, "error": error, "phases_ms": {}})
            return
        self.state = "proving"

    def kill(self) -> None:
        """SIGKILL."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def on_pages_lost(self) -> None:
        """Its memory is lost: kill it now, or fail its resume."""
        self._has_lost_pages = True
        self.kill()

    def on_exit(self, status: int) -> None:
        """Handle its exit, after it was reaped."""
        if self.peer is not None:
            self.peer.read_all()  # messages sent before its exit count, above all a failure report
        self.state, self.status, self.pid = "dead", status, 0
        for pipe in self._pipes:
            pipe.drain()

    def _drop_archive(self) -> None:
        if self.archive is not None:
            self.archive.close()
            self.archive = None

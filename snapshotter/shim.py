"""PID 1 of a slot: starts the worker, reaps, owns the log pipes, reports, and survives the agent.

One thread, one poll loop, standard library only. It holds all that a restarted agent needs: the agent connects to `shim.sock`,
asks for `state`, and goes on. Only one agent is listened to, the one that connected last.

Agent → shim (`op`): boot, start, park, unpark, note, kill, kill_worker, exec, exec_kill, forget, state, shutdown.
Shim → agent (`event`): booted, boot_failed, snapshot_point, failed, forked, ready, exited, parked, parked_gone, worker_exited,
exec_exited, log_dropped, state, instance, state_end. Shim ↔ worker: docs/architecture.md, "The slot".
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from snapshotter import child, tree, wire
from snapshotter.execs import Execs
from snapshotter.logpipe import LogFile, LogPipe
from snapshotter.lot import Lot, Parked
from snapshotter.poller import Peer, Poller
from snapshotter.process import Process
from snapshotter.recorder import Recorder

_STATUS_PATIENCE_S = 1.0
"""How long the Template may take to report the status of a child that is gone before it counts as unknown."""


class Shim:
    """One slot's state. Owner: the loop in `run`."""

    def __init__(self, *, slot: str, listener: socket.socket, log_directory: int, log_max_bytes: int, namespaced: bool) -> None:
        self._slot = slot
        self._listener = listener
        self._namespaced = namespaced
        self._poller = Poller()
        self._agent: Peer | None = None
        self._worker: Peer | None = None
        self._confinement: child.Confinement | None = None
        self._worker_pid = 0
        self._worker_pidfd = -1
        self._worker_state = "empty"
        self._worker_status: int | None = None
        self._snapshot_point: Mapping[str, Any] = {}
        self._failure: Mapping[str, Any] | None = None
        self._boot_log: LogFile | None = None
        self._boot_pipes: list[LogPipe] = []
        self._processes: dict[str, Process] = {}
        self._lot = Lot(self._poller, self._tell)
        self._execs = Execs(self._tell)
        self._recorder = Recorder(self._poller, self._tell, directory=log_directory, max_bytes=log_max_bytes)

    def __repr__(self) -> str:
        living = sum(p.state != "gone" for p in self._processes.values())
        return f"<Shim {self._slot} worker {self._worker_state} pid {self._worker_pid}, {living} instances>"

    def run(self) -> None:
        """Serve until `shutdown`."""
        wakeup = self._catch_children()
        self._poller.watch(wakeup, lambda _: self._reap(wakeup))
        self._listener.setblocking(False)
        self._poller.watch(self._listener.fileno(), lambda _: self._on_connection())
        while True:
            self._poller.turn(self._patience())
            self._give_up_waiting(time.monotonic())

    def _patience(self) -> float | None:
        return 0.1 if any(p.dead_at is not None and p.state != "gone" for p in self._processes.values()) else None

    @staticmethod
    def _catch_children() -> int:
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        return readable

    # -- the agent

    def _on_connection(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if self._agent is not None:
                self._agent.close()
            self._agent = Peer(connection, self._poller, self._on_order, lambda: None)

    def _tell(self, message: Mapping[str, Any], *fds: int) -> None:
        """Send to the agent, if there is one. The descriptors stay ours: duplicates travel."""
        if self._agent is not None and self._agent.is_open:
            try:
                self._agent.push(message, [os.dup(fd) for fd in fds if fd >= 0])
            except OSError:
                self._agent.close()

    def _on_order(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """An order that we do not understand must not end the slot: another version of the agent is told off by closing."""
        try:
            self._obey(message, fds)
        except (ValueError, LookupError, TypeError) as e:
            print(f"{self!r}: the agent is dropped: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            raise ConnectionAbortedError from e

    def _obey(self, message: Mapping[str, Any], fds: list[int]) -> None:
        match message["op"]:
            case "start":
                self._start(message, fds[0])
            case "exec":
                self._execs.start(message, self._processes.get(message["instance"]), self._confinement, *fds)
            case op:
                self._simple_orders[op](message)

    @functools.cached_property
    def _simple_orders(self) -> Mapping[str, Callable[[Mapping[str, Any]], None]]:
        return {
            "boot": self._boot,
            "park": self._park,
            "unpark": lambda _: self._lot.clear(),
            "note": self._note,
            "kill": lambda m: self._kill(m["instance"]),
            "kill_worker": lambda _: self._kill_worker(),
            "exec_kill": lambda m: self._execs.kill(m["exec"]),
            "forget": lambda m: self._forget(m["instance"]),
            "state": lambda _: self._report_state(),
            "shutdown": lambda _: self._shutdown(),
        }

    def _note(self, message: Mapping[str, Any]) -> None:
        if process := self._processes.get(message["instance"]):
            process.note = message["note"]

    def _kill_worker(self) -> None:
        if self._worker_pidfd >= 0:
            self._signal(self._worker_pidfd)

    def _forget(self, instance: str) -> None:
        process = self._processes.get(instance)
        if process is not None and process.state == "gone":
            del self._processes[instance]

    def _report_state(self) -> None:
        point, failure = self._snapshot_point, self._failure
        state = {"worker": self._worker_state, "pid": self._worker_pid, "point": point, "failure": failure, "status": self._worker_status}
        own = os.pidfd_open(os.getpid())
        self._tell({"event": "state", **state}, own, self._worker_pidfd)
        os.close(own)
        for p in self._processes.values():
            body = {"instance": p.id, "state": p.state, "note": p.note, "phases_ms": p.phases_ms, "status": p.status}
            self._tell({"event": "instance", **body}, p.pidfd)
        self._tell({"event": "state_end"})

    def _shutdown(self) -> None:
        """As PID 1 our exit is everybody's; without a PID namespace we kill who we know."""
        for fd in [self._worker_pidfd, *(p.pidfd for p in self._processes.values())]:
            if fd >= 0:
                self._signal(fd)
        self._lot.clear()
        self._execs.kill()
        os._exit(0)

    # -- the worker

    def _boot(self, message: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if self._namespaced:
                tree.build(message["binds"], uid=message["uid"] or 0, writable_bytes=message["writable_bytes"])
            self._confinement = child.Confinement(uid=message["uid"], limits=message["limits"], env=message["env"], work=message["work"])
            self._boot_log = self._recorder.open(self._slot)
            ends = self._recorder.pipes_into(self._boot_log, self._boot_pipes)
            streams = {"stdout": ends[0], "stderr": ends[1], "control": theirs.fileno()}
            self._worker_pid = child.execute(
                message["argv"], self._confinement, env=message["env"], cgroup=child.Cgroup(**message["cgroup"]), **streams
            )
            wire.close_all(ends)
        except OSError as e:
            self._tell({"event": "boot_failed", "message": str(e)})
            return
        finally:
            theirs.close()
        self._worker_pidfd = os.pidfd_open(self._worker_pid)
        self._worker_state = "booting"
        self._worker = Peer(ours, self._poller, self._hear, lambda: None)
        self._tell({"event": "booted", "pid": self._worker_pid}, self._worker_pidfd)

    def _hear(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """From the worker. User code shares the descriptor: what is not our protocol is dropped, never trusted."""
        try:
            self._believe(message, fds)
        except (KeyError, TypeError, ValueError):
            return
        finally:
            wire.close_all(fds)

    def _believe(self, message: Mapping[str, Any], fds: list[int]) -> None:
        event = message["event"]
        if self._lot.hear(message, fds):
            return
        process = self._processes.get(str(message.get("instance"))) or self._once_parked(str(message.get("instance")))
        if event == "snapshot_point" and self._worker_state == "booting":
            self._worker_state = "resident"
            threads = [*message["threads"], *(f"process {name}" for name in self._strays())]
            self._snapshot_point = {"threads": threads, "phases_ms": message["phases_ms"], "joins": message.get("joins", False)}
            self._tell({"event": "snapshot_point", **self._snapshot_point})
        elif event == "failed":
            if process is None:
                self._failure = message
            self._tell(message)
        elif event == "forked" and process is not None and process.state == "asked":
            pidfd = os.dup(fds[0]) if fds else os.pidfd_open(message["pid"])
            self._on_forked(process, int(message["pid"]), pidfd, joined=self._joins(process))
        elif event == "ready" and process is not None and process.state == "forked":
            process.state, process.phases_ms = "ready", message["phases_ms"]
            process.leave_desk()
            self._tell({"event": "ready", "instance": process.id, "phases_ms": process.phases_ms})
        elif event == "exited" and process is not None and process.dead_at is not None:
            self._finish(process, int(message["status"]))
        elif event == "exited" and process is not None:
            process.status = int(message["status"])  # it came before the pidfd's own news

    def _strays(self) -> list[str]:
        """Processes that user code left running before the snapshot point: in a Template nobody would pay for them."""
        return tree.others({os.getpid(), self._worker_pid}) if self._namespaced else []

    # -- instances

    def _park(self, message: Mapping[str, Any]) -> None:
        name, cgroup = message["parked"], child.Cgroup(**message["cgroup"])
        try:
            if self._worker_state != "resident" or self._worker is None:
                raise ProcessLookupError
            joins = bool(self._snapshot_point.get("joins")) and bool(cgroup.tasks)
            self._lot.park(name, self._worker, cgroup, joins=joins)
        except OSError:
            self._tell({"event": "parked_gone", "parked": name})

    def _once_parked(self, name: str) -> Process | None:
        """The instance that the parked fork of that name became: the Template knows it by no other."""
        return next((p for p in self._processes.values() if p.parked == name), None)

    def _start(self, message: Mapping[str, Any], listener: int) -> None:
        instance, in_place = message["instance"], message["in_place"]
        if self._worker_state != "resident" or self._worker is None or instance in self._processes:
            os.close(listener)
            self._tell({"event": "exited", "instance": instance, "status": None, "lost": True})
            return
        log = self._recorder.open(instance)
        process = Process(
            id=instance, env=message["env"], note=message["note"], cgroup=child.Cgroup(**message["cgroup"]), log=log, pipes=[]
        )
        self._processes[instance] = process
        parked = self._lot.take(message["parked"]) if message.get("parked") else None
        op = "serve" if in_place else "fork"
        try:
            ends = self._recorder.pipes_into(log, process.pipes)
            if parked is not None:
                self._assign(process, parked, [listener, *ends])
                return
            go_read, process.go = os.pipe2(os.O_CLOEXEC)
            self._worker.push(
                {"op": op, "instance": instance, "env": message["env"]},
                [listener, *ends, go_read, *(process.cgroup.open_tasks() if self._joins(process) and not in_place else ())],
            )
        except (OSError, wire.MessageTooLong):
            self._finish(process, None)
            return
        if in_place:
            self._worker_state = "serving"
            self._on_forked(process, self._worker_pid, os.dup(self._worker_pidfd), joined=True)

    def _assign(self, process: Process, parked: Parked, fds: list[int]) -> None:
        """A parked fork becomes the instance. Takes ownership of both. Raises OSError, wire.MessageTooLong; then it dies."""
        process.parked, process.pid, process.pidfd = parked.name, parked.pid, os.dup(parked.pidfd)
        try:
            wire.send(parked.channel, wire.encode({"op": "assign", "instance": process.id, "env": process.env}), fds)
            process.desk = parked.channel.dup()
        except (OSError, wire.MessageTooLong):
            self._signal(process.pidfd)
            raise
        finally:
            wire.close_all(fds)
            parked.close()
        self._on_forked(process, parked.pid, process.pidfd, joined=True)

    def _on_forked(self, process: Process, pid: int, pidfd: int, *, joined: bool) -> None:
        process.state, process.pid, process.pidfd = "forked", pid, pidfd
        self._poller.watch(pidfd, lambda _: self._on_gone(process))
        self._tell({"event": "forked", "instance": process.id}, pidfd)
        try:
            if not joined:
                child.enter(process.cgroup.procs, pid)
        except OSError:
            process.doomed = True  # without its limits it must not run; a pid that is gone already ends the same way
        if process.doomed:
            self._signal(pidfd)
        if process.go >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(process.go, b"\n")
            os.close(process.go)
            process.go = -1

    def _joins(self, process: Process) -> bool:
        """Whether the fork enters its groups by itself (the worker said that it can, the groups are of the kind)."""
        return bool(self._snapshot_point.get("joins")) and bool(process.cgroup.tasks)

    def _kill(self, instance: str) -> None:
        process = self._processes.get(instance)
        if process is None:
            return
        process.doomed = True
        if process.pidfd >= 0:
            self._signal(process.pidfd)

    @staticmethod
    def _signal(pidfd: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _on_gone(self, process: Process) -> None:
        """The pidfd says that it is dead. Its parent knows the status: we, or the Template, which reports it."""
        self._poller.unwatch(process.pidfd)
        process.dead_at = time.monotonic()
        if process.status is not None:
            self._finish(process, process.status)

    def _give_up_waiting(self, now: float) -> None:
        for process in list(self._processes.values()):
            if process.state != "gone" and process.dead_at is not None and now - process.dead_at > _STATUS_PATIENCE_S:
                self._finish(process, None)

    def _finish(self, process: Process, status: int | None) -> None:
        if process.state == "gone":
            return
        process.state, process.status, process.env = "gone", status, {}
        self._recorder.finish(process.log, process.pipes)
        for fd in (process.go, process.pidfd):
            if fd >= 0:
                self._poller.unwatch(fd)
                os.close(fd)
        process.pidfd = process.go = -1
        self._tell({"event": "exited", "instance": process.id, "status": status, "lost": process.leave_desk()})

    def _reap(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._on_reaped(pid, status)

    def _on_reaped(self, pid: int, status: int) -> None:
        if self._execs.reaped(pid, status):
            return
        if pid == self._worker_pid:
            self._on_worker_exit(status)
        for process in list(self._processes.values()):
            if process.pid == pid and process.state != "gone":
                self._finish(process, status)

    def _on_worker_exit(self, status: int) -> None:
        if self._worker is not None:
            self._worker.read_all()  # what it said before it died counts, a failure report above all
        self._worker_state, self._worker_status, self._worker_pid = "dead", status, 0
        for pipe in self._boot_pipes:
            pipe.drain()
        self._lot.clear()
        self._tell({"event": "worker_exited", "status": status})
        for process in list(self._processes.values()):
            if process.state == "asked":
                self._finish(process, None)

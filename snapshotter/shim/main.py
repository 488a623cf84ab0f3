"""PID 1 of a slot: boots or restores the worker, reaps children, captures logs, reports events, and
survives the agent.

Without a connected agent it ends itself once `shim.sock` has been removed: no agent can find it
again.

One thread, one poll loop, standard library only. It holds all state that a restarted agent needs:
the agent connects to `shim.sock`, requests `state`, and continues. Only the most recent agent
connection is served.

Agent → shim (`op`): boot, furnish, revive, prove, start, park, unpark, note, kill, kill_worker,
exec, exec_kill, checkpoint, checkpoint_end, criu, pages, criu_kill, keep_files, forget, state,
shutdown.
Shim → agent (`event`): booted, boot_failed, furnished, revived, revive_failed, proved,
snapshot_point, failed, forked, ready, exited, parked, parked_gone, worker_exited, exec_exited,
quiesced, checkpoint_failed, checkpoint_gone, criu, criu_exited, files_kept, files_failed,
log_dropped, state, instance, state_end. Shim ↔ worker: docs/reference/internals/shim.md.

Parts: `worker`, `instances`, `parked_forks`, `quiescer` (the process that is quiesced for a dump),
`criu_processes`, `exec_processes`.
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

from snapshotter.shim import child, messages, seqpacket
from snapshotter.shim.criu_processes import CriuProcesses
from snapshotter.shim.event_loop import Peer, Poller
from snapshotter.shim.exec_processes import ExecProcesses
from snapshotter.shim.instances import ShimInstances, failure_of
from snapshotter.shim.log_capture import LogCapture
from snapshotter.shim.parked_forks import ParkedForks
from snapshotter.shim.quiescer import Quiescer
from snapshotter.shim.worker import ShimWorker

_Message = Mapping[str, Any]
_ORPHAN_CHECK_S = 1.0
"""How often a shim without an agent checks that its socket still has its name."""
_WORKER_EVENTS = ("snapshot_point", "forked", "parked", "ready", "failed", "exited", "proved")
"""Events that a worker may send on its control channel."""


class Shim:
    """One slot: routes messages between the agent, the worker and the parts. Owner: the loop in
    `run`."""

    def __init__(
        self,
        *,
        slot: str,
        listener: socket.socket,
        directory: int,
        log_directory: int,
        log_max_bytes: int,
        root: str,
        disk_floor_bytes: int = 0,
    ) -> None:
        """`directory`: descriptor of the slot's directory, where `listener` is bound as
        `shim.sock`. `root`: directory of the slot's root (`mounts.prepare`); "": the slot has no
        namespaces."""
        self._slot = slot
        self._listener = listener
        self._directory = directory
        self._namespaced = bool(root)
        self._agent: Peer | None = None
        self._poller = Poller()
        recorder = LogCapture(
            self._poller,
            self._notify,
            directory=log_directory,
            max_bytes=log_max_bytes,
            floor_bytes=disk_floor_bytes,
        )
        self._worker = ShimWorker(
            slot, poller=self._poller, recorder=recorder, notify=self._notify, root=root
        )
        self._parked_forks = ParkedForks(self._poller, self._notify)
        self._shim_instances = ShimInstances(
            self._worker,
            self._parked_forks,
            poller=self._poller,
            recorder=recorder,
            notify=self._notify,
        )
        self._quiescer = Quiescer(self._worker, self._poller, self._notify)
        self._criu_processes = CriuProcesses(
            self._notify,
            stdio=self._worker.pipes,
            ended=self._quiescer.dump_ended,
            pages_lost=self._on_pages_lost,
        )
        self._execs = ExecProcesses(self._notify)

    def __repr__(self) -> str:
        return f"<Shim {self._slot} {self._worker!r} {self._shim_instances!r} {self._quiescer!r}>"

    def run(self) -> None:
        """Serve until `shutdown`."""
        if self._namespaced:
            socket.sethostname(
                self._slot
            )  # instances restored from one image must not share a host name
        wakeup = self._catch_children()
        self._poller.watch(wakeup, lambda _: self._reap(wakeup))
        self._listener.setblocking(False)
        self._poller.watch(self._listener.fileno(), lambda _: self._on_connection())
        while True:
            has_agent = self._agent is not None and self._agent.is_open
            timeout_s = self._shim_instances.poll_timeout_s()
            if timeout_s is None and not has_agent:
                timeout_s = _ORPHAN_CHECK_S
            self._poller.poll_once(timeout_s)
            self._shim_instances.finish_overdue(time.monotonic())
            if not has_agent and self._is_removed():
                self._shutdown()

    def _is_removed(self) -> bool:
        """Whether the slot's socket has been removed, for example by an agent that did not wait for
        this process any longer."""
        try:
            os.stat("shim.sock", dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

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
                self._on_agent_lost()
            self._agent = Peer(connection, self._poller, self._on_order, self._on_agent_lost)

    def _on_agent_lost(self) -> None:
        """End what only the lost agent could finish: a dump, or an incomplete restore."""
        self._criu_processes.kill_connected()
        self._quiescer.end()
        self._worker.kill_leftovers()

    def _notify(self, message: _Message, *fds: int) -> None:
        """Send to the agent, if connected. The shim keeps the descriptors: duplicates are sent."""
        if self._agent is not None and self._agent.is_open:
            try:
                self._agent.push(message, [os.dup(fd) for fd in fds if fd >= 0])
            except OSError:
                self._agent.close()
                self._on_agent_lost()

    def _on_order(self, message: _Message, fds: list[int]) -> None:
        """Handle a request. An invalid one, for example from another version of the agent, closes
        the connection but must not end the slot."""
        try:
            self._orders[message["op"]](message, fds)
        except (ValueError, LookupError, TypeError) as e:
            print(
                f"{self!r}: closing the agent's connection: {type(e).__name__}: {e}",
                file=sys.stderr,
                flush=True,
            )
            raise ConnectionAbortedError from e
        finally:
            seqpacket.close_all(fds)

    @functools.cached_property
    def _orders(self) -> Mapping[str, Callable[[_Message, list[int]], None]]:
        """Handlers of requests. A handler removes the descriptors that it takes over from the list;
        the others are closed afterwards."""
        return {
            "boot": lambda m, _: self._worker.boot(m, self._on_worker_message),
            "furnish": lambda m, fds: self._worker.prepare_restore(m, fds[0], fds[1]),
            "revive": lambda m, _: self._worker.resume(m, self._on_worker_message),
            "prove": lambda m, _: self._worker.check_examples(m),
            "start": lambda m, fds: self._shim_instances.start(m, fds.pop(0)),
            "park": lambda m, _: self._park(m),
            "unpark": lambda *_: self._parked_forks.clear(),
            "note": lambda m, _: self._shim_instances.store_note(m),
            "kill": lambda m, _: self._shim_instances.kill(m["instance"]),
            "kill_worker": lambda *_: self._worker.kill(),
            "exec": self._execute,
            "exec_kill": lambda m, _: self._execs.kill(m["exec"]),
            "checkpoint": self._quiescer.start,
            "checkpoint_end": lambda m, _: self._quiescer.end(m["checkpoint"]),
            "criu": self._criu_processes.start,
            "pages": self._criu_processes.serve_pages,
            "criu_kill": lambda m, _: self._criu_processes.kill(m["run"]),
            "keep_files": lambda m, fds: self._quiescer.save_files(m["checkpoint"], fds[0]),
            "forget": lambda m, _: self._shim_instances.acknowledge_exit(m["instance"]),
            "state": lambda *_: self._report_state(),
            "shutdown": lambda *_: self._shutdown(),
        }

    def _execute(self, message: _Message, fds: list[int]) -> None:
        stdout, stderr = fds
        fds.clear()
        self._execs.start(
            message,
            self._shim_instances.get(message["instance"]),
            self._worker.confinement,
            stdout,
            stderr,
        )

    def _park(self, message: _Message) -> None:
        name, cgroup = message["parked"], child.Cgroup(**message["cgroup"])
        try:
            self._parked_forks.park(
                name,
                self._worker.ready_peer(),
                cgroup,
                joins=self._worker.joins and bool(cgroup.tasks),
            )
        except OSError:
            self._notify({"event": "parked_gone", "parked": name})

    def _report_state(self) -> None:
        worker = self._worker
        state = {
            "worker": worker.state,
            "pid": worker.pid,
            "point": worker.point,
            "failure": worker.failure,
            "status": worker.status,
        }
        own = os.pidfd_open(os.getpid())
        self._notify({"event": "state", **state}, own, worker.pidfd)
        os.close(own)
        self._shim_instances.report()
        self._notify({"event": "state_end"})

    def _shutdown(self) -> None:
        """Exit. As PID 1 this ends all processes of the namespace; without a PID namespace the
        known ones are killed."""
        self._worker.kill()
        self._shim_instances.kill_all()
        self._parked_forks.clear()
        self._execs.kill()
        os._exit(0)

    # -- the worker

    def _on_worker_message(self, message: _Message, fds: list[int]) -> None:
        """Handle a message of the worker. User code shares the channel: an invalid message must not
        end the slot's PID 1. Raises ValueError."""
        try:
            if message.get("event") not in _WORKER_EVENTS:
                raise ValueError("unknown event of a worker")
            self._route(message, fds)
        except OSError:
            return  # the process has exited
        except (LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as e:
            raise ValueError(f"invalid message: {type(e).__name__}") from e
        finally:
            seqpacket.close_all(fds)

    def _route(self, message: _Message, fds: list[int]) -> None:
        event, worker = message["event"], self._worker
        if (
            self._parked_forks.on_message(message, fds)
            or self._quiescer.on_message(message, fds)
            or self._shim_instances.on_message(message, fds)
        ):
            return
        if event == "snapshot_point" and worker.state == "booting":
            worker.reach_point(message)
        elif event == "failed" and worker.failure is None:
            worker.failure = failure_of(message)
            self._notify(worker.failure)
        elif event == "proved" and worker.state == "proving":
            proved = messages.proved_of(message)
            worker.state = "proven"
            self._notify({"event": "proved", **proved})

    def _on_pages_lost(self) -> None:
        """Kill the restored process and its forks: without its page server it would read zeros from
        memory that was not loaded."""
        self._parked_forks.clear()
        self._shim_instances.kill_all()
        self._worker.on_pages_lost()

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
        if self._execs.on_reaped(pid, status) or self._criu_processes.on_reaped(pid, status):
            return
        was_worker = pid == self._worker.pid
        if was_worker:
            self._worker.on_exit(status)
            self._parked_forks.clear()
            self._notify({"event": "worker_exited", "status": status})
        self._shim_instances.on_reaped(pid, status)
        if was_worker:
            self._shim_instances.on_worker_exit()

"""Life cycle of a pod: ask the node agent, boot or receive the worker, make it serve, forward
signals, reap children, exit with the worker's status.

    asking ──(cold, or code in the image and no agent)──▶ booting ──(snapshot point)──▶ waking
       └──(restored: the agent put the worker here)───────────────────────────────────────▲
    waking ──(ready)──▶ serving

One thread, one poll loop. The agent may disconnect and reconnect at any time; once a worker runs,
nothing that the agent does ends it. As PID 1 of its container, the launcher reaps the processes
that the worker leaves behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from pilotlight.core.transport.calls_socket import AGENT_SOCKET
from pilotlight.launcher.agent_connection import AgentConnection
from pilotlight.launcher.log import log_event
from pilotlight.launcher.pod_environment import InvalidPod, PodEnvironment
from pilotlight.launcher.work_dir import prepare_work_dir
from pilotlight.launcher.worker_process import WorkerProcess

NO_AGENT_S = 5.0
"""How long to wait for a node agent's socket before booting code from the image without an
agent."""
REPEAT_S = 10.0
"""Interval at which an unchanged reason for waiting is logged again."""
EX_UNAVAILABLE, EX_TEMPFAIL, EX_CONFIG = 69, 75, 78
"""Exit statuses (sysexits.h): the agent refused; the startup timeout expired; the pod configuration
is invalid."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Launcher:
    """Runs one pod. Owner: the process's only thread. `run` is called once."""

    def __init__(self, surroundings: PodEnvironment, *, began: float) -> None:
        """Bind the address at once, so that one in use is reported before anything is fetched.
        Raises InvalidPod."""
        self._surroundings = surroundings
        self._began = began
        self._deadline = began + surroundings.launch.startup_timeout_s
        self._listener = _bound(surroundings.host, surroundings.port)
        self._line = AgentConnection(surroundings.node / AGENT_SOCKET, self._announcement)
        self._worker: WorkerProcess | None = None
        self._state = "asking"
        self._phases_ms: dict[str, float] = {}
        self._kind = "COLD"
        self._said = ("", 0.0)
        self._ending = 0
        self._status: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Launcher {self._state} of {self._surroundings.launch.revision} {self._worker!r} "
            f"{self._line!r}>"
        )

    def run(self) -> int:
        """Run until the worker ends; return the exit status."""
        wakeup = _catch_signals()
        host, port = self._listener.getsockname()[:2]
        log_event(
            "launcher.begin",
            revision=self._surroundings.launch.revision,
            pod=self._surroundings.pod,
            listen=f"{host}:{port}",
        )
        while self._status is None:
            try:
                self._turn(wakeup)
            except InvalidPod as e:
                self._leave(EX_CONFIG, "launcher.misplaced", why=e)
        self._line.close()
        self._listener.close()
        return self._status

    # -- the loop

    def _turn(self, wakeup: int) -> None:
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        if self._line.fileno() >= 0:
            poll.register(
                self._line, select.POLLIN | (select.POLLOUT if self._line.wants_write else 0)
            )
        if self._worker is not None and self._worker.fileno() >= 0:
            poll.register(self._worker, select.POLLIN)
        poll.poll(self._patience_ms())
        with contextlib.suppress(BlockingIOError):
            for number in os.read(wakeup, 512):
                self._on_signal(number)
        if self._worker is not None and self._worker.fileno() >= 0:
            for message in self._worker.hear():
                self._on_worker(message)
            # a restored worker need not be a child of this process yet
            if self._kind == "RESTORE" and self._worker.fileno() < 0 and self._state != "serving":
                self._leave(
                    EX_TEMPFAIL, "launcher.lost", why="the restored worker ended before serving"
                )
        if self._status is None:
            for message in self._line.turn():
                self._on_agent(message)
        self._look_at_clocks()

    def _patience_ms(self) -> float:
        now = time.monotonic()
        ends = [self._deadline] if self._state != "serving" else []
        if not self._line.is_open:
            ends.append(self._line.next_at)
        if self._state == "asking":
            ends += [at for at in (self._began + NO_AGENT_S, self._said[1] + REPEAT_S) if at > now]
        return 1 + max(0.0, min((end - now for end in ends), default=60.0)) * 1000

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        if self._status is not None or self._state == "serving":
            return
        if self._state == "asking":
            if not self._line.is_open:
                self._say_waiting(self._line.why)
            code = (
                self._surroundings.baked_code()
                if self._line.is_missing and now > self._began + NO_AGENT_S
                else None
            )
            if code is not None and not self._surroundings.launch.weights:
                log_event(
                    "launcher.alone", why="no node agent: using the code in the image", code=code
                )
                self._boot(str(code), {}, {})
        if now > self._deadline:
            if self._worker is not None:
                self._worker.signal(signal.SIGKILL)
            what = self._said[0] if self._state == "asking" else f"the worker is {self._state}"
            self._leave(
                EX_TEMPFAIL,
                "launcher.timeout",
                startup_s=self._surroundings.launch.startup_timeout_s,
                waited_for=what,
            )

    def _say_waiting(self, why: str) -> None:
        now = time.monotonic()
        if why and (why != self._said[0] or now > self._said[1] + REPEAT_S):
            self._said = (why, now)
            log_event("launcher.wait", why=why, waited_s=now - self._began)

    def _leave(self, status: int, event: str, **fields: object) -> None:
        log_event(event, status=status, **fields)
        self._status = status

    # -- the agent

    def _announcement(self) -> Mapping[str, Any]:
        ours = self._surroundings
        who = {"pod": ours.pod, "namespace": ours.namespace, "gpus": ours.gpus}
        return {**who, "launch": ours.launch.to_json(), "running": self._state != "asking"}

    def _on_agent(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the agent. Messages to a pod that already runs are about its leases
        and need no action."""
        if self._state != "asking":
            return
        try:
            match message["op"]:
                case "wait":
                    self._say_waiting(str(message["why"]))
                case "refused":
                    self._leave(
                        EX_UNAVAILABLE,
                        "launcher.refused",
                        code=message["code"],
                        message=message["message"],
                    )
                case "cold":
                    self._boot(
                        str(message["code"]),
                        message.get("weights", {}),
                        message.get("phases_ms", {}),
                    )
                case "restored":
                    self._receive(message)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            log_event("launcher.not_understood", error=f"{type(e).__name__}: {e}", op=message["op"])

    def _waited(self, phases_ms: Mapping[str, float]) -> None:
        """Record the phases until now: those reported by the agent, and the remaining time as
        waiting for the agent."""
        spent = {str(name): float(ms) for name, ms in phases_ms.items()}
        total = (time.monotonic() - self._began) * 1000
        self._phases_ms = {"agent": round(max(0.0, total - sum(spent.values())), 3), **spent}

    def _boot(self, code: str, weights: Mapping[str, str], phases_ms: Mapping[str, float]) -> None:
        self._waited(phases_ms)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        node = self._surroundings.node  # the agent's paths are relative to it, or absolute
        places = {str(name): str(node / path) for name, path in weights.items()}
        command = prepare_work_dir(
            self._surroundings, code=node / code, weights=places, control_fd=theirs.fileno()
        )
        self._worker = WorkerProcess.boot(command, ours, theirs)
        self._state = "booting"
        log_event(
            "launcher.boot",
            revision=self._surroundings.launch.revision,
            pid=self._worker.pid,
            **_told(self._phases_ms),
        )

    def _receive(self, message: Mapping[str, Any]) -> None:
        """Take over a worker that was restored in this container at its snapshot point. Its control
        channel arrives with the message."""
        if not self._line.fds:
            raise ValueError("a restored worker arrived without its control channel")
        control = socket.socket(fileno=self._line.fds.pop(0))
        self._waited(message.get("phases_ms", {}))
        self._worker, self._kind = WorkerProcess(int(message["pid"]), control), "RESTORE"
        log_event(
            "launcher.restored",
            revision=self._surroundings.launch.revision,
            pid=self._worker.pid,
            **_told(self._phases_ms),
        )
        self._wake()

    # -- the worker

    def _on_worker(self, message: Mapping[str, Any]) -> None:
        event = message.get("event")
        phases_ms = message.get("phases_ms")
        if event == "snapshot_point" and self._state == "booting":
            self._phases_ms.update(phases_ms or {})
            self._wake()
        elif event == "failed":
            error = message.get("error") or {}
            log_event(
                "launcher.failed",
                phase=message.get("phase"),
                type=error.get("type"),
                message=error.get("message"),
            )
        elif event == "ready" and self._state == "waking":
            self._phases_ms.update(phases_ms or {})
            self._state = "serving"
            self._listener.close()
            log_event(
                "launcher.ready",
                start=self._kind,
                took_s=time.monotonic() - self._began,
                **_told(self._phases_ms),
            )
            self._line.send({"op": "ready", "start_kind": self._kind, "phases_ms": self._phases_ms})

    def _wake(self) -> None:
        if self._worker is None:
            raise InvalidPod("there is no worker to wake")
        self._state = "waking"
        if self._ending:  # the worker ignored the signal while it started
            self._worker.signal(signal.SIGKILL)
            return
        start = {"kind": self._kind, "phases_ms": self._phases_ms}
        try:
            # with the socket of this pod: a restored worker has that of its snapshot
            env = {**self._surroundings.secrets, **self._surroundings.calls_env()}
            self._worker.serve(self._surroundings.pod, self._listener, env, start=start)
        except ConnectionError:
            return  # the worker has ended; its exit status says why
        except OSError as e:
            self._worker.signal(signal.SIGKILL)
            raise InvalidPod(
                f"the secrets cannot be sent to the worker: {e.strerror or e}; all together must "
                f"not exceed 128 KiB"
            ) from e

    # -- signals and ends

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif self._worker is None:
            self._leave(128 + number, "launcher.exit", signal=signal.Signals(number).name)
        else:
            self._ending = number
            self._worker.signal(number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._worker is not None and pid == self._worker.pid:
                self._on_exit(status)

    def _on_exit(self, status: int) -> None:
        if self._worker is not None and self._worker.fileno() >= 0:
            for message in self._worker.hear():  # its last messages, such as a failure
                self._on_worker(message)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self._leave(
                128 + number, "launcher.exit", signal=signal.Signals(number).name, state=self._state
            )
        else:
            if self._state == "serving" and not os.WEXITSTATUS(status):
                self._line.send({"op": "ended"})
            self._leave(os.WEXITSTATUS(status), "launcher.exit", state=self._state)


def _bound(host: str, port: int) -> socket.socket:
    """Bind a socket without listening: until the worker listens, connections are refused at once
    and no probe waits."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as e:
        raise InvalidPod(
            f"PILOTLIGHT_LISTEN: {host!r} is not an address of this pod: {e.strerror or e}"
        ) from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        listener.close()
        raise InvalidPod(
            f"PILOTLIGHT_LISTEN: {host}:{port} cannot be bound: {e.strerror or e}"
        ) from e
    return listener


def _catch_signals() -> int:
    """Install signal handlers; return a descriptor from which signal numbers can be read."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_FORWARDED):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return readable


def _told(phases_ms: Mapping[str, float]) -> dict[str, object]:
    return {f"{name}_ms": float(ms) for name, ms in phases_ms.items()}

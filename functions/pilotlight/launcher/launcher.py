"""Life cycle of a pod: ask the node agent, boot or receive the worker, make it serve, forward
signals, reap children, exit with the worker's status.

    warm ──(promoted by its activator, `control_port`; the container has the memory of the
            function)──▶ asking
    asking ──(cold, or code in the image and no agent)──▶ booting ──(snapshot point)──▶ waking
       ├──(booted: the agent started the worker in its own image)──▲                      ▲
       └──(restored: the agent put the worker here)───────────────────────────────────────┘
    waking ──(ready)──▶ serving

In a pod with a control port and room for several instances, the worker stays at its snapshot point
as the Template, and all instances are forks of it; the pod then ends with the Template and the last
instance. Where it cannot be forked (GPUs, engines, threads, processes of its own) it serves in
place.

One thread, one poll loop. The agent may disconnect and reconnect at any time; once a worker runs,
nothing that the agent does ends it. As PID 1 of its container, the launcher reaps the processes
that the worker leaves behind."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.core.transport.calls_socket import AGENT_SOCKET
from pilotlight.launcher.agent_connection import AgentConnection
from pilotlight.launcher.control_port import ControlPort, Refused
from pilotlight.launcher.instance_control import InstanceControl
from pilotlight.launcher.log import log_event
from pilotlight.launcher.memory_limit import group_limit, memory_limit, room
from pilotlight.launcher.pod_control import PodControl
from pilotlight.launcher.pod_environment import InvalidPod, PodEnvironment, PodPlace
from pilotlight.launcher.pod_instances import MAX_FORKS, PodInstance, PodInstances, exit_status
from pilotlight.launcher.work_dir import command_in_tree, prepare_work_dir
from pilotlight.launcher.worker_process import WorkerProcess, close_all
from snapshotter.types import VISIBLE_DEVICES, LaunchSpec

NO_AGENT_S = 5.0
"""How long to wait for a node agent's socket before booting code from the image without an
agent."""
GROW_S = 2.0
"""How long a promoted pod that is smaller than its function waits until its container has grown,
for which its kubelet has set the memory aside."""
GROW_POLL_S = 0.01
"""No event tells of a changed limit."""
REPEAT_S = 10.0
"""Interval at which an unchanged reason for waiting is logged again."""
STATUS_S = 1.0
"""How long to wait for the exit status of a worker that the agent booted: its first parent may have
got it."""
EX_UNAVAILABLE, EX_TEMPFAIL, EX_CONFIG = 69, 75, 78
"""Exit statuses (sysexits.h): the agent refused; the startup timeout expired; the pod configuration
is invalid."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Launcher:
    """Runs one pod. Owner: the process's only thread. `run` is called once."""

    def __init__(self, place: PodPlace, *, began: float) -> None:
        """Bind the addresses at once, so that one in use is reported before anything is fetched.
        Raises InvalidPod."""
        self._place = place
        self._began = began
        self._deadline = math.inf
        self._listener = _bound(place.host, place.port)
        self._line = AgentConnection(place.node / AGENT_SOCKET, self._announcement)
        self._control: ControlPort | None = None
        self._worker: WorkerProcess | None = None
        self._state = "warm"
        self._is_known = False
        self._phases_ms: dict[str, float] = {}
        self._kind = "COLD"
        self._is_received = False
        self._lost_at = math.inf
        self._said = ("", 0.0)
        self._ending = 0
        self._status: int | None = None
        self._instances = PodInstances(place.host, place.port)
        self._grows_until: float | None = None
        self._resize_ms = 0.0
        self._has_template = False
        self._worker_has_ended = False
        if isinstance(place, PodEnvironment):
            self._begin(place)
        elif place.control is not None:
            of_instances = InstanceControl(
                self._instances,
                self._fork,
                has_template=lambda: self._has_template and not self._worker_has_ended,
            )
            answers = PodControl(self._promote, self._state_for_probes, of_instances.answers)
            self._control = ControlPort(_bound(*place.control), answers.answer)

    def __repr__(self) -> str:
        return f"<Launcher {self._state} of {self._revision} {self._worker!r} {self._line!r}>"

    @property
    def _surroundings(self) -> PodEnvironment:
        """The pod once it knows what it runs."""
        assert isinstance(self._place, PodEnvironment)
        return self._place

    @property
    def _revision(self) -> str:
        place = self._place
        return place.launch.revision if isinstance(place, PodEnvironment) else "none"

    def run(self) -> int:
        """Run until the worker ends; return the exit status."""
        wakeup = _catch_signals()
        host, port = self._listener.getsockname()[:2]
        log_event(
            "launcher.begin",
            revision=self._revision,
            pod=self._place.pod,
            listen=f"{host}:{port}",
            **({"control": self._control.address} if self._control is not None else {}),
        )
        while self._status is None:
            try:
                self._turn(wakeup)
            except InvalidPod as e:
                self._exit_with(EX_CONFIG, "launcher.misplaced", why=e)
        self._line.close()
        self._listener.close()
        if self._control is not None:
            self._control.close()
        return self._status

    def _begin(self, surroundings: PodEnvironment) -> None:
        """Begin the start of a launch document."""
        self._place = surroundings
        self._state = "asking"
        self._deadline = self._began + surroundings.launch.startup_timeout_s

    def _room(self) -> int:
        """How many instances the pod holds now: a promoted pod is resized while it starts."""
        if self._place.control is None:
            return 1
        return room(self._surroundings.launch.memory_bytes, memory_limit(), most=MAX_FORKS + 1)

    # -- warm

    def _promote(self, launch: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """Run this launch document, once. Raises InvalidPod."""
        surroundings = PodEnvironment.at(self._place, launch, secrets)
        self._began = time.monotonic()
        self._begin(surroundings)
        log_event("launcher.promoted", revision=launch.revision)
        if self._is_too_small():
            self._grows_until = self._began + GROW_S
        else:
            self._line.announce()

    def _is_too_small(self) -> bool:
        limit = group_limit()
        return limit is not None and limit < self._surroundings.launch.memory_bytes

    def _state_for_probes(self) -> tuple[str, bool]:
        """The state, and whether the pod can be promoted, or was."""
        is_waiting = self._state == "warm"
        return self._state, not is_waiting or (self._is_known and self._line.is_open)

    # -- the loop

    def _turn(self, wakeup: int) -> None:
        orphans = self._instances.pidfds() if self._worker_has_ended else []
        ready = self._wait(wakeup, *orphans)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(wakeup, 512):
                self._on_signal(number)
        for orphan in ready.intersection(orphans):
            self._on_ended(self._instances.end_orphan(orphan))
        if self._worker is not None and self._worker.fileno() >= 0:
            self._on_worker_message(self._worker)
            # a worker of the agent's need not be a child of this process yet
            if self._is_received and self._worker.fileno() < 0:
                self._lost_at = time.monotonic() + (STATUS_S if self._kind == "COLD" else 0.0)
        if self._control is not None:
            self._control.turn()
        if self._status is None:
            for message in self._line.turn():
                self._on_agent(message)
        if self._control is not None:
            self._control.turn()
        self._check_clocks()

    def _wait(self, *descriptors: int) -> set[int]:
        """Wait for an event; returns the descriptors that are ready."""
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        if self._line.fileno() >= 0:
            poll.register(
                self._line, select.POLLIN | (select.POLLOUT if self._line.wants_write else 0)
            )
        if self._worker is not None and self._worker.fileno() >= 0:
            poll.register(self._worker, select.POLLIN)
        if self._control is not None:
            self._control.register(poll)
        return {descriptor for descriptor, _ in poll.poll(self._patience_ms())}

    def _patience_ms(self) -> float:
        now = time.monotonic()
        ends = [now + 60.0]
        if self._state not in ("warm", "serving"):
            ends += [self._deadline, self._lost_at]
        if self._control is not None:
            ends.append(self._control.next_at)
        if not self._line.is_open:
            ends.append(self._line.next_at)
        if self._grows_until is not None:
            ends.append(now + GROW_POLL_S)
        if self._state in ("warm", "asking"):
            ends += [at for at in (self._began + NO_AGENT_S, self._said[1] + REPEAT_S) if at > now]
        if (at := self._instances.next_at()) is not None:
            ends.append(at)
        return 1 + max(0.0, min(ends) - now) * 1000

    def _check_clocks(self) -> None:
        now = time.monotonic()
        self._instances.kill_overdue(now)
        if self._status is not None or self._state == "serving":
            return
        self._check_size(now)
        if self._state in ("warm", "asking") and not self._line.is_open:
            self._log_waiting(self._line.why)
        if self._state == "asking" and self._line.is_missing and now > self._began + NO_AGENT_S:
            self._boot_alone()
        if now >= self._lost_at:
            self._exit_with(EX_TEMPFAIL, "launcher.lost", why="the worker ended before serving")
        elif now > self._deadline:
            if self._worker is not None:
                self._worker.signal(signal.SIGKILL)
            what = self._said[0] if self._state == "asking" else f"the worker is {self._state}"
            self._exit_with(
                EX_TEMPFAIL,
                "launcher.timeout",
                startup_s=self._surroundings.launch.startup_timeout_s,
                waited_for=what,
            )

    def _check_size(self, now: float) -> None:
        """Go on with a promotion once the container has grown, or has not in time."""
        if self._grows_until is None or (now <= self._grows_until and self._is_too_small()):
            return
        if now > self._grows_until:
            log_event("launcher.small", limit=group_limit(), waited_s=now - self._began)
        self._grows_until = None
        self._resize_ms = round((now - self._began) * 1000, 3)
        self._line.announce()

    def _boot_alone(self) -> None:
        """Boot the code in the image, without a node agent, where that is all that is needed."""
        code = self._surroundings.baked_code()
        if code is not None and not self._surroundings.launch.weights:
            log_event("launcher.alone", why="no node agent: using the code in the image", code=code)
            self._boot(str(code), {}, {})

    def _log_waiting(self, why: str) -> None:
        now = time.monotonic()
        if why and (why != self._said[0] or now > self._said[1] + REPEAT_S):
            self._said = (why, now)
            log_event("launcher.wait", why=why, waited_s=now - self._began)

    def _exit_with(self, status: int, event: str, **fields: object) -> None:
        log_event(event, status=status, **fields)
        self._status = status

    # -- the agent

    def _announcement(self) -> Mapping[str, Any]:
        ours = self._place
        who = {"pod": ours.pod, "namespace": ours.namespace, "gpus": ours.gpus}
        self._is_known = False
        if not isinstance(ours, PodEnvironment):
            return who
        return {
            **who,
            "launch": ours.launch.to_json(),
            "running": self._state != "asking",
            "receives_booted": True,
        }

    def _on_agent(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the agent. Messages to a pod that already runs are about its leases
        and need no action."""
        if self._state not in ("warm", "asking"):
            return
        try:
            match message["op"]:
                case "warm":
                    self._is_known = True
                case "wait":
                    self._log_waiting(str(message["why"]))
                case "refused":
                    self._exit_with(
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
                        message.get("tree"),
                    )
                case "restored" | "booted" as op:
                    self._receive(message, is_restored=op == "restored")
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            log_event("launcher.not_understood", error=f"{type(e).__name__}: {e}", op=message["op"])

    def _waited(self, phases_ms: Mapping[str, float]) -> None:
        """Record the phases until now: growing, those reported by the agent, and the remaining time
        as waiting for the agent."""
        spent = {"resize": self._resize_ms} if self._resize_ms else {}
        spent |= {str(name): float(ms) for name, ms in phases_ms.items()}
        total = (time.monotonic() - self._began) * 1000
        self._phases_ms = {"agent": round(max(0.0, total - sum(spent.values())), 3), **spent}

    def _boot(
        self,
        code: str,
        weights: Mapping[str, str],
        phases_ms: Mapping[str, float],
        tree: Mapping[str, Any] | None = None,
    ) -> None:
        """Boot a worker with the image's packages, or with those that the agent has shown in a
        tree of its own."""
        self._waited(phases_ms)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        node = self._surroundings.node  # the agent's paths are relative to it, or absolute
        places = {str(name): str(node / path) for name, path in weights.items()}
        if tree is not None:
            command = command_in_tree(self._surroundings, tree)
        else:
            command = prepare_work_dir(
                self._surroundings, code=node / code, weights=places, control_fd=theirs.fileno()
            )
        self._worker = WorkerProcess.boot(command, ours, theirs)
        self._state = "booting"
        log_event(
            "launcher.boot",
            revision=self._surroundings.launch.revision,
            pid=self._worker.pid,
            **_format_phases(self._phases_ms),
        )

    def _receive(self, message: Mapping[str, Any], *, is_restored: bool) -> None:
        """Take over a worker that the agent put into this container: restored at its snapshot
        point, or booted in its own root directory. Its control channel arrives with the message."""
        if not self._line.fds:
            raise ValueError("a worker arrived without its control channel")
        control = socket.socket(fileno=self._line.fds.pop(0))
        self._waited(message.get("phases_ms", {}))
        self._worker, self._is_received = WorkerProcess(int(message["pid"]), control), True
        log_event(
            f"launcher.{'restored' if is_restored else 'booted'}",
            revision=self._surroundings.launch.revision,
            pid=self._worker.pid,
            **_format_phases(self._phases_ms),
        )
        if is_restored:
            self._kind = "RESTORE"
            self._wake()
        else:
            self._state = "booting"

    # -- the worker

    def _on_worker_message(self, worker: WorkerProcess) -> None:
        for message, fds in worker.hear():
            try:
                self._on_worker(message, fds)
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                log_event("launcher.not_understood", error=f"{type(e).__name__}: {e}")
            finally:
                close_all(fds)

    def _on_worker(self, message: Mapping[str, Any], fds: list[int]) -> None:
        event = message.get("event")
        phases_ms = message.get("phases_ms")
        if event == "failed":
            error = message.get("error") or {}
            log_event(
                "launcher.failed",
                phase=message.get("phase"),
                type=error.get("type"),
                message=error.get("message"),
            )
        if event == "snapshot_point" and self._state == "booting":
            self._phases_ms.update(phases_ms or {})
            self._wake(threads=message.get("threads") or ())
        elif (one := self._instances.on_message(message, fds)) is None:
            return
        elif one.state == "ended":
            self._on_ended(one)
        elif self._state == "waking":
            self._phases_ms.update(phases_ms or {})
            self._state = "serving"
            self._listener.close()
            log_event(
                "launcher.ready",
                start=self._kind,
                took_s=time.monotonic() - self._began,
                **_format_phases(self._phases_ms),
            )
            self._line.send({"op": "ready", "start_kind": self._kind, "phases_ms": self._phases_ms})
        else:
            log_event(
                "launcher.ready",
                start="FORK",
                instance=one.name,
                port=one.port,
                took_s=time.monotonic() - one.began,
                **_format_phases(phases_ms or {}),
            )

    def _wake(self, threads: Sequence[object] = ()) -> None:
        """Make the first instance: a fork of the worker if others may follow, else the worker."""
        if self._worker is None:
            raise InvalidPod("there is no worker to wake")
        self._state = "waking"
        launch = self._surroundings.launch
        self._has_template = (
            self._room() > 1
            and launch.forkable
            and not launch.gpu_count
            and launch.engine is None
            and not threads
            and not self._worker.has_children()
        )
        self._start_first(self._worker)

    def _start_first(self, worker: WorkerProcess) -> None:
        if self._ending:  # the worker ignored the signal while it started
            worker.signal(signal.SIGKILL)
            return
        start = {"kind": self._kind, "phases_ms": self._phases_ms}
        # with the socket of this pod: a restored worker has that of its snapshot
        env = {**self._surroundings.secrets, **self._surroundings.calls_env()}
        if self._kind == "RESTORE" and self._place.gpus:  # it has those of its snapshot
            env[VISIBLE_DEVICES] = ",".join(self._place.gpus)
        try:
            self._instances.start(
                worker,
                self._surroundings.pod,
                self._listener,
                env,
                start=start,
                in_place=not self._has_template,
                within_s=self._surroundings.launch.startup_timeout_s,
            )
        except ConnectionError:
            return  # the worker has ended; its exit status says why
        except OSError as e:
            worker.signal(signal.SIGKILL)
            raise InvalidPod(
                f"the secrets cannot be sent to the worker: {e.strerror or e}; all together must "
                f"not exceed 128 KiB"
            ) from e

    # -- further instances

    def _fork(self, name: str, secrets: Mapping[str, str]) -> int:
        """Make a further instance; returns its port. Raises Refused."""
        if self._worker is None:
            raise Refused(409, "the pod has no worker")
        if why := self._why_no_fork():
            raise Refused(409 if self._state == "serving" else 503, why)
        launch = self._surroundings.launch
        if missing := [one for one in launch.secret_variables if one not in secrets]:
            raise Refused(400, f"the secret variables {', '.join(missing)} are missing")
        env = {one: secrets[one] for one in launch.secret_variables}
        try:
            with self._instances.listen() as listener:
                port: int = listener.getsockname()[1]
                self._instances.start(
                    self._worker,
                    name,
                    listener,
                    {**env, **self._surroundings.calls_env()},
                    start={"kind": "FORK", "phases_ms": {}},
                    in_place=False,
                    within_s=launch.startup_timeout_s,
                )
        except OSError as e:
            raise Refused(409, f"it cannot be forked: {e.strerror or e}") from e
        log_event("launcher.fork", instance=name, port=port)
        return port

    def _why_no_fork(self) -> str:
        """Why no further instance can be made now; "" if one can."""
        if self._state != "serving":
            return f"its first instance is {self._state}"
        if self._ending:
            return "the pod is ending"
        if not self._has_template or self._worker_has_ended:
            return "the pod has no template"
        if len(self._instances) >= self._room():
            memory_bytes = self._surroundings.launch.memory_bytes
            return f"no room: {len(self._instances)} instances of {memory_bytes} bytes run"
        return ""

    # -- signals and ends

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif self._worker is None:
            self._exit_with(128 + number, "launcher.exit", signal=signal.Signals(number).name)
        else:
            self._ending = number
            if not self._has_template or self._state == "booting":
                self._worker.signal(number)
                return
            self._instances.signal_all(number)
            if not len(self._instances):
                self._exit_with(0, "launcher.exit", state="idle")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._worker is not None and pid == self._worker.pid:
                self._on_worker_exit(self._worker, status)
            else:
                self._on_ended(self._instances.on_reaped(pid, status))

    def _on_worker_exit(self, worker: WorkerProcess, status: int) -> None:
        self._worker_has_ended = True
        if worker.fileno() >= 0:
            self._on_worker_message(worker)  # its last messages, such as a failure
        if not self._has_template:
            self._exit(status)
            return
        log_event(
            "launcher.template_ended", status=exit_status(status), instances=len(self._instances)
        )
        for one in self._instances.end_unmade():
            self._on_ended(one)
        if not len(self._instances) and self._status is None:
            self._exit(status)

    def _on_ended(self, one: PodInstance | None) -> None:
        """Handle the end of an instance: the pod ends with the last one, unless it served and the
        Template can make others."""
        if one is None:
            return
        if self._state == "waking" and one.error.get("phase") == "fork" and self._worker:
            self._has_template = False
            self._start_first(self._worker)
            return
        log_event(
            "launcher.ended",
            instance=one.name,
            port=one.port,
            status=exit_status(one.status),
            left=len(self._instances),
        )
        if len(self._instances) or self._status is not None:
            return
        if self._state == "serving" and not self._ending and not self._worker_has_ended:
            log_event("launcher.idle", revision=self._surroundings.launch.revision)
            return
        if self._worker is not None:
            self._worker.signal(signal.SIGKILL)
        self._exit(1 << 8 if one.status is None else one.status)

    def _exit(self, status: int) -> None:
        """End the pod as its last instance did (a status of waitpid(2))."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self._exit_with(
                128 + number, "launcher.exit", signal=signal.Signals(number).name, state=self._state
            )
        else:
            if self._state == "serving" and not os.WEXITSTATUS(status):
                self._line.send({"op": "ended"})
            self._exit_with(os.WEXITSTATUS(status), "launcher.exit", state=self._state)


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


def _format_phases(phases_ms: Mapping[str, float]) -> dict[str, object]:
    return {f"{name}_ms": float(ms) for name, ms in phases_ms.items()}

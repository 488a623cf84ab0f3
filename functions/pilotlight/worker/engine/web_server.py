"""The worker of a function that starts an HTTP server of its own (`@web_server`).

The function is called once, before the snapshot; it starts the server, as a process or a thread,
and returns. The server is ready when it answers its example at its port. An instance ends when no
process of the tree listens there: servers that replace their own processes live on.

A function with secrets starts its server when an instance wakes, because they are not set before:
such a worker is in no snapshot."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from typing import NoReturn

from pilotlight.errors import InvalidInput
from pilotlight.spec.web_servers import WebServerSpec
from pilotlight.worker.engine import server_worker
from pilotlight.worker.engine.client import ServerClient
from pilotlight.worker.engine.errors import ServerHung, ServerRefused, WrongAnswer
from pilotlight.worker.engine.process_tree import ExitWatcher, ProcessTree
from pilotlight.worker.engine.server_worker import RunningServer
from pilotlight.worker.launch_file import Launch
from pilotlight.worker.process import memory_access, resume
from pilotlight.worker.process.phase_timer import PhaseTimer
from pilotlight.worker.process.secrets import Secrets
from pilotlight.worker.snapshot import hooks, sockets
from pilotlight.worker.snapshot.processes import all_processes, children, descendants
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan, SnapshotBlocker
from pilotlight.worker.user_code.loader import load, set_script
from pilotlight.worker.user_code.source_locations import (
    SocketOrigins,
    UserSource,
    definition_of,
)
from pilotlight.worker.user_code.target import Hook, Target, make_target
from pilotlight.worker.worker import WEIGHTS_VARIABLE, WORKER_VARIABLE

HOSTS = ("127.0.0.1", "::1")
"""Where a server is looked for: one that listens at all addresses is found at the first, one that
listens at `localhost` may have taken the second alone."""
ANSWER_S = 20.0
"""Timeout of the example after a restore, which takes milliseconds on an idle node."""
_LOOK_S = 0.02
"""Polling interval until it listens, for which the kernel has no event."""


class PortInUse(Exception):
    """Raised when something listens at the server's port before the server is started."""


class StartedProcesses(ProcessTree):
    """All processes below the worker: those that user code has started."""

    noun = "web server"

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._has_begun = False

    def __repr__(self) -> str:
        return f"<StartedProcesses {self.pids()} port={self._port}>"

    def pids(self) -> list[int]:
        """Processes, parents first; none where the server is a thread."""
        return descendants(os.getpid())

    def living(self) -> list[int]:
        """Processes that have not ended."""
        ended = {pid for pid, _, state in all_processes() if state == "Z"}
        return [pid for pid in self.pids() if pid not in ended]

    def require_alive(self) -> None:
        """Raise ServerDied if there were processes and all have ended."""
        if self.living():
            self._has_begun = True
        elif (pids := self.pids()) or self._has_begun:
            raise self.died(_status(pids))

    def _watcher(self) -> ExitWatcher:
        return ListenerWatcher(self, self._port)

    def _terminate(self, grace_s: float) -> None:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with contextlib.closing(ExitWatcher(self.living())) as watch:
            watch.wait_all(grace_s)


class ListenerWatcher(ExitWatcher):
    """Watches the processes of a server, which is dead once nothing listens at its port."""

    def __init__(self, tree: StartedProcesses, port: int) -> None:
        super().__init__(tree.living())
        self._tree = tree
        self._port = port

    def names(self) -> list[str]:
        """Names of the processes that have ended; empty while another one listens, and then those
        that there are now are watched."""
        ended = super().names()
        if not is_listening(self._port):
            return ended or ["its listener"]
        self._clear()
        self._add(self._tree.living())
        return []


class WebServer(RunningServer):
    """A server that user code starts."""

    is_engine = False

    def __init__(
        self, launch: Launch, spec: WebServerSpec, target: Target, secrets: Secrets
    ) -> None:
        processes = StartedProcesses(spec.port)
        super().__init__(processes, (HOSTS[0], spec.port))
        self._launch = launch
        self._spec = spec
        self._target = target
        self._secrets = secrets
        self._status: int | None = None
        """Of the answer to the example; None until it was started."""

    @property
    def waits_for_secrets(self) -> bool:
        """Whether it is started when an instance wakes."""
        return bool(self._launch.secret_variables)

    def blocker(self) -> SnapshotBlocker | None:
        """That it is started when an instance wakes."""
        if not self.waits_for_secrets:
            return None
        names = ", ".join(self._launch.secret_variables)
        message = (
            f"the web server is started when an instance wakes, because the function has secrets "
            f"({names}), which no snapshot may contain. Remove secrets=, and let the server read "
            f"them from a file or a service when it needs them, to start from snapshots"
        )
        return SnapshotBlocker(
            kind="process", fd=None, what="web server with secrets", where=None, message=message
        )

    def start(self, scene: BlockerScan, *, within_s: float) -> None:
        """Call the function and wait until the server answers. Raises what the function raises,
        PortInUse, HookTimedOut, ServerDied, ServerHung, ServerRefused."""
        start, port = self._target.server, self._spec.port
        if start is None:
            raise InvalidInput(f"function {self._launch.spec.name!r} starts no web server")
        if is_listening(port):
            raise PortInUse(
                f"something listens at port {port} before {definition_of(start)} has started its "
                f"server: choose another port, or stop what listens there (without root, all "
                f"functions share the ports of the machine, so that one instance can have it)"
            )
        within_s = min(within_s, self._spec.startup_s)
        deadline = time.monotonic() + within_s
        with self.tree.output.captured():
            hooks.run_limited(
                start,
                within_s=within_s,
                message=f"{definition_of(start)}, marked @web_server(), did not return within "
                f"{within_s:.3g} s: start the server with subprocess.Popen(…), which does not wait "
                f"for its end, or raise startup_timeout=",
            )
        self.tree.output.close()
        self._wait_ready(start, scene, deadline)

    def prove(self, *, is_short: bool = False) -> None:
        """Check that it answers its example with the same status, or anything without one."""
        self.tree.require_alive()
        status = self._request_example(within_s=ANSWER_S)
        if self._spec.example is not None and status != self._status:
            raise WrongAnswer(
                f"the web server answers its example, GET {self._spec.example}, with status "
                f"{status}; before the snapshot it answered {self._status}"
            )
        self.is_proven = True

    def wake(self) -> None:
        """Set the secrets, run enter(snap=False), and start a server that waited for it."""
        memory_access.allow()
        self._secrets.lift()
        hooks.run_all(self._target.enter_after_wake, each_s=self._hook_s)
        if self.waits_for_secrets:
            self.start(_scene(self._launch), within_s=self._launch.spec.clocks.startup_s)

    def leave(self) -> None:
        """Run the exit hooks."""
        hooks.run_all(self._target.exit, each_s=hooks.HOOK_S, reports=True)

    @property
    def _hook_s(self) -> float:
        startup_s = self._launch.spec.clocks.startup_s
        return min(hooks.HOOK_S, startup_s) if self._launch.spec.snapshot else startup_s

    def _request_example(self, *, within_s: float) -> int:
        client = ServerClient(self.address, noun=self.tree.noun)
        return client.status(self._spec.example or "/", within_s=within_s)

    def _wait_ready(self, start: Hook, scene: BlockerScan, deadline: float) -> None:
        last: Exception | int | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            self.tree.require_alive()
            for host in HOSTS:
                self.address = (host, self._spec.port)
                try:
                    self._status = last = self._request_example(within_s=max(0.1, left_s))
                except (ServerHung, ServerRefused) as e:
                    last = e
                    continue
                except OSError:  # it does not listen yet
                    continue
                if self._spec.example is None or self._status < 500:
                    return
            time.sleep(_LOOK_S)
        raise ServerHung(self._why_not_ready(start, scene, last))

    def _why_not_ready(self, start: Hook, scene: BlockerScan, last: Exception | int | None) -> str:
        port, startup_s = self._spec.port, self._spec.startup_s
        if isinstance(last, int):
            what = f"answered GET {self._spec.example} with status {last} until the end"
        elif isinstance(last, ServerHung | ServerRefused):
            what = f"listened at port {port}, but {last}"
        else:
            others = sorted(set(scene.scan().listens))
            found = f"; it listens at {', '.join(others)}" if others else ""
            what = f"did not listen at port {port} of 127.0.0.1 or ::1{found}"
        return (
            f"the web server of {definition_of(start)} was not ready within {startup_s:g} s: it "
            f"{what}. Raise startup_timeout= of @web_server(), or let it listen at that port; its "
            f"last lines:\n{self.tree.output.last_words()}"
        )


def run(launch: Launch, *, boot_ms: float) -> NoReturn:
    """Run the worker, then exit the process. `boot_ms`: time since the interpreter's first
    instruction."""
    spec = launch.spec.web_server
    if spec is None:
        raise InvalidInput(f"function {launch.spec.name!r} has no web server")
    scene = _scene(launch)

    def start(phases: PhaseTimer, deadline: float) -> WebServer:
        secrets = _prepare(launch)
        scene.places.watch()
        with phases.phase("import"):
            target = make_target(load(launch), launch.spec)
        server = WebServer(launch, spec, target, secrets)
        with phases.phase("enter"):
            hooks.run_before_snapshot(target, within_s=deadline - time.monotonic())
        with phases.phase("warmup"):
            if not server.waits_for_secrets:
                server.start(scene, within_s=deadline - time.monotonic())
        scene.places.unwatch()
        return server

    server_worker.run(launch, scene, start, boot_ms=boot_ms)


def is_listening(port: int) -> bool:
    """Whether anything listens at the TCP port in this network namespace."""
    return any(one.listening and one.local.endswith(f":{port}") for one in sockets.table().values())


def _scene(launch: Launch) -> BlockerScan:
    by_value = launch.spec.pickled is not None
    return server_worker.scene_of(launch, SocketOrigins(UserSource(launch.code, by_value=by_value)))


def _prepare(launch: Launch) -> Secrets:
    """Set up this process for user code, and the environment of processes that it starts: they
    import what the function can import, and use as many threads as an instance."""
    os.environ[WORKER_VARIABLE] = "1"
    os.environ[WEIGHTS_VARIABLE] = json.dumps(dict(launch.weights))
    os.environ.setdefault("PYTHONPATH", ":".join((launch.code, *launch.site)))
    resume.raise_threads(cpu=launch.spec.resources.cpu, variables=launch.chosen_threads)
    user = UserSource(launch.code, by_value=launch.spec.pickled is not None)
    secrets = Secrets(launch.secret_variables, user, snapshot=launch.spec.snapshot)
    secrets.guard()
    set_script(launch)
    return secrets


def _status(pids: Sequence[int]) -> int | None:
    """Exit status of the first ended child that was not waited for, in subprocess's notation."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return None

"""The worker of a function that is an engine, a stock inference server."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import EngineSpec
from pilotlight.worker.engine import arguments, reference_answer, server_worker, sleep
from pilotlight.worker.engine.client import ServerClient
from pilotlight.worker.engine.errors import ServerRefused
from pilotlight.worker.engine.process_tree import EngineProcess
from pilotlight.worker.engine.server_worker import RunningServer
from pilotlight.worker.launch_file import Launch
from pilotlight.worker.process.phase_timer import PhaseTimer
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource

ANSWER_S = 20.0
"""Timeout of the known prompt after a restore: it takes tens of milliseconds, seconds on a loaded
node."""
SNAPSHOT_LEVEL = 2
"""Sleep level before a snapshot, whichever level the function uses between calls: an image must not
contain weights."""
PROOF_TOKENS = 2
"""Tokens of the proof before serving: a prefill and one decoding step. The proof of the snapshot
itself compares all tokens."""
_SOCKET = "engine.sock"


class Engine(RunningServer):
    """A warm engine."""

    def __init__(
        self,
        spec: EngineSpec,
        name: str,
        tree: EngineProcess,
        path: str,
        *,
        sleeps: bool,
        known: reference_answer.KnownAnswer,
    ) -> None:
        """`sleeps`: whether it has a sleep mode."""
        super().__init__(tree, path)
        self._spec = spec
        self._name = name
        self._asker = ServerClient(path)
        self._known = known
        self._sleeps = sleeps
        self._is_asleep = False

    def fall_asleep(self) -> None:
        """Release the GPU, if there is one."""
        if self._sleeps:
            self._is_asleep = True
            sleep.suspend_engine(self._asker, level=SNAPSHOT_LEVEL)

    def awaken(self) -> None:
        """Resume on the GPU."""
        if self._is_asleep:
            sleep.resume_engine(self._asker, level=SNAPSHOT_LEVEL)
        self._is_asleep = False

    def prove(self, *, is_short: bool = False) -> None:
        """Check the answer to the known prompt."""
        self.tree.require_alive()
        tokens = PROOF_TOKENS if is_short else reference_answer.TOKENS
        self._known.require_same(
            reference_answer.ask(
                self._spec, self._name, self._asker, tokens=tokens, within_s=ANSWER_S
            )
        )
        self.is_proven = True


def run(launch: Launch, *, site: list[str], boot_ms: float) -> NoReturn:
    """Run the worker, then exit the process.

    Args:
        launch: the parsed launch file.
        site: directories of packages, including the engine's.
        boot_ms: time since the interpreter's first instruction.
    """

    def start(phases: PhaseTimer, deadline: float) -> Engine:
        path = os.path.join(launch.work, _SOCKET)
        with phases.phase("enter"):
            tree = _start(launch, site, path, deadline)
        with phases.phase("warmup"):
            return _warm_up(launch, tree, path, deadline)

    places = SocketOrigins(UserSource(launch.code, by_value=False))
    server_worker.run(launch, server_worker.scene_of(launch, places), start, boot_ms=boot_ms)


def _start(launch: Launch, site: list[str], path: str, deadline: float) -> EngineProcess:
    command = arguments.command(
        launch.spec, python=sys.executable, weights=launch.weights, socket=path
    )
    environment = arguments.environment(
        launch.spec, os.environ, site=site, chosen=launch.chosen_threads
    )
    tree = EngineProcess(command, environment, directory=launch.work)
    ServerClient(path).wait_healthy(
        within_s=deadline - time.monotonic(), require_alive=tree.require_alive
    )
    return tree


def _warm_up(launch: Launch, tree: EngineProcess, path: str, deadline: float) -> Engine:
    spec = launch.spec
    if spec.engine is None:
        raise InvalidInput(f"function {spec.name!r} has no engine", parameter="engine")
    try:
        known = reference_answer.learn(
            spec.engine,
            spec.name,
            ServerClient(path),
            within_s=max(1.0, deadline - time.monotonic()),
        )
    except (ServerRefused, OSError):
        tree.require_alive()
        raise
    return Engine(spec.engine, spec.name, tree, path, sleeps=arguments.sleeps(spec), known=known)

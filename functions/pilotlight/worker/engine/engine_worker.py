"""Lifecycle of a worker whose function is an engine: start the process tree, warm it up, snapshot
point; then, as an instance, wake and serve.

It is never forked, because it has child processes: a snapshot covers the whole tree, and the
instance is this worker itself. After a restore it asks the known prompt again before it serves: a
copy that answers differently fails its start."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import EngineSpec
from pilotlight.worker.engine import arguments, reference_answer, sleep
from pilotlight.worker.engine.client import EngineClient
from pilotlight.worker.engine.errors import EngineDied, EngineHung, EngineRefused, WrongAnswer
from pilotlight.worker.engine.process_tree import ProcessTree
from pilotlight.worker.engine.reference_answer import TOKENS
from pilotlight.worker.engine.server import SpliceServer
from pilotlight.worker.launch_file import Launch
from pilotlight.worker.process import resume
from pilotlight.worker.process.phase_timer import PhaseTimer
from pilotlight.worker.process.shim_channel import ShimChannel, ShimOrder
from pilotlight.worker.process.template import (
    Template,
    connect_output,
    surplus_threads,
    wait_environment,
)
from pilotlight.worker.snapshot import hooks, quiesce
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan, SnapshotBlocker
from pilotlight.worker.status import InstanceStatus
from pilotlight.worker.user_code import output, user_errors
from pilotlight.worker.user_code.current_call import FunctionIdentity
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource

ENGINE_DIED = 71
"""Exit status of an instance whose engine died under it (EX_OSERR of sysexits.h);
`snapshotter.slots.exit_reason` has a word for it."""
START_SHARE = 0.9
"""Share of the startup clock until the engine is healthy and warm: an engine that hangs is reported
before the node agent's clock kills the worker."""
ANSWER_S = 20.0
"""Timeout of the known prompt after a restore: it takes tens of milliseconds, seconds on a loaded
node."""
SNAPSHOT_LEVEL = 2
"""Sleep level before a snapshot, whichever level the function uses between calls: an image must not
contain weights."""
PROOF_TOKENS = 2
"""Tokens of the proof before serving: a prefill and one decoding step. The proof of the snapshot
itself compares all tokens."""
_END_S = 5.0
_SOCKET = "engine.sock"


@dataclass(slots=True, kw_only=True)
class Engine:
    """A warm engine. Owner: the worker's main thread.

    Attributes:
        sleeps: whether it has a sleep mode.
        is_asleep: whether it sleeps for a snapshot.
        is_proven: whether it has answered the known prompt since it was quiesced.
    """

    spec: EngineSpec
    name: str
    path: str
    asker: EngineClient
    tree: ProcessTree
    known: reference_answer.KnownAnswer
    sleeps: bool
    is_asleep: bool = False
    is_proven: bool = True

    def fall_asleep(self) -> None:
        """Release the GPU, if there is one."""
        if self.sleeps:
            self.is_asleep = True
            sleep.suspend_engine(self.asker, level=SNAPSHOT_LEVEL)

    def awaken(self) -> None:
        """Resume on the GPU. Raises what sleep.resume_engine raises."""
        if self.is_asleep:
            sleep.resume_engine(self.asker, level=SNAPSHOT_LEVEL)
        self.is_asleep = False

    def prove(self, tokens: int = TOKENS) -> None:
        """Check the answer to the known prompt, up to `tokens`. Raises WrongAnswer, EngineHung,
        EngineRefused, EngineDied."""
        self.tree.demand_alive()
        self.known.demand_same(
            reference_answer.ask(self.spec, self.name, self.asker, tokens=tokens, within_s=ANSWER_S)
        )
        self.is_proven = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorker:
    """State of an engine's worker at the snapshot point."""

    launch: Launch
    control: ShimChannel
    engine: Engine
    scene: BlockerScan
    booted_ms: Mapping[str, float]


def run(launch: Launch, *, site: list[str], boot_ms: float) -> None:
    """Run the worker, then exit the process.

    Args:
        launch: the parsed launch file.
        site: directories of packages, including the engine's.
        boot_ms: time since the interpreter's first instruction.
    """
    output.install()
    faulthandler.enable(2)
    FunctionIdentity.set(function=launch.spec.name, key=launch.revision)
    control = ShimChannel(launch.control_fd)
    phases = PhaseTimer(control)
    phases.ms["boot"] = round(boot_ms, 3)
    deadline = time.monotonic() + launch.spec.clocks.startup_s * START_SHARE - boot_ms / 1000
    with phases.phase("enter"):
        tree, asker, path = _start(launch, site, deadline)
    with phases.phase("warmup"):
        engine = _warm_up(launch, tree, asker, path, deadline)
    scene = BlockerScan(
        writable=(launch.work, tempfile.gettempdir()),
        places=SocketOrigins(UserSource(launch.code, by_value=False)),
    )
    worker = EngineWorker(
        launch=launch, control=control, engine=engine, scene=scene, booted_ms=phases.ms
    )
    _obey(worker, threads=_reach_snapshot_point(worker, phases))


def _start(
    launch: Launch, site: list[str], deadline: float
) -> tuple[ProcessTree, EngineClient, str]:
    path = os.path.join(launch.work, _SOCKET)
    command = arguments.command(
        launch.spec, python=sys.executable, weights=launch.weights, socket=path
    )
    environment = arguments.environment(
        launch.spec, os.environ, site=site, chosen=launch.chosen_threads
    )
    tree, asker = ProcessTree(command, environment, directory=launch.work), EngineClient(path)
    asker.wait_healthy(within_s=deadline - time.monotonic(), demand_alive=tree.demand_alive)
    return tree, asker, path


def _warm_up(
    launch: Launch, tree: ProcessTree, asker: EngineClient, path: str, deadline: float
) -> Engine:
    spec = launch.spec
    if spec.engine is None:
        raise InvalidInput(f"function {spec.name!r} has no engine", parameter="engine")
    try:
        answer = reference_answer.learn(
            spec.engine, spec.name, asker, within_s=max(1.0, deadline - time.monotonic())
        )
    except (EngineRefused, OSError):
        tree.demand_alive()
        raise
    sleeps = arguments.sleeps(spec)
    return Engine(
        spec=spec.engine,
        name=spec.name,
        path=path,
        asker=asker,
        tree=tree,
        known=answer,
        sleeps=sleeps,
    )


def _reach_snapshot_point(worker: EngineWorker, phases: PhaseTimer) -> tuple[str, ...]:
    resume.warm_resume_path()
    hooks.drop_caches()
    output.finish()
    surplus = surplus_threads()  # includes the copier of the engine's output
    found = worker.scene.look(leave_aside={worker.control.fileno()})
    point = {"threads": list(surplus), "phases_ms": phases.ms, "joins": True, **found.to_json()}
    worker.control.send({"event": "snapshot_point", **point})
    return surplus


def _obey(worker: EngineWorker, *, threads: tuple[str, ...]) -> NoReturn:
    def become(order: ShimOrder, started: float) -> NoReturn:
        _become(worker, order, started)

    Template(worker.control, become, lambda order: _suspend(worker, order), threads=threads).run()
    worker.engine.tree.end(_END_S)
    output.finish()
    os._exit(0)


def _suspend(worker: EngineWorker, order: ShimOrder) -> None:
    """Quiesce the whole process tree; returns in a restored copy, or at once if the snapshot is
    blocked."""
    engine = worker.engine
    try:
        engine.fall_asleep()
    except (EngineHung, EngineRefused, OSError) as e:
        message = f"the engine could not enter sleep mode: {e}"
        quiesce.refuse_snapshot(
            order.descriptors,
            SnapshotBlocker(kind="process", fd=None, what="engine", where=None, message=message),
        )
        engine.awaken()
        return
    engine.is_proven = False
    try:
        quiesce.quiesce_process(
            worker.control, order.descriptors, scene=worker.scene, in_place=True
        )
    except quiesce.QuiesceBlocked:  # reported to the shim; wait for further orders
        engine.awaken()
        engine.is_proven = True


def _become(worker: EngineWorker, order: ShimOrder, started: float) -> NoReturn:
    if order.op == "prove":
        _prove(worker, order, started)
    connect_output(order)
    order = wait_environment(order)
    phases, engine = PhaseTimer(worker.control, instance=order.instance), worker.engine
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[order.op] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        resume.reseed()
        resume.take_environment(order.instance, order.env)
        engine.awaken()
    if not engine.is_proven:
        with phases.phase("prove"):
            engine.prove(PROOF_TOKENS)
    with engine.tree.watched() as deaths:
        server = SpliceServer(
            engine.path, InstanceStatus.of(order, booted_ms=worker.booted_ms, woken_ms=phases.ms)
        )
        server.wake(listener)

        def ready() -> None:
            worker.control.send(
                {"event": "ready", "instance": order.instance, "phases_ms": phases.ms}
            )

        try:
            server.run(on_ready=ready, shim=worker.control.fileno(), deaths=deaths)
        except EngineDied as e:
            print(f"{e}; its last lines:\n{engine.tree.last_words()}", file=sys.stderr, flush=True)
            _leave(worker, ENGINE_DIED)
    _leave(worker, 0)


def _prove(worker: EngineWorker, order: ShimOrder, started: float) -> NoReturn:
    """Answer the known prompt again and exit."""
    error: dict[str, str] | None = None
    answered: dict[str, float] = {}
    try:
        worker.engine.awaken()
        worker.engine.prove()
        answered["first_answer"] = round((time.monotonic() - started) * 1000, 3)
    except (WrongAnswer, EngineDied, EngineHung, EngineRefused, OSError) as e:
        user_errors.report(e)
        error = user_errors.as_data(e)
    output.finish()
    proved: dict[str, Any] = {
        "event": "proved",
        "instance": order.instance,
        "ok": error is None,
        "error": error,
        "notes": [],
    }
    worker.control.send({**proved, "phases_ms": answered})
    os._exit(0)


def _leave(worker: EngineWorker, status: int) -> NoReturn:
    """End the process tree, which must not outlive the instance, then exit."""
    with contextlib.suppress(OSError):
        worker.engine.tree.end(_END_S)
    output.finish()
    os._exit(status)

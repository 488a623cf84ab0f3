"""Lifecycle of a worker that runs a server: start its process tree, warm it up, snapshot point;
then, as an instance, wake and serve.

It is never forked, because it has child processes: a snapshot covers the whole tree, and the
instance is this worker itself. After a restore it asks the server something known again before it
serves: a copy that answers differently fails its start."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pilotlight.worker.engine.client import Address
from pilotlight.worker.engine.errors import ServerDied, ServerHung, ServerRefused, WrongAnswer
from pilotlight.worker.engine.process_tree import ProcessTree
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
from pilotlight.worker.user_code.source_locations import SocketOrigins

SERVER_DIED = 71
"""Exit status of an instance whose server died under it (EX_OSERR of sysexits.h);
`snapshotter.slots.exit_reason` has a word for it."""
START_SHARE = 0.9
"""Share of the startup clock until the server is healthy and warm: one that hangs is reported
before the node agent's clock kills the worker."""
_END_S = 5.0


class RunningServer:
    """A warm server. Owner: the worker's main thread.

    Attributes:
        tree: its processes.
        address: where it listens.
        is_engine: see SpliceServer.
        is_proven: whether it has answered since it was quiesced.
    """

    is_engine = True

    def __init__(self, tree: ProcessTree, address: Address) -> None:
        self.tree = tree
        self.address = address
        self.is_proven = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tree!r}>"

    def blocker(self) -> SnapshotBlocker | None:
        """Why it can be in no snapshot, whatever its processes hold; None if nothing is known."""
        return None

    def fall_asleep(self) -> None:
        """Release what a snapshot must not contain. Raises ServerHung, ServerRefused, OSError."""

    def awaken(self) -> None:
        """Resume after `fall_asleep`. Raises ServerHung, ServerRefused, OSError."""

    def prove(self, *, is_short: bool = False) -> None:
        """Check what it answers against what it answered before the snapshot; `is_short`: the
        quickest check that means something. Raises WrongAnswer, ServerHung, ServerRefused,
        ServerDied."""
        raise NotImplementedError

    def wake(self) -> None:
        """Called in an instance that has its environment. Raises what user code raises."""

    def leave(self) -> None:
        """Called when the instance has served its last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWorker:
    """State of such a worker at the snapshot point."""

    launch: Launch
    control: ShimChannel
    server: RunningServer
    scene: BlockerScan
    booted_ms: Mapping[str, float]


def run(
    launch: Launch,
    scene: BlockerScan,
    start: Callable[[PhaseTimer, float], RunningServer],
    *,
    boot_ms: float,
) -> NoReturn:
    """Run the worker, then exit the process.

    Args:
        launch: the parsed launch file.
        scene: the scan for obstacles of a snapshot.
        start: starts the server and warms it up until a moment in monotonic seconds, in phases
            that it times.
        boot_ms: time since the interpreter's first instruction.
    """
    output.install()
    faulthandler.enable(2)
    FunctionIdentity.set(function=launch.spec.name, key=launch.revision)
    control = ShimChannel(launch.control_fd)
    os.register_at_fork(after_in_child=control.close_in_fork)
    phases = PhaseTimer(control)
    phases.ms["boot"] = round(boot_ms, 3)
    server = start(
        phases, time.monotonic() + launch.spec.clocks.startup_s * START_SHARE - boot_ms / 1000
    )
    worker = ServerWorker(
        launch=launch, control=control, server=server, scene=scene, booted_ms=phases.ms
    )
    _obey(worker, threads=_reach_snapshot_point(worker, phases))


def scene_of(launch: Launch, places: SocketOrigins) -> BlockerScan:
    """The scan of a worker's process tree."""
    return BlockerScan(
        writable=(launch.work, tempfile.gettempdir()), places=places, volumes=launch.volumes
    )


def _reach_snapshot_point(worker: ServerWorker, phases: PhaseTimer) -> tuple[str, ...]:
    resume.warm_resume_path()
    hooks.drop_caches()
    output.finish()
    surplus = surplus_threads()  # includes the copier of the server's output
    found = worker.scene.scan(leave_aside={worker.control.fileno()})
    if (blocker := worker.server.blocker()) is not None:
        surplus = (*surplus, blocker.what)
        found.obstacles.insert(0, blocker)
    point = {"threads": list(surplus), "phases_ms": phases.ms, "joins": True, **found.to_json()}
    worker.control.send({"event": "snapshot_point", **point})
    return surplus


def _obey(worker: ServerWorker, *, threads: tuple[str, ...]) -> NoReturn:
    def become(order: ShimOrder, started: float) -> NoReturn:
        _become(worker, order, started)

    Template(worker.control, become, lambda order: _suspend(worker, order), threads=threads).run()
    worker.server.tree.end(_END_S)
    output.finish()
    os._exit(0)


def _suspend(worker: ServerWorker, order: ShimOrder) -> None:
    """Quiesce the whole process tree; returns in a restored copy, or at once if the snapshot is
    blocked."""
    server = worker.server
    if (blocker := server.blocker()) is not None:
        quiesce.refuse_snapshot(order.descriptors, blocker)
        return
    try:
        server.fall_asleep()
    except (ServerHung, ServerRefused, OSError) as e:
        noun = server.tree.noun
        message = f"the {noun} could not enter sleep mode: {e}"
        quiesce.refuse_snapshot(
            order.descriptors,
            SnapshotBlocker(kind="process", fd=None, what=noun, where=None, message=message),
        )
        server.awaken()
        return
    server.is_proven = False
    try:
        quiesce.quiesce_process(
            worker.control, order.descriptors, scene=worker.scene, in_place=True
        )
    except quiesce.QuiesceBlocked:  # reported to the shim; wait for further orders
        server.awaken()
        server.is_proven = True


def _become(worker: ServerWorker, order: ShimOrder, started: float) -> NoReturn:
    if order.op == "prove":
        _prove(worker, order, started)
    connect_output(order)
    order = wait_environment(order)
    gc.enable()
    phases, server = PhaseTimer(worker.control, instance=order.instance), worker.server
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[order.op] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        resume.reseed()
        resume.take_environment(order.instance, order.env)
        server.awaken()
        server.wake()
    if not server.is_proven:
        with phases.phase("prove"):
            server.prove(is_short=True)
    noun = server.tree.noun
    with server.tree.watched() as deaths:
        splice = SpliceServer(
            server.address,
            InstanceStatus.of(order, booted_ms=worker.booted_ms, woken_ms=phases.ms),
            noun=noun,
            is_engine=server.is_engine,
        )
        splice.wake(listener)

        def ready() -> None:
            worker.control.send(
                {"event": "ready", "instance": order.instance, "phases_ms": phases.ms}
            )

        try:
            splice.run(on_ready=ready, shim=worker.control.fileno(), deaths=deaths)
        except ServerDied as e:
            last = server.tree.output.last_words()
            print(f"{e}; its last lines:\n{last}", file=sys.stderr, flush=True)
            _exit_worker(worker, SERVER_DIED)
    _exit_worker(worker, 0)


def _prove(worker: ServerWorker, order: ShimOrder, started: float) -> NoReturn:
    """Check the server's answer again and exit."""
    error: dict[str, str] | None = None
    answered: dict[str, float] = {}
    try:
        worker.server.awaken()
        worker.server.prove()
        answered["first_answer"] = round((time.monotonic() - started) * 1000, 3)
    except (WrongAnswer, ServerDied, ServerHung, ServerRefused, OSError) as e:
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


def _exit_worker(worker: ServerWorker, status: int) -> NoReturn:
    """End the process tree, which must not outlive the instance, then exit."""
    worker.server.leave()
    with contextlib.suppress(OSError):
        worker.server.tree.end(_END_S)
    output.finish()
    os._exit(status)

"""The snapshot point: one thread, no event loop, waiting for orders on the control channel.

The Template forks a child per `fork` or `park` order and reaps it; a `serve` order turns the
process itself into the instance. Children are watched through pidfds in the same poll, so no signal
handler is needed. A Template exits when its shim disconnects, and leaves its children running.

A child enters its cgroups by itself, while it has one thread: writing "0" to a `tasks` file of
cgroup v1 costs nothing, whereas moving a process by its id takes a machine-wide lock
(`snapshotter/linux/cgroups.py`)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from pilotlight.worker.process import memory_access
from pilotlight.worker.process.shim_channel import MAX_DATAGRAM_BYTES, ShimChannel, ShimOrder
from pilotlight.worker.user_code import output
from pilotlight.worker.user_code.user_errors import as_data

Become = Callable[[ShimOrder, float], NoReturn]
"""Turns this process into the instance of an order, or parks it (in its own session and cgroups).
The number is the order's time of arrival in monotonic seconds."""
Suspend = Callable[[ShimOrder], None]
"""Quiesces this process for a snapshot; returns in a restored copy, or at once if the snapshot is
blocked."""

DESCRIPTORS = {
    "fork": 4,
    "serve": 4,
    "park": 2,
    "checkpoint": 3,
    "checkpoint_in_place": 2,
    "prove": 0,
    "boot": 0,
}
"""Minimum number of descriptors of each order; further ones, of orders that fork, are cgroup
files."""
IN_PLACE = ("serve", "prove", "boot")
"""Orders that this process executes itself, without returning."""

THREAD_GRACE_S = 0.1
"""A joined thread stays visible in /proc for some microseconds, a pool that shuts down for some
milliseconds."""


def surplus_threads() -> tuple[str, ...]:
    """Names of all other threads, Python's and native ones; waits THREAD_GRACE_S for threads that
    are ending."""
    deadline = time.monotonic() + THREAD_GRACE_S
    while (names := _other_threads()) and time.monotonic() < deadline:
        time.sleep(0.002)  # the kernel has no event for the end of a thread
    return names


def _other_threads() -> tuple[str, ...]:
    python = {t.native_id: t.name for t in threading.enumerate()}
    me = threading.get_native_id()
    names = [
        python.get(int(task)) or _comm(task)
        for task in os.listdir("/proc/self/task")
        if int(task) != me
    ]
    return tuple(sorted(name for name in names if name))


def _comm(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as f:
            return f.read().strip() or f"thread {task}"
    except OSError:  # it ended meanwhile
        return ""


class Template:
    """The paused worker. Single-threaded; `run` owns it."""

    def __init__(
        self, control: ShimChannel, become: Become, suspend: Suspend, *, threads: tuple[str, ...]
    ) -> None:
        self._control = control
        self._become = become
        self._suspend = suspend
        self._threads = threads
        self._children: dict[int, tuple[int, str]] = {}  # pidfd → (pid, instance)
        self._poll = select.poll()

    def __repr__(self) -> str:
        return f"<Template children={len(self._children)} threads={list(self._threads)}>"

    def run(self) -> None:
        """Execute orders until the shim disconnects. Does not return in a child, nor after `serve`.

        From now on other instances can neither read nor change this process' memory, which every
        later fork and snapshot copies."""
        memory_access.forbid()
        gc.disable()  # a collection would copy the pages that the children share
        self._poll.register(self._control, select.POLLIN)
        # the shim disconnected before a child was reported
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while self._turn():
                pass

    def _turn(self) -> bool:
        """Handle the events of one poll; False if the shim has disconnected."""
        for descriptor, _ in self._poll.poll():
            if descriptor != self._control.fileno():
                self._reap(descriptor)
            elif not self._obey():
                return False
        return True

    def _obey(self) -> bool:
        order = self._control.receive()
        if order is None:
            return False
        started = time.monotonic()
        if len(order.descriptors) < DESCRIPTORS.get(order.op, len(order.descriptors) + 1):
            self._refuse(
                order,
                ValueError(f"invalid order {order.op!r} with {len(order.descriptors)} descriptors"),
            )
        elif order.op in IN_PLACE:
            self._become(order, started)
        elif order.op == "checkpoint_in_place":
            self._stand_still(order)
        elif self._threads:
            self._refuse(
                order,
                RuntimeError(
                    f"the worker cannot be forked: threads are running at the snapshot point: "
                    f"{', '.join(self._threads)}"
                ),
            )
        else:
            self._fork(order, started)
        return True

    def _stand_still(self, order: ShimOrder) -> None:
        if self._children:
            self._refuse(
                order,
                RuntimeError(
                    f"the worker cannot be checkpointed in place: {len(self._children)} forks of "
                    f"it are running"
                ),
            )
            return
        self._poll.unregister(self._control)
        self._suspend(order)
        self._poll.register(self._control, select.POLLIN)

    def _fork(self, order: ShimOrder, started: float) -> None:
        output.finish()
        try:
            with self._control.shared():
                pid = os.fork()
        except OSError as e:
            self._refuse(order, e)
            return
        if pid == 0:
            self._enter_child(order, started)
        for descriptor in order.descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, order.instance)
        self._poll.register(pidfd, select.POLLIN)
        self._control.send({"event": "forked", "instance": order.instance, "pid": pid}, (pidfd,))

    def _enter_child(self, order: ShimOrder, started: float) -> NoReturn:
        try:
            os.setsid()
            for pidfd in self._children:
                os.close(pidfd)
            enter_groups(order.descriptors[DESCRIPTORS[order.op] :])
            self._become(order, started)
        finally:
            # EX_SOFTWARE: `_become` exits the process itself; the Template's stack must never be
            # unwound in a child
            os._exit(70)

    def _refuse(self, order: ShimOrder, error: Exception) -> None:
        for descriptor in order.descriptors:
            os.close(descriptor)
        self._control.send(
            {
                "event": "failed",
                "instance": order.instance,
                "phase": "fork",
                "error": as_data(error),
            }
        )

    def _reap(self, pidfd: int) -> None:
        pid, instance = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._control.send({"event": "exited", "instance": instance, "status": status})


def enter_groups(ways: Sequence[int]) -> None:
    """Move this single-threaded process into the cgroups of the open `tasks` files. Raises OSError:
    it must not run without limits."""
    for descriptor in ways:
        os.write(descriptor, b"0")
        os.close(descriptor)


def connect_output(order: ShimOrder) -> None:
    """Point stdout and stderr at the instance's own pipes."""
    output.finish()
    _, stdout, stderr, *_ = order.descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)


def wait_environment(order: ShimOrder) -> ShimOrder:
    """Wait until this process may wake; returns the order with its environment.

    The environment arrives on `go`, which no other process reads: in a Template it would leave
    traces, which every later fork and snapshot would inherit."""
    go = order.descriptors[3]
    body = os.read(go, MAX_DATAGRAM_BYTES)
    if not body:
        os._exit(0)  # the shim cancelled the instance
    os.close(go)
    given = json.loads(body)
    return replace(
        order, env={str(k): str(v) for k, v in given["env"].items()}, start=given.get("start", {})
    )

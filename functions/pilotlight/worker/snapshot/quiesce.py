"""Quiescing a process for a snapshot, and resuming in a restored copy.

A process to be dumped releases everything that ties it to its slot and waits in accept() on a
listener that the shim created. The dump ends the process. In a restored copy a shim connects to the
listener: that connection becomes the control channel, and the worker is at its snapshot point
again. Nothing is sent, read or timed in between, so that the copy has nothing to repeat."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence

from pilotlight.worker.process import tensor_memory
from pilotlight.worker.process.shim_channel import ShimChannel
from pilotlight.worker.snapshot import hooks
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan, ScanFindings, SnapshotBlocker
from pilotlight.worker.user_code import output

FROZEN_VARIABLE = "PILOTLIGHT_FROZEN_S"
"""Seconds that the process spent in a snapshot: the wall clock advanced, `time.monotonic()` did not
(time_namespaces(7))."""


class QuiesceBlocked(Exception):
    """Raised when the process cannot be dumped; the obstacles have been reported to the shim."""


def quiesce_process(
    control: ShimChannel, descriptors: Sequence[int], *, scene: BlockerScan, in_place: bool
) -> None:
    """Report to the shim, wait, and accept the new control channel. Returns in a restored copy
    only.

    Args:
        control: closed before the report, and replaced by the new connection after the restore;
            unchanged if the snapshot is blocked.
        descriptors: listener and channel, which are consumed.
        scene: the scan for obstacles.
        in_place: whether this is the worker itself, with all its processes, not a fork of it.

    Raises QuiesceBlocked, and OSError if the shim has disconnected.
    """
    begun = time.monotonic()
    listener_fd, channel_fd = descriptors
    with (
        socket.socket(fileno=listener_fd) as listener,
        contextlib.closing(ShimChannel(channel_fd)) as channel,
    ):
        output.finish()
        hooks.drop_caches()
        found = scene.scan(leave_aside={listener_fd, channel_fd, control.fileno()}, pairs=in_place)
        if not found.obstacles:
            tensor_memory.release_pools()
            control.close()
        channel.send(
            {
                "event": "quiesced",
                **found.to_json(),
                "phases_ms": {"quiesce": round((time.monotonic() - begun) * 1000, 3)},
            }
        )
        since = time.time(), time.monotonic()
        channel.close()  # the dump begins as soon as the shim sees this
        if found.obstacles:
            raise QuiesceBlocked(found.obstacles[0].message)
        control.replace(_wait_for_shim(listener, since))


def refuse_snapshot(descriptors: Sequence[int], obstacle: SnapshotBlocker) -> None:
    """Report an obstacle to the shim, in place of calling `quiesce_process`, with the same
    `descriptors`."""
    listener_fd, channel_fd = descriptors
    os.close(listener_fd)
    with contextlib.closing(ShimChannel(channel_fd)) as channel:
        channel.send(
            {"event": "quiesced", **ScanFindings(obstacles=[obstacle]).to_json(), "phases_ms": {}}
        )


def release_output() -> None:
    """Redirect stdin, stdout and stderr to /dev/null: a fork gets its own when it becomes an
    instance."""
    output.finish()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _wait_for_shim(listener: socket.socket, since: tuple[float, float]) -> socket.socket:
    """Accept the connection of the next shim. `since`: wall clock and monotonic clock before the
    dump could begin."""
    path = listener.getsockname()
    listener.setblocking(True)
    connection, _ = listener.accept()
    frozen = (time.time() - since[0]) - (time.monotonic() - since[1])
    os.environ[FROZEN_VARIABLE] = f"{max(0.0, frozen):.3f}"
    listener.close()
    if path:
        with contextlib.suppress(OSError):  # the shim's directory may be read-only to this process
            os.unlink(path)
    return connection

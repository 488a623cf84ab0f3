"""Standing still for a snapshot, and coming back from one.

A process that is to be dumped lets go of everything that ties it to this slot and waits in accept()
on a listener that the shim made. The dump consumes it. In a restored copy somebody connects: that
connection is its control channel from then on, and it is a worker at its snapshot point again.
Nothing is sent, read or timed between the two, so that the copy has nothing to repeat."""

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
"""Seconds for which the process was in a snapshot: the wall clock went on, `time.monotonic()` did
not see them (time_namespaces(7))."""


class SnapshotBlocked(Exception):
    """Raised when something stands in the way; the shim has been told what."""


def quiesce_process(
    control: ShimChannel, descriptors: Sequence[int], *, scene: BlockerScan, in_place: bool
) -> None:
    """Tell the shim on the channel, wait, and take the new control channel. Returns in a restored
    copy only.

    Args:
        control: let go before the shim is told, replaced by the new connection afterwards;
        untouched when something is in the way. descriptors: listener and channel, which are used
        up. scene: where to look for obstacles. in_place: this is the worker itself, with all its
        processes, and no fork of it.

    Raises SnapshotBlocked, and OSError when the shim is gone.
    """
    begun = time.monotonic()
    listener_fd, channel_fd = descriptors
    with (
        socket.socket(fileno=listener_fd) as listener,
        contextlib.closing(ShimChannel(channel_fd)) as channel,
    ):
        output.finish()
        hooks.drop_caches()
        found = scene.look(leave_aside={listener_fd, channel_fd, control.fileno()}, pairs=in_place)
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
        channel.close()
        if found.obstacles:
            raise SnapshotBlocked(found.obstacles[0].message)
        control.replace(_wait_for_shim(listener))


def refuse_snapshot(descriptors: Sequence[int], obstacle: SnapshotBlocker) -> None:
    """Tell the shim on the channel what stands in the way; `descriptors` as for `quiesce_process`,
    which need not be asked then."""
    listener_fd, channel_fd = descriptors
    os.close(listener_fd)
    with contextlib.closing(ShimChannel(channel_fd)) as channel:
        channel.send(
            {"event": "quiesced", **ScanFindings(obstacles=[obstacle]).to_json(), "phases_ms": {}}
        )


def release_output() -> None:
    """stdin, stdout and stderr become /dev/null: a fork has its own only as an instance."""
    output.finish()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _wait_for_shim(listener: socket.socket) -> socket.socket:
    path = listener.getsockname()
    listener.setblocking(True)
    wall, seen = time.time(), time.monotonic()
    connection, _ = listener.accept()
    frozen = (time.time() - wall) - (time.monotonic() - seen)
    os.environ[FROZEN_VARIABLE] = f"{max(0.0, frozen):.3f}"
    listener.close()
    if path:
        with contextlib.suppress(OSError):  # the shim's directory need not be ours to write
            os.unlink(path)
    return connection

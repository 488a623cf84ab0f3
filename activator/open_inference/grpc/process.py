"""Runs the process for gRPC (`python -m activator.open_inference.grpc`) beside the activator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from activator.settings import ActivatorSettings
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.public_listener import AddressInUse, open_listeners

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
FREE_S: Final = 3.0
"""How long an address may still be in use when an activator starts."""
END_S: Final = 5.0
"""How long the process may take to end."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Before the process is started again; it doubles while it does not live for MAX_PAUSE_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTerms:
    """What the process needs.

    Attributes:
        activator: path of the activator's Unix socket for it.
        token: shows the activator that requests are the process's.
        max_message_bytes: of a caller's message.
        max_connections_per_address: open connections of a caller's address.
        read_timeout_s: how long a caller may take to send its message.
        waiting_bytes: of messages whose calls have not been answered.
    """

    activator: str
    token: str
    max_message_bytes: int
    max_connections_per_address: int
    read_timeout_s: float
    waiting_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSockets:
    """The sockets for gRPC.

    Attributes:
        listeners: bound to `activator.grpc_listen`; open while the process is started again.
        activator: path of the socket at which the activator serves the process.
    """

    listeners: Sequence[socket.socket]
    activator: Path


def open_grpc_sockets(settings: ActivatorSettings, activator: Path) -> GrpcSockets | None:
    """Open the sockets; None where gRPC is off. Raises SettingsInvalid where an address is in use,
    or grpcio is not installed."""
    if settings.grpc_listen is None:
        return None
    where = f"activator.grpc_listen = {settings.grpc_listen!r}"
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        raise SettingsInvalid(f"{where}: needs the packages grpcio and protobuf: install them")
    try:
        listeners = _open_soon(settings.grpc_listen, is_shared=settings.activators > 1)
    except AddressInUse as e:
        raise SettingsInvalid(f"{where}: cannot listen: {e.strerror}") from e
    return GrpcSockets(listeners=listeners, activator=activator)


def _open_soon(listen: str, *, is_shared: bool) -> list[socket.socket]:
    """Open listening sockets, at which connections wait while the process starts. Raises
    AddressInUse after FREE_S: the process of an activator that was killed closes them as soon as it
    notices."""
    until_s = time.monotonic() + FREE_S
    while True:
        try:
            listeners = open_listeners(listen, is_shared=is_shared)
            for listener in listeners:
                listener.listen(BACKLOG)
        except AddressInUse:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return listeners


class GrpcProcess:
    """Starts the process, and again when it ends. Owner: the event loop.

    Attributes:
        starts: how often it was started.
        pid: of the running process; None while there is none.
    """

    def __init__(self, sockets: GrpcSockets, token: str, settings: ActivatorSettings) -> None:
        """`token`: shows the activator that requests are the process's."""
        self._listeners = sockets.listeners
        self._terms = GrpcTerms(
            activator=str(sockets.activator),
            token=token,
            max_message_bytes=settings.max_body_bytes,
            max_connections_per_address=settings.max_connections_per_address,
            read_timeout_s=settings.body_timeout_s,
            waiting_bytes=settings.waiting_bytes,
        )
        self.starts = 0
        self.pid: int | None = None

    def __repr__(self) -> str:
        return f"<GrpcProcess {self.pid or 'not running'}, {self.starts} starts>"

    async def run(self) -> None:
        """Keep the process running until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            started = loop.time()
            process = await self._start()
            self.pid = process.pid
            try:
                status = await process.wait()
            finally:
                self.pid = None
                await _end(process)
            if loop.time() - started > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            log.error("grpc process ended status=%d again_s=%g", status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _start(self) -> Process:
        descriptors = [listener.fileno() for listener in self._listeners]
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "activator.open_inference.grpc",
            *map(str, descriptors),
            stdin=PIPE,
            pass_fds=descriptors,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                # large messages are mapped, and given back when they are sent
                "MALLOC_MMAP_THRESHOLD_": "262144",
                "MALLOC_ARENA_MAX": "2",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(self._terms)).encode() + b"\n")
        return process


async def _end(process: Process) -> None:
    """End the process: by the end of its input, and after END_S by a signal."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

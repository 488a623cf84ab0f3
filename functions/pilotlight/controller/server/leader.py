"""Leadership of one of two controllers (`controller.standby`): the other waits for the lock and
takes over when the first exits.

Two controllers of one home wait for its lock file (`wait_for_home_lock`), before they give up root
and start threads; two homes with one database wait for its session lock.

PostgreSQL releases the lock with the session that holds it. A session may end while its process
lives (the database fails over, the network is interrupted): from then on another controller may be
active, so a controller that loses its session ends at once, before it writes again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.server.database_lock import (
    AlreadyRunning,
    ControllerLock,
    acquire_lock_file,
)
from pilotlight.controller.server.metrics import Metrics
from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.metrics_server import MetricsAddress

log = logging.getLogger(__name__)

_SAID = "event=standing_by another controller is active"
POLL_S = 1.0
"""Interval of attempts to acquire the lock, and of checks that it is still held."""
MAX_SILENCE_S = 30.0
"""A database that has not answered for this long may have given our lock to another controller."""


@asynccontextmanager
async def as_leader(
    lock: ControllerLock, *, waits: bool, metrics: Metrics, address: MetricsAddress
) -> AsyncIterator[None]:
    """Hold `lock` inside the context. If `waits`, wait for it and answer probes at the TCP address
    of `address`; otherwise raise AlreadyRunning if it is taken."""
    if waits:
        await _wait(lock, metrics, address)
    else:
        lock.acquire()
    watching = asyncio.create_task(_watch(lock), name="lock") if lock.is_in_database else None
    try:
        yield
    finally:
        if watching is not None:
            await cancel_all([watching])
        lock.release()


async def wait_for_home_lock(file: Path, *, metrics: Metrics, address: MetricsAddress) -> int:
    """Wait for the lock `file` of a home and return its descriptor. Starts no thread."""
    async with _standing_by(metrics, address):
        log.info(_SAID)
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(AlreadyRunning):
                return acquire_lock_file(file)


async def _wait(lock: ControllerLock, metrics: Metrics, address: MetricsAddress) -> None:
    was_said = False
    async with _standing_by(metrics, address):
        while not await anyio.to_thread.run_sync(_is_taken, lock):
            if not was_said:
                log.info(_SAID)
            was_said = True
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _standing_by(metrics: Metrics, address: MetricsAddress) -> AsyncIterator[None]:
    """Answer probes, and stop waiting on SIGTERM or SIGINT."""
    loop, waiting = asyncio.get_running_loop(), asyncio.current_task()
    assert waiting is not None
    # the first process of a container ignores signals without a handler
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, waiting.cancel)
    # sent by `--first-key` in this pod: no activator follows this controller yet
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    # the socket belongs to the other controller
    servers = await metrics.expose(dataclasses.replace(address, socket_path=None))
    try:
        yield
    finally:
        for server in servers:
            server.close()
            await server.wait_closed()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _is_taken(lock: ControllerLock) -> bool:
    try:
        lock.acquire(patience_s=0)  # the caller asks again
    except AlreadyRunning:
        return False
    except SQLAlchemyError as e:
        log.warning("event=database_away error=%r", e)
        return False
    return True


async def _watch(lock: ControllerLock) -> None:
    while True:
        try:
            async with asyncio.timeout(MAX_SILENCE_S):
                is_held = await anyio.to_thread.run_sync(lock.is_held, abandon_on_cancel=True)
        except TimeoutError:
            is_held = False
        if not is_held:
            break
        await asyncio.sleep(POLL_S)
    log.critical("event=lock_lost another controller may be active: this one exits")
    os.kill(os.getpid(), signal.SIGKILL)  # an orderly shutdown would still write

"""The clients behind the handles: one per process and profile, one per event loop, and a loop in a
thread for synchronous maps.

Module state, on purpose: handles are module-level objects that any thread, loop or forked process
may use. A fork starts afresh (keys carry the pid), so no connection is ever shared between
processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from pilotlight import profile as profiles
from pilotlight.client.client import AsyncClient, Client
from pilotlight.profile import Profile

_CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _State:
    """Owned by one process; `lock` guards every field, which threads share."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    chosen: Profile | None = None
    clients: dict[Profile, Client] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None


_state = _State()
_by_loop: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[Profile, tuple[AsyncClient, AsyncGenerator[None]]]
] = weakref.WeakKeyDictionary()


def _here() -> _State:
    global _state
    if _state.pid != os.getpid():
        _state = _State(chosen=_state.chosen)
    return _state


def current_profile() -> Profile:
    """The profile that handles use: the one set by `use_profile`, else the one in force
    (`pilotlight.profile.load`)."""
    return _here().chosen or profiles.load()


@contextlib.contextmanager
def use_profile(profile: Profile) -> Iterator[None]:
    """Let every handle of this process use `profile` for a while: for the command line's `-e`, and
    for tests."""
    state = _here()
    before, state.chosen = state.chosen, profile
    try:
        yield
    finally:
        state.chosen = before


def client() -> Client:
    """The shared synchronous client of the current profile."""
    state, profile = _here(), current_profile()
    with state.lock:
        if profile not in state.clients:
            state.clients[profile] = Client(profile)
        return state.clients[profile]


async def async_client() -> AsyncClient:
    """The running loop's client of the current profile; closed when the loop shuts its asynchronous
    generators down."""
    clients = _by_loop.setdefault(asyncio.get_running_loop(), {})
    profile = current_profile()
    if profile not in clients:
        fresh = AsyncClient(profile)
        keeper = _keep(fresh)
        clients[profile] = (fresh, keeper)
        await anext(keeper)
    return clients[profile][0]


async def _keep(client: AsyncClient) -> AsyncGenerator[None]:
    # asyncio.run() closes every generator that was started in its loop before it closes the loop:
    # the one hook that lets a cached client end with its loop instead of leaking sockets.
    try:
        yield
    finally:
        await client.aclose()


def background_loop() -> asyncio.AbstractEventLoop:
    """An event loop in a daemon thread, for synchronous callers that want many calls in flight."""
    state = _here()
    with state.lock:
        if state.loop is None:
            state.loop = asyncio.new_event_loop()
            state.thread = threading.Thread(
                target=state.loop.run_forever, name="pilotlight calls", daemon=True
            )
            state.thread.start()
        return state.loop


def close() -> None:
    """Close every connection of this process that handles opened, and end the thread. They are made
    again when needed."""
    state = _here()
    with state.lock:
        open_clients, state.clients = list(state.clients.values()), {}
        loop, thread, state.loop, state.thread = state.loop, state.thread, None, None
    for open_client in open_clients:
        open_client.close()
    if loop is not None and thread is not None:
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result(
                _CLOSE_TIMEOUT_S
            )
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()


atexit.register(close)

"""Shared clients for handles: a synchronous one per process and profile, an asynchronous one per
event loop, and a background loop for synchronous maps.

The state is global on purpose: handles are module-level objects that any thread, loop or forked
process may use. A forked process starts with new state, so processes never share connections."""

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
from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.profile import Profile

_CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _State:
    """State of one process, shared between threads. `lock` guards every field."""

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


def _current_state() -> _State:
    global _state
    if _state.pid != os.getpid():
        _state = _State(chosen=_state.chosen)
    return _state


def current_profile() -> Profile:
    """Return the profile that handles use: the one set by `use_profile`, otherwise the active one
    (`pilotlight.profile.load`)."""
    return _current_state().chosen or profiles.load()


@contextlib.contextmanager
def use_profile(profile: Profile) -> Iterator[None]:
    """Make all handles of this process use `profile` in a `with` block: for the option `-e` of the
    command line, and for tests."""
    state = _current_state()
    before, state.chosen = state.chosen, profile
    try:
        yield
    finally:
        state.chosen = before


def client() -> Client:
    """Return the shared synchronous client of the current profile."""
    state, profile = _current_state(), current_profile()
    with state.lock:
        if profile not in state.clients:
            state.clients[profile] = Client(profile)
        return state.clients[profile]


async def async_client() -> AsyncClient:
    """Return the client of the current profile for the running loop. It is closed when the loop
    shuts down its asynchronous generators."""
    clients = _by_loop.setdefault(asyncio.get_running_loop(), {})
    profile = current_profile()
    if profile not in clients:
        fresh = AsyncClient(profile)
        lifetime = _keep_open(fresh)
        clients[profile] = (fresh, lifetime)
        await anext(lifetime)
    return clients[profile][0]


async def _keep_open(client: AsyncClient) -> AsyncGenerator[None]:
    # asyncio.run() closes all generators of its loop before the loop: the only hook to close a
    # cached client with its loop instead of leaking sockets.
    try:
        yield
    finally:
        await client.aclose()


def background_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in a daemon thread, for many parallel calls of synchronous callers."""
    state = _current_state()
    with state.lock:
        if state.loop is None:
            state.loop = asyncio.new_event_loop()
            state.thread = threading.Thread(
                target=state.loop.run_forever, name="pilotlight calls", daemon=True
            )
            state.thread.start()
        return state.loop


def close() -> None:
    """Close all connections of handles in this process, and end the background thread. They are
    created again when needed."""
    state = _current_state()
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

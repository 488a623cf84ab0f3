"""A small poll loop with message peers, used by the shim. Standard library only; one thread."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from snapshotter.shim import seqpacket

PACED_SHARE = 0.02
"""Fraction of a processor that user code can make the shim, whose CPU time is not billed, spend on
one descriptor. Enough for 50,000 lines a second."""
_PACED_BURST_S = 0.5
"""Burst of CPU time: some GB of output that is read and dropped, or 0.5 million short lines."""
_RESUME_S = 0.002
"""CPU time that accrues during a pause, which therefore lasts a tenth of a second: shorter pauses
would cost as much as they save."""
_MOST_INVALID = 100
"""Invalid messages after which a peer is disconnected. Our own peers send none."""
_MOST_AT_END = 1024
"""Messages that are read from a worker that has exited: more than a socket buffer holds. Bounded,
because its children may continue to write."""


class Poller:
    """Descriptors and handlers for when they are readable. Owner: the loop that calls `poll_once`.

    Descriptors that user code writes to are `paced`: if a handler has used more than `PACED_SHARE`
    of a processor and its burst, its descriptor is not polled until it is below the limit again.
    Writers block meanwhile.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._budgets: dict[int, tuple[float, float]] = {}  # CPU seconds left, and when that was
        self._paused: dict[int, float] = {}  # until when
        self._writers: set[int] = set()
        self._free_s = 0.0

    def __repr__(self) -> str:
        return f"<Poller {len(self._handlers)} descriptors>"

    def watch(self, fd: int, handler: Callable[[int], None], *, paced: bool = False) -> None:
        """Call `handler(events)` when `fd` is readable, or at its end."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)
        if paced:
            self._budgets[fd] = _PACED_BURST_S, time.monotonic()

    def unwatch(self, fd: int) -> None:
        """Stop polling `fd`; call before closing it. No error if it is not watched."""
        self._budgets.pop(fd, None)
        self._writers.discard(fd)
        is_paused = self._paused.pop(fd, None) is not None
        if self._handlers.pop(fd, None) is not None and not is_paused:
            self._epoll.unregister(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Call the handler when `fd` is writable as well; for a paused descriptor after its
        pause."""
        if wanted:
            self._writers.add(fd)
        else:
            self._writers.discard(fd)
        if fd not in self._paused:
            self._epoll.modify(fd, self._events(fd))

    @contextlib.contextmanager
    def unmetered(self) -> Iterator[None]:
        """Exclude the context's CPU time from the handler's budget: work of our own, which is
        bounded and done once."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._free_s += time.thread_time() - began

    def _events(self, fd: int) -> int:
        return select.EPOLLIN | (select.EPOLLOUT if fd in self._writers else 0)

    def poll_once(self, timeout_s: float | None) -> None:
        """Wait for events, at most `timeout_s`, and handle them. A handler may unwatch descriptors
        with pending events."""
        before = time.thread_time()
        for fd, events in self._epoll.poll(self._resume_paused(timeout_s)):
            handler = self._handlers.get(fd)
            if handler is None:
                continue
            self._free_s = 0.0
            handler(events)
            now = time.thread_time()
            if fd in self._budgets:
                self._spend(fd, now - before - self._free_s)
            before = now

    def _spend(self, fd: int, cpu_s: float) -> None:
        (left, since), now = self._budgets[fd], time.monotonic()
        left = min(_PACED_BURST_S, left + (now - since) * PACED_SHARE) - cpu_s
        self._budgets[fd] = left, now
        if left < 0:
            self._epoll.unregister(fd)
            self._paused[fd] = now + (_RESUME_S - left) / PACED_SHARE

    def _resume_paused(self, timeout_s: float | None) -> float | None:
        """Resume polling of descriptors whose pause is over; returns how long to wait at most."""
        now = time.monotonic()
        for fd in [fd for fd, until in self._paused.items() if until <= now]:
            del self._paused[fd]
            self._epoll.register(fd, self._events(fd))
        if self._paused:
            pause_s = min(self._paused.values()) - now
            return pause_s if timeout_s is None else min(pause_s, timeout_s)
        return timeout_s


class Peer:
    """A message connection to the agent or the worker. Owner: the poller's loop.

    `on_message` takes ownership of the descriptors. It may raise OSError to end the connection, and
    ValueError for an invalid message, which is dropped; a peer that sends too many of them is
    disconnected. `paced`: user code can write to it, as in `Poller`.
    """

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        on_message: Callable[[Mapping[str, Any], list[int]], None],
        on_lost: Callable[[], None],
        *,
        paced: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poller = poller
        self._outbox = seqpacket.SendQueue(sock)
        self._on_message = on_message
        self._on_lost = on_lost
        self._invalid = 0
        self.is_open = True
        poller.watch(sock.fileno(), self._on_events, paced=paced)

    def push(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Send now, or when the peer reads. Takes ownership of `fds`. Raises OSError when the peer
        has disconnected, seqpacket.MessageTooLong."""
        if not self.is_open:
            seqpacket.close_all(fds)
            raise BrokenPipeError("the peer has disconnected")
        self._outbox.push(message, fds)
        self._poller.want_write(self._socket.fileno(), bool(self._outbox))

    def read_all(self) -> None:
        """Read everything that has arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_AT_END):
                if not self.is_open:
                    return
                self._read_one()

    def close(self) -> None:
        """Idempotent. `on_lost` is not called."""
        if self.is_open:
            self.is_open = False
            self._poller.unwatch(self._socket.fileno())
            self._outbox.clear()
            self._socket.close()

    def _on_events(self, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._outbox.flush()
                self._poller.want_write(self._socket.fileno(), bool(self._outbox))
            if events & ~select.EPOLLOUT:
                self._read_one()
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def _read_one(self) -> None:
        try:
            message, fds = seqpacket.receive(self._socket)
        except BlockingIOError:
            raise
        except OSError:
            self._lose()
            return
        except ValueError:
            self._drop_one()
            return
        if message is None:
            self._lose()
            return
        try:
            self._on_message(message, fds)
        except ValueError:
            self._drop_one()

    def _drop_one(self) -> None:
        """Count an invalid message."""
        self._invalid += 1
        if self._invalid > _MOST_INVALID:
            self._lose()

    def _lose(self) -> None:
        if self.is_open:
            self.close()
            self._on_lost()

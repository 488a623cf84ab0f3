"""Passes what networks of their own ask a name server on to the host's: datagrams and connections,
unread.

    python name_relay.py UDP_FD TCP_FD SERVER…

A process of its own, as `nobody`: what tenants send is nothing that the node agent works on.
Standard library only. Each address has a share of what may be open at once, so that nobody's
questions wait for another's; what is beyond it is dropped: clients ask again (RFC 1035, section
4.2.1). Sources: RFC 1035, RFC 7766 (DNS over TCP)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

PORT = 53
MOST, MOST_OF_ONE = 1024, 64
"""Questions and connections that are open at once, of all and of one address."""
ANSWER_S = 2.0
"""Until the next server is asked; resolv.conf(5) has 5 s for each attempt."""
IDLE_S = 10.0
"""Of a connection (RFC 7766, section 6.2.3)."""
_BYTES = 65_535
_PR_SET_PDEATHSIG = 1
_NOBODY = 65534


class DnsShares:
    """What is open, by address. Owner: the event loop."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, address: str) -> Iterator[bool]:
        """True: there is room for one more, until the end of the context."""
        has_room = self._open.total() < MOST and self._open[address] < MOST_OF_ONE
        self._open[address] += has_room
        try:
            yield has_room
        finally:
            self._open[address] -= has_room
            if not self._open[address]:
                del self._open[address]


class DnsRelay:
    """Owner: the event loop."""

    def __init__(self, servers: Sequence[str], port: int = PORT) -> None:
        self._servers = servers
        self._port = port
        self._shares = DnsShares()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, datagrams: socket.socket, stream: socket.socket) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        datagrams.setblocking(False)
        server = await asyncio.start_server(self._connected, sock=stream)
        async with server:
            while True:
                question, caller = await loop.sock_recvfrom(datagrams, _BYTES)
                task = asyncio.create_task(self._ask(question, caller, datagrams))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _ask(
        self, question: bytes, caller: tuple[str, int], datagrams: socket.socket
    ) -> None:
        with self._shares.one(caller[0]) as has_room:
            for server in self._servers if has_room else ():
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await self._answer(server, question)
                    datagrams.sendto(answer, caller)
                    return

    async def _answer(self, server: str, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        # a port of its own: it cannot be guessed
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            asking.connect((server, self._port))
            await loop.sock_sendall(asking, question)
            return await loop.sock_recv(asking, _BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._shares.one(writer.get_extra_info("peername")[0]) as has_room:
            for server in self._servers if has_room else ():
                try:
                    async with asyncio.timeout(ANSWER_S):
                        there_reader, there_writer = await asyncio.open_connection(
                            server, self._port
                        )
                except (OSError, TimeoutError):
                    continue
                await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))
                there_writer.close()
                break
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(IDLE_S):
                piece = await reader.read(_BYTES)
                if not piece:
                    writer.write_eof()  # the answer may still come
                    return
                writer.write(piece)
                await writer.drain()


def _leave_root() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def main() -> None:
    """Serve until the parent, or anybody, ends this process."""
    _leave_root()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    datagrams, stream = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    asyncio.run(DnsRelay(sys.argv[3:]).serve(datagrams, stream))


if __name__ == "__main__":
    main()

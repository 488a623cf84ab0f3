"""Relays DNS queries of separate networks to the host's name servers: datagrams and connections,
without parsing them.

    python dns_relay.py UDP_FD TCP_FD SERVER…

Runs as a separate process with uid 65534, so that the node agent does not process tenants' input.
Standard library only. Each client address has a limit of concurrent queries, so that one client
cannot delay another; queries beyond it are dropped, and clients retry (RFC 1035, section 4.2.1).
Sources: RFC 1035, RFC 7766 (DNS over TCP).
"""

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
"""Concurrent queries and connections, in total and per address."""
ANSWER_S = 2.0
"""Timeout before the next server is tried; resolv.conf(5) allows 5 s for each attempt."""
IDLE_S = 10.0
"""Idle timeout of a connection (RFC 7766, section 6.2.3)."""
_BYTES = 65_535
_PR_SET_PDEATHSIG = 1
_NOBODY = 65534


class DnsShares:
    """Concurrent queries by address. Owner: the event loop."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def admit(self, address: str) -> Iterator[bool]:
        """Yield whether one more query is admitted; it counts until the end of the context."""
        has_room = self._open.total() < MOST and self._open[address] < MOST_OF_ONE
        self._open[address] += has_room
        try:
            yield has_room
        finally:
            self._open[address] -= has_room
            if not self._open[address]:
                del self._open[address]


class DnsRelay:
    """Forwards queries. Owner: the event loop."""

    def __init__(self, servers: Sequence[str], port: int = PORT) -> None:
        self._servers = servers
        self._port = port
        self._shares = DnsShares()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, datagrams: socket.socket, stream: socket.socket) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        datagrams.setblocking(False)
        server = await asyncio.start_server(self._connected, sock=stream)
        async with server:
            while True:
                question, caller = await loop.sock_recvfrom(datagrams, _BYTES)
                task = asyncio.create_task(self._forward(question, caller, datagrams))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, question: bytes, caller: tuple[str, int], datagrams: socket.socket
    ) -> None:
        with self._shares.admit(caller[0]) as has_room:
            for server in self._servers if has_room else ():
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await self._query(server, question)
                    datagrams.sendto(answer, caller)
                    return

    async def _query(self, server: str, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        # a new port for each query, which cannot be guessed
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            asking.connect((server, self._port))
            await loop.sock_sendall(asking, question)
            return await loop.sock_recv(asking, _BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._shares.admit(writer.get_extra_info("peername")[0]) as has_room:
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
                    writer.write_eof()  # the answer may still arrive
                    return
                writer.write(piece)
                await writer.drain()


def _drop_root() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def main() -> None:
    """Serve until the parent exits or this process is killed."""
    _drop_root()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    datagrams, stream = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    asyncio.run(DnsRelay(sys.argv[3:]).serve(datagrams, stream))


if __name__ == "__main__":
    main()

"""A TCP link to a server that a test cuts and mends: what is behind it is away for those who come
this way, and for nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any
from urllib.parse import urlsplit

import yaml

Json = dict[str, Any]
_PIECE = 65536
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class TcpLink:
    """Owner: a test; `linked` opens and closes one."""

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp link")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._is_answer_lost = False
        self.port = 0

    def mend(self) -> None:
        """Listen; at the same port as before."""
        if not self._thread.is_alive():
            self._thread.start()
        self._run(self._listen())

    def cut(self) -> None:
        """Reset all connections, and refuse new ones."""
        self._run(self._close())

    def hold(self, *, holds: bool) -> None:
        """Whether nothing passes, while connections stay and new ones are accepted."""
        change = self._passes.clear if holds else self._passes.set
        self._loop.call_soon_threadsafe(change)

    def lose_answer(self) -> None:
        """Reset the connection on which the server next says something, instead of passing that
        on."""
        self._is_answer_lost = True

    def close(self) -> None:
        """Cut, for good."""
        self.hold(holds=False)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _forward(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, there = await asyncio.open_connection(*self._where)
        except OSError:
            back.transport.abort()
            return
        self._writers |= {back, there}
        try:
            await asyncio.gather(self._pipe(near, there), self._pipe(far, back, is_answer=True))
        finally:
            self._writers -= {back, there}

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._passes.wait()
                if is_answer and self._is_answer_lost:
                    self._is_answer_lost = False
                    writer.transport.abort()
                    return
                writer.write(piece)
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def linked(kubeconfig: str, base: str) -> Iterator[tuple[TcpLink, str]]:
    """A link to the API server of a kubeconfig's current context, and the kubeconfig that leads
    through it. `base`: the folder from which its relative paths start."""
    document: Json = yaml.safe_load(kubeconfig)
    context = next(
        one["context"] for one in document["contexts"] if one["name"] == document["current-context"]
    )
    for kind in ("cluster", "user"):
        for one in document[f"{kind}s"]:
            for name in _FILES:
                if not str(one[kind].get(name, "/")).startswith("/"):
                    one[kind][name] = f"{base}/{one[kind][name]}"
    cluster = next(
        one["cluster"] for one in document["clusters"] if one["name"] == context["cluster"]
    )
    url = urlsplit(cluster["server"])
    assert url.hostname is not None
    link = TcpLink(url.hostname, url.port or (443 if url.scheme == "https" else 80))
    link.mend()
    try:
        if url.scheme == "https":
            cluster.setdefault("tls-server-name", url.hostname)
        cluster["server"] = f"{url.scheme}://127.0.0.1:{link.port}{url.path}"
        yield link, yaml.safe_dump(document)
    finally:
        link.close()

"""RPC over the platform's node-local sockets: newline-delimited JSON over a Unix stream.

A connection carries up to `MAX_CALLS` concurrent calls; a further one is answered with
`too_many_calls`. A request is `{"id": 7, "op": "open", "args": {…}}`; the response is either one
frame `{"id": 7, "ok": {…}}` or `{"id": 7, "error": {"code", "message", "detail"}}`, or, for a
streaming operation, any number of `{"id": 7, "part": {…}}` before that last frame. `{"id": 7, "op":
"cancel"}` cancels a call. Frames have at most `MAX_FRAME_BYTES`; larger payloads must be passed as
files.

The server reads the peer's credentials from the kernel (SO_PEERCRED, unix(7)). It serves its own
uid and root, and optionally a guest: another uid, with its own set of operations. The socket's mode
enforces the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.core.threads import cancel_and_wait
from pilotlight.core.yield_budget import YieldBudget

MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Longest frame: a launch spec with secrets and a schema has about 100 KiB; 8 MiB is generous and
still bounds memory."""

MAX_CALLS = 1024
"""Concurrent calls per connection: an activator has one per waiting start; log readers use separate
connections."""
MAX_CALLS_BYTES = 64 * 1024 * 1024
"""Limit of their requests together, which stay in memory until they are answered. A start's launch
document has about 100 KiB."""
_MAX_MESSAGE = 64 * 1024
"""Characters kept of an error's message if its frame was too long."""
_PEER_CREDENTIALS = struct.Struct("3i")


class RpcRemoteError(Exception):
    """Raised when the peer answered a call with an error frame; `code` is its code.

    Clients convert it to an error of their own package.
    """

    def __init__(self, code: str, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.detail: Mapping[str, Any] = detail or {}


class RpcTransportError(Exception):
    """Raised when the peer on the Unix socket violates the wire protocol or disconnects."""

    code = "protocol_error"


SendPart = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends one intermediate frame of a streaming call; waits for the peer to read (back-pressure)."""

RpcOperation = Callable[[Mapping[str, Any], SendPart], Awaitable[Mapping[str, Any]]]
"""An operation: receives arguments and a function to stream parts, returns the final response."""


def encode_frame(frame: Mapping[str, Any]) -> bytes:
    """Encode one frame, newline included. Raises RpcTransportError if it is too long."""
    line = json.dumps(frame, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_FRAME_BYTES:
        raise RpcTransportError(
            f"frame of {len(line)} bytes exceeds {MAX_FRAME_BYTES}: send large data as files, not "
            f"frames"
        )
    return line


class RpcClient:
    """Many concurrent calls over one connection.

    Owner: the event loop it was opened on; no lock is needed because every change of `_waiting`
    happens between awaits. When the connection is lost every pending call fails with
    RpcTransportError immediately."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_queued_frames: int = 0,
    ) -> None:
        """`max_queued_frames`: limit of unread frames per call; at the limit reading stops for all
        calls. 0: no limit."""
        self._reader = reader
        self._writer = writer
        self._most_waiting = max_queued_frames
        self._next_id = 0
        self._waiting: dict[int, asyncio.Queue[Mapping[str, Any] | None]] = {}
        self._closed = False
        self._pump = asyncio.create_task(self._read_frames(), name="rpc client reader")

    @classmethod
    async def open(cls, path: Path, *, max_queued_frames: int = 0) -> RpcClient:
        """Connect to the socket at `path`. Limit queued frames only on connections with one call.

        Raises RpcTransportError, naming the path, if the connection fails.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_FRAME_BYTES)
        except OSError as e:
            raise RpcTransportError(f"cannot connect to {path}: {e.strerror or e}") from e
        return cls(reader, writer, max_queued_frames=max_queued_frames)

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self._closed

    async def call(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call an operation and return its response. Raises RpcRemoteError or RpcTransportError.
        Cancelling it cancels the operation too."""
        async with contextlib.aclosing(self._frames(op, args)) as frames:
            async for kind, body in frames:
                if kind == "ok":
                    return body
        raise RpcTransportError(f"{op}: the stream ended without an answer")

    async def stream(
        self, op: str, args: Mapping[str, Any]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the parts of a streaming call, then its final response as the last item."""
        async with contextlib.aclosing(self._frames(op, args)) as frames:
            async for _, body in frames:
                yield body

    async def _frames(
        self, op: str, args: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        if self._closed:
            raise RpcTransportError(f"{op}: the connection is closed")
        self._next_id += 1
        call_id = self._next_id
        inbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(self._most_waiting)
        self._waiting[call_id] = inbox
        finished = False
        try:
            self._writer.write(encode_frame({"id": call_id, "op": op, "args": args}))
            await self._writer.drain()
            while True:
                frame = await inbox.get()
                if frame is None:
                    finished = True
                    raise RpcTransportError(
                        f"{op}: the peer closed the connection before it answered"
                    )
                if "part" in frame:
                    yield "part", frame["part"]
                    continue
                finished = True
                if "error" in frame:
                    error = frame["error"]
                    raise RpcRemoteError(error["code"], error["message"], error.get("detail"))
                yield "ok", frame["ok"]
                return
        except OSError as e:
            finished = True
            raise RpcTransportError(f"{op}: connection lost: {e}") from e
        finally:
            del self._waiting[call_id]
            if not finished and not self._closed:
                self._writer.write(encode_frame({"id": call_id, "op": "cancel"}))

    async def _read_frames(self) -> None:
        turns = YieldBudget()
        try:
            while line := await self._reader.readline():
                frame = json.loads(line)
                inbox = self._waiting.get(frame["id"])
                if inbox is not None:
                    await inbox.put(frame)
                await turns.handled(line)
        except (OSError, ValueError, KeyError):
            # a protocol violation counts as a disconnect: all pending calls fail below
            pass
        finally:
            self._closed = True
            for inbox in self._waiting.values():
                if inbox.full():
                    # a pending frame is not needed when the connection is lost
                    inbox.get_nowait()
                inbox.put_nowait(None)
            self._writer.close()

    async def aclose(self) -> None:
        """Close the connection; pending calls fail."""
        await cancel_and_wait(self._pump)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcGuest:
    """A uid that is served besides our own and root, and the operations it may call."""

    uid: int
    operations: Mapping[str, RpcOperation]


async def serve_rpc(
    path: Path,
    operations: Mapping[str, RpcOperation],
    describe: Callable[[Exception], tuple[str, str, Mapping[str, Any]] | None],
    *,
    guest: RpcGuest | None = None,
) -> asyncio.Server:
    """Serve `operations` on a Unix socket at `path` (mode 0600; with a guest see
    `grant_group_access`), replacing a stale socket file.

    `describe` converts an operation's exception to (code, message, detail); None means a bug, which
    the peer sees as `internal` and which is re-raised into the loop's exception handler."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        if guest is not None and uid == guest.uid:
            await _RpcConnection(reader, writer, guest.operations, describe).run()
        elif uid in (0, os.geteuid()):
            await _RpcConnection(reader, writer, operations, describe).run()
        else:
            writer.close()

    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    server = await asyncio.start_unix_server(on_connection, path, limit=MAX_FRAME_BYTES)
    if guest is None:
        path.chmod(0o600)
    else:
        grant_group_access(path)
    return server


def grant_group_access(path: Path) -> None:
    """Allow the group that may enter the directory of `path` to connect to it (a socket) or enter
    it (a directory), and no other users."""
    folder, is_directory = path.parent.stat(), path.is_dir()
    if not folder.st_mode & stat.S_IXGRP:
        path.chmod(0o700 if is_directory else 0o600)
        return
    os.chown(path, -1, folder.st_gid, follow_symlinks=False)
    path.chmod(0o710 if is_directory else 0o660)


def peer_uid(connection: socket.socket) -> int:
    """The uid of the peer of a Unix socket, from the kernel (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(raw)[1]
    return uid


class _PeerDisconnected(Exception):
    """Raised when a frame cannot be sent because the peer has disconnected."""


class _RpcConnection:
    """One peer connection: its running calls, cancelled when it disconnects."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        operations: Mapping[str, RpcOperation],
        describe: Callable[[Exception], tuple[str, str, Mapping[str, Any]] | None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._operations = operations
        self._describe = describe
        self._running: dict[int, asyncio.Task[None]] = {}
        self._held_bytes = 0

    async def run(self) -> None:
        turns = YieldBudget()
        try:
            while line := await self._reader.readline():
                await self._on_frame(json.loads(line), len(line))
                await turns.handled(line)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            _PeerDisconnected,
            asyncio.CancelledError,
        ):
            pass  # disconnect or protocol violation: either way this connection ends
        finally:
            for task in list(self._running.values()):
                task.cancel()
            self._writer.close()

    async def _on_frame(self, frame: Mapping[str, Any], size_bytes: int) -> None:
        """Start a call, or cancel one, which is always accepted. Raises ValueError for an id in
        use."""
        call_id = frame["id"]
        if frame["op"] == "cancel":
            task = self._running.get(call_id)
            if task is not None:
                task.cancel()
            return
        if call_id in self._running:
            raise ValueError(f"call {call_id!r} is running already")
        if self._running and (
            len(self._running) >= MAX_CALLS or self._held_bytes + size_bytes > MAX_CALLS_BYTES
        ):
            held = f"{len(self._running)} calls of {self._held_bytes} bytes run on this connection"
            await self._fail(
                call_id,
                "too_many_calls",
                f"{held}: at most {MAX_CALLS} of {MAX_CALLS_BYTES} bytes are allowed; wait for a "
                f"response",
            )
            return
        self._held_bytes += size_bytes
        task = asyncio.create_task(self._answer(frame), name=f"rpc {frame['op']} #{call_id}")
        self._running[call_id] = task
        task.add_done_callback(lambda _: self._end(call_id, size_bytes))

    def _end(self, call_id: int, size_bytes: int) -> None:
        """Clean up a call, also one cancelled before it began."""
        del self._running[call_id]
        self._held_bytes -= size_bytes

    async def _answer(self, frame: Mapping[str, Any]) -> None:
        call_id = frame["id"]

        async def part(body: Mapping[str, Any]) -> None:
            await self._send({"id": call_id, "part": body})

        try:
            operation = self._operations.get(frame["op"])
            if operation is None:
                known = ", ".join(sorted(self._operations))
                await self._fail(
                    call_id,
                    "unknown_operation",
                    f"no operation {frame['op']!r}; there are: {known}",
                )
                return
            await self._send({"id": call_id, "ok": await operation(frame.get("args") or {}, part)})
        except _PeerDisconnected:
            pass  # the response cannot be delivered
        except Exception as e:
            described = self._describe(e)
            if isinstance(e, RpcTransportError):  # the response is too long for a frame
                described = (e.code, str(e), {})
            with contextlib.suppress(_PeerDisconnected):
                await self._fail(
                    call_id, *(described or ("internal", f"{type(e).__name__}: {e}", {}))
                )
            if described is None:
                raise

    async def _fail(
        self, call_id: int, code: str, message: str, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Send an error frame; without the detail if the frame would be too long."""
        error = {"code": code, "message": message, "detail": dict(detail or {})}
        try:
            await self._send({"id": call_id, "error": error})
        except RpcTransportError:
            short = {"code": code, "message": message[:_MAX_MESSAGE], "detail": {}}
            await self._send({"id": call_id, "error": short})

    async def _send(self, frame: Mapping[str, Any]) -> None:
        line = encode_frame(frame)
        try:
            self._writer.write(line)
            await self._writer.drain()
        except OSError as e:  # not an error of the operation itself, which must be reported
            raise _PeerDisconnected from e


class SharedRpcConnection:
    """Base of typed clients: one connection for concurrent calls, opened by the first of them, and
    again after a loss. Owner: one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._rpc: RpcClient | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        state = (
            "connected" if self._rpc is not None and not self._rpc.is_closed else "not connected"
        )
        return f"<{type(self).__name__} {self._path} {state}>"

    async def aclose(self) -> None:
        """Close the connection."""
        if self._rpc is not None:
            await self._rpc.aclose()
            self._rpc = None

    async def _connection(self) -> RpcClient:
        # concurrent calls share the connection that the first of them opens
        async with self._opening:
            if self._rpc is None or self._rpc.is_closed:
                self._rpc = await RpcClient.open(self._path)
            return self._rpc

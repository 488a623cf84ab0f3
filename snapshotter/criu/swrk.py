"""One conversation with one `criu swrk` process: a request, its notifications, and its answer,
within a deadline.

A datagram on the SEQPACKET socket is one protobuf message. CRIU serves one dump or restore per
process, so a `Swrk` is used once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from snapshotter.criu import logs
from snapshotter.criu.errors import CriuExited, CriuFailed, CriuTimeout
from snapshotter.criu.messages import InvalidResponse, Messages, Response

Notify = Callable[[str, int], bool]
"""`(step, pid) -> continue?`, called between CRIU's steps while CRIU waits: must not block."""

_MAX_ANSWER_BYTES = 256 * 1024
"""Answers contain at most a log line; a longer one is truncated and thus invalid."""
_LAST_WORDS_S = 0.2
"""How long to wait for the status of a CRIU that closed the socket, to tell a crash from an
exit."""


class Swrk:
    """One CRIU RPC connection. Owner: the task that awaits `request`. The caller owns the
    socket."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        messages: Messages,
        exited: asyncio.Future[int | None],
        log: Callable[[], bytes] = bytes,
    ) -> None:
        """`exited` resolves to CRIU's wait status; `log` reads its log so far."""
        connection.setblocking(False)
        self._connection = connection
        self._messages = messages
        self._exited = exited
        self._log = log

    async def request(
        self,
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        deadline_s: float,
        on_notify: Notify | None = None,
    ) -> Response:
        """Send one request and return its successful answer. After an error the caller must kill
        CRIU.

        Raises CriuFailed (CRIU reports a failure), CriuTimeout, CriuExited (it died, or its answer
        is invalid), CriuUnavailable (an unknown option)."""
        operation = kind.lower().replace("_", "-")
        raw = self._messages.request(kind, options)
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._converse(operation, raw, on_notify)
        except TimeoutError:
            raise CriuTimeout(operation, deadline_s, log_tail=logs.tail(self._log())) from None
        if answer.kind != kind:
            raise self._exited_error(
                operation, f"it answered {answer.kind} to {kind}: {answer.error or 'no message'}"
            )
        if not answer.success:
            raise self._failed(operation, answer)
        return answer

    async def _converse(self, operation: str, raw: bytes, on_notify: Notify | None) -> Response:
        await self._send(operation, raw)
        while True:
            answer = await self._receive(operation)
            if answer.kind != "NOTIFY":
                return answer
            go_on = on_notify is None or on_notify(answer.notify, answer.notify_pid)
            await self._send(operation, self._messages.notified(success=go_on))

    async def _send(self, operation: str, raw: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, raw)
        except OSError as e:
            raise await self._hung_up(operation) from e

    async def _receive(self, operation: str) -> Response:
        try:
            raw = await asyncio.get_running_loop().sock_recv(self._connection, _MAX_ANSWER_BYTES)
        except OSError as e:
            raise await self._hung_up(operation) from e
        if not raw:
            raise await self._hung_up(operation)
        try:
            return self._messages.response(raw)
        except InvalidResponse as e:
            raise self._exited_error(
                operation, f"its answer is invalid ({len(raw)} bytes: {e})"
            ) from e

    async def _hung_up(self, operation: str) -> CriuExited:
        await asyncio.wait([self._exited], timeout=_LAST_WORDS_S)
        status = (
            self._exited.result() if self._exited.done() and not self._exited.cancelled() else None
        )
        return self._exited_error(operation, f"it hung up without an answer ({_in_words(status)})")

    def _exited_error(self, operation: str, message: str) -> CriuExited:
        log = self._log()
        if errors := logs.errors_of(logs.lines_of(log)):
            message = f"{message}; its log says: {errors[-1]}"
        status = (
            self._exited.result() if self._exited.done() and not self._exited.cancelled() else None
        )
        return CriuExited(operation, message, status=status, log_tail=logs.tail(log))

    def _failed(self, operation: str, answer: Response) -> CriuFailed:
        log = self._log()
        cause = logs.cause_of(log, fallback=answer.error)
        return CriuFailed(
            operation,
            errno=answer.errno,
            reason=cause.reason,
            message=cause.message,
            cause="; ".join(cause.lines),
            log_tail=logs.tail(log),
        )


def _in_words(status: int | None) -> str:
    if status is None:
        return "unknown status"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

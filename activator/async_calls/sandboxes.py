"""Requests to sandboxes: `/v1/sandboxes/{id}/…` goes to the worker of the instance on which the
submitted call of this id runs (`pilotlight.spec.sandboxes`), whatever its other calls are.

Who may read a call may use its sandbox: keys of its tenant that may call, and of those bound to a
function only its own. A request costs nothing beside the sandbox's time, and is no call: it has no
record, and quotas of its own, by number and bytes (`quotas.rules.operations_of`). Requests to one
sandbox in progress are limited, their bodies are small, and the worker, in
which code of strangers may have stopped everything, has a deadline for each."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter

from activator.async_calls.pending import PendingCalls
from activator.async_calls.pending_call import PendingCall
from activator.async_calls.result_stream import FINAL
from activator.balancing.instance import Instance
from activator.coordination.peers import PASSED_ON, ActivatorPeers
from activator.http.payloads import GUARD
from activator.http.request import Request
from activator.routing.api_keys import Principal
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON, CONTENT_PROBLEM, WORKER_SANDBOX
from pilotlight.spec.sandboxes import (
    LABEL,
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    MAX_REQUESTS,
    QUEUE_S,
    WAIT_S,
)

ANSWER_S = WAIT_S + 40.0
"""How long a worker may take to answer a request."""
END_S = 1.0
"""How long after a lost connection the end of the sandbox is waited for, to say so."""
METHODS = {
    "exec": ("POST",),
    "files": ("GET", "PUT", "DELETE"),
    "directory": ("GET", "POST"),
}
"""By the part of the path behind the sandbox's id."""
_PROCESS = re.compile(r"processes/[0-9]{1,18}(/stdin|/kill)?")
_TYPES = (CONTENT_JSON, CONTENT_PROBLEM)
_OTHER = "application/octet-stream"


class SandboxesApi:
    """Answers requests to sandboxes. Owner: the event loop."""

    def __init__(
        self, held: PendingCalls, *, siblings: ActivatorPeers | None, body_timeout_s: float
    ) -> None:
        self._held = held
        self.siblings = siblings
        self._body_timeout_s = body_timeout_s
        self._running: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SandboxesApi {self._running.total()} requests>"

    async def answer(self, request: Request, caller: Principal, path: str) -> None:
        """Answer one request; `path`: `{id}/…`. Raises NotFound, MethodNotAllowed, TooLarge,
        TooManyRequests, UnsupportedMediaType, WorkerCrashed, DeadlineExceeded."""
        call_id, _, rest = path.partition("/")
        request.require_method(*methods_of(rest))
        if b"content-encoding" in request.headers:  # it may be forwarded as it is
            raise errors.UnsupportedMediaType("send the body without Content-Encoding")
        request.tenant = caller.tenant  # in whose share of memory the body counts
        body = await request.raw_body(limit_bytes=MAX_BODY_BYTES, timeout_s=self._body_timeout_s)
        if request.on_bytes is not None:
            request.on_bytes(len(body))
        held = self._held.find_for(caller, call_id)
        if held is None or LABEL not in held.record.labels:
            if not await self._is_answered_by_sibling(request, caller, body):
                raise _ended(call_id)
            return
        if self._running[call_id] >= MAX_REQUESTS:
            raise errors.TooManyRequests(
                f"{MAX_REQUESTS} requests to sandbox {call_id} are in progress: wait for one",
                retry_after_s=1.0,
            )
        self._running[call_id] += 1
        try:
            await self._forward(request, held, rest, body)
        finally:
            self._running -= Counter({call_id: 1})

    async def _is_answered_by_sibling(
        self, request: Request, caller: Principal, body: bytes
    ) -> bool:
        if self.siblings is None or PASSED_ON in request.headers:
            return False
        return await self.siblings.forward(request, caller.tenant, body)

    async def _forward(self, request: Request, held: PendingCall, rest: str, body: bytes) -> None:
        instance = await _wait_running(held)
        query: bytes = request.scope["query_string"]
        target = f"{WORKER_SANDBOX}/{rest}".encode() + (b"?" + query if query else b"")
        head = b"%b %b HTTP/1.1\r\nhost: worker\r\ncontent-length: %d\r\n\r\n" % (
            request.verb.encode(),
            _quoted(target),
            len(body),
        )
        loop = asyncio.get_running_loop()
        connections = instance.connections
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = connections.acquire_nowait(time.monotonic())
                connection = connection or await connections.open(loop)
                try:
                    answer = await connection.request(head + body, loop=loop)
                    await _pass_on(request, answer)
                finally:
                    # one whose exchange has not ended is closed
                    connections.release(connection, time.monotonic())
        except WorkerConnectionLost as e:
            if not request.is_answered and await _has_ended(held):
                raise _ended(held.record.id) from e
            # not 503, after which clients ask again: a command would run twice
            raise errors.WorkerCrashed(
                f"sandbox {held.record.id} broke the connection: it is not known what it did",
                reason="connection",
                worker=instance.id,
            ) from e
        except TimeoutError as e:
            raise errors.DeadlineExceeded(
                f"sandbox {held.record.id} did not answer within {ANSWER_S:g} s",
                clock="execution",
            ) from e


def methods_of(rest: str) -> tuple[str, ...]:
    """Return the methods of a path behind a sandbox's id. Raises NotFound."""
    if (found := METHODS.get(rest)) is not None:
        return found
    if (process := _PROCESS.fullmatch(rest)) is not None:
        return ("GET",) if process[1] is None else ("POST",)
    raise errors.NotFound(f"a sandbox serves nothing at {rest[:80]!r}")


async def _wait_running(held: PendingCall) -> Instance:
    """Return the sandbox's instance, once it has one. Raises NotFound, DeadlineExceeded."""
    try:
        async with asyncio.timeout(QUEUE_S):
            while held.record.state not in FINAL:
                if (instance := held.running_on) is not None:
                    return instance
                await held.changed.wait()
    except TimeoutError as e:
        raise errors.DeadlineExceeded(
            f"sandbox {held.record.id} had no instance within {QUEUE_S:g} s", clock="queue"
        ) from e
    raise _ended(held.record.id)


async def _has_ended(held: PendingCall) -> bool:
    """Whether the sandbox ends within END_S."""
    try:
        async with asyncio.timeout(END_S):
            while held.record.state not in FINAL:
                await held.changed.wait()
    except TimeoutError:
        return False
    return True


async def _pass_on(request: Request, answer: WorkerResponse) -> None:
    """Send the worker's answer: of its head only the status, and whether it is JSON."""
    given = answer.header(b"content-type").decode("latin-1")
    headers = [
        (b"content-type", (given if given in _TYPES else _OTHER).encode()),
        *GUARD,
        (b"x-request-id", request.id.encode()),
        *request.quota_headers(),
    ]
    if PASSED_ON in request.headers:
        headers.append((PASSED_ON, b"1"))
    status = answer.status if 200 <= answer.status < 600 else 502
    if answer.body is not None:
        headers.append((b"content-length", b"%d" % len(answer.body)))
        await request.respond(status, headers, answer.body)
        return
    await request.start(status, headers)
    left = MAX_ANSWER_BYTES
    async for chunk in answer.chunks():
        left -= len(chunk)
        if left < 0:  # clients read an answer as a whole
            raise WorkerConnectionLost("the answer is too long", sent=True)
        await request.chunk(chunk)
    await request.chunk(b"", more=False)


def _quoted(target: bytes) -> bytes:
    """Return a request target without bytes that would end it, or its line."""
    return bytes(byte for byte in target if 0x20 < byte < 0x7F)


def _ended(call_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"no sandbox {call_id[:80]} is running: it has ended, or never was",
        hint="`pilotlight sandbox list` lists those that run; `pilotlight call get ID`, or GET "
        "/v1/calls/{id}, says how one ended.",
    )

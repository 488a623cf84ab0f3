"""Middleware in front of the gateway for calls with an idempotency key
(draft-ietf-httpapi-idempotency-key-header).

A key belongs to one API key, and identifies one request: path, headers that affect the response,
and body. The first request runs to its end even if its caller disconnects; a repeat gets the same
response, marked as replayed; a repeat while the first still runs gets 409 with `Retry-After`. Only
successful responses are stored: a failed request can be repeated under the same key. A response of
more than MAX_ANSWER_BYTES is not stored either; its repeats run again, as do those of responses
that were evicted for newer ones of their tenant.

`:submit` does not use this middleware: there a key is the call's id, which is durable
(`activator.async_calls.service`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final, Protocol

from activator.access.grants import AccessGrant, parse_tenant_prefix
from activator.access.resolver import FUNCTIONS, RequestResolver
from activator.http.bodies import Bodies
from activator.http.request import Handle, Headers, Receive, Request
from activator.idempotency.store_protocol import LEASE_S, Claim, IdempotencyStore
from activator.quotas.admission import counted
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_all
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY, HEADER_REPLAYED

log = logging.getLogger(__name__)

KEY = HEADER_IDEMPOTENCY_KEY.encode()
MAX_KEY = 255
MAX_ANSWER_BYTES = 1024 * 1024
_VERBS = (":invoke", ":warmup")
_MODELS = ("/v1/models/", "/v2/models/")
_FINGERPRINT_HEADERS = (b"accept", b"content-type", b"pilotlight-environment", b"pilotlight-tag")
"""Headers that affect a call and its response."""


class Calls(Protocol):
    """Runs calls (the gateway)."""

    def entry_of(self, request: Request) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""

    async def respond(self, request: Request, inner: Handle) -> None:
        """Run a call by `inner`, and answer it, errors included."""


class Idempotency:
    """Runs or replays requests with an idempotency key. Owner: the event loop."""

    header: Final = KEY

    def __init__(
        self,
        store: IdempotencyStore,
        *,
        resolver: RequestResolver,
        ttl_s: float,
        body_timeout_s: float,
        bodies: Bodies,
    ) -> None:
        """`bodies`: memory limits of bodies while they are read."""
        self._bodies = bodies
        self._store = store
        self._resolver = resolver
        self._ttl_s = ttl_s
        self._body_timeout_s = body_timeout_s
        self.running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Idempotency {len(self.running)} running, {self._store!r}>"

    def handle(
        self, request: Request, *, inner: Handle, gateway: Calls
    ) -> Coroutine[Any, Any, None]:
        """Run a call with a key once, and others by `inner`. Raises what `answer` raises."""
        if self._concerns(request):
            return self.answer(request, inner, gateway)
        return inner(request)

    @staticmethod
    def _concerns(request: Request) -> bool:
        place = parse_tenant_prefix(request.path)[1]
        is_call = place.startswith(FUNCTIONS) and place.endswith(_VERBS)
        return request.verb == "POST" and (is_call or place.startswith(_MODELS))

    async def answer(self, request: Request, inner: Handle, gateway: Calls) -> None:
        """Run the request by `inner`, or replay its response.

        Raises Conflict, InvalidInput, Unauthenticated, Unavailable, OverQuota, and the errors of
        any call of its path."""
        caller = self._resolver.identify(request, parse_tenant_prefix(request.path)[0])
        if caller.is_anonymous:
            raise errors.Unauthenticated(
                f"{HEADER_IDEMPOTENCY_KEY} needs an API key, because it is scoped to one: send an "
                f"Authorization header"
            )
        given = request.headers[KEY]
        if not 0 < len(given) <= MAX_KEY:
            raise errors.InvalidInput(
                f"{HEADER_IDEMPOTENCY_KEY}: write 1 to {MAX_KEY} characters",
                parameter=HEADER_IDEMPOTENCY_KEY,
            )
        entry = gateway.entry_of(request)
        request.target = None  # not a call yet
        async with counted(entry.quota_check, holds=0 if request.path.endswith(":warmup") else 1):
            with self._bodies.room(request):  # after that it is counted where it runs
                body = await request.body(
                    limit_bytes=entry.body_bytes, timeout_s=self._body_timeout_s
                )
        name = hashlib.sha256(b"%b\0%b" % (caller.key_id.encode(), given)).hexdigest()
        fingerprint = _fingerprint(request, body)
        known = await self._store.claim(name, fingerprint)
        if known is None:
            claim = Claim(name=name, tenant=caller.tenant, fingerprint=fingerprint)
            await self._run(request, body, lambda again: gateway.respond(again, inner), claim)
        elif known.fingerprint != fingerprint:
            raise errors.Conflict(
                "this idempotency key was used for another request",
                hint="Use a new key for each call.",
            )
        elif known.answer is None:
            raise errors.Conflict(
                "the first request with this idempotency key is still running", retry_after_s=1.0
            )
        else:
            await _replay(request, known.answer)

    async def _run(self, request: Request, body: bytes, respond: Handle, claim: Claim) -> None:
        """Run in a separate task, which continues when the caller disconnects: a repeat of the
        request finds its response."""
        recorder = _ResponseRecorder(request, lambda answer: self._finish_claim(claim, answer))
        scope = {key: value for key, value in request.scope.items() if key != "connection"}
        scope["headers"] = [
            *(line for line in scope["headers"] if line[0] not in _DONE_HERE),
            (b"content-length", b"%d" % len(body)),
        ]
        again = Request(scope, _replay_body(body), recorder)
        task = asyncio.create_task(
            self._work(respond, again, recorder, claim), name=f"call under a key {request.id}"
        )
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            recorder.is_disconnected = True
            raise

    async def _work(
        self, respond: Handle, request: Request, recorder: _ResponseRecorder, claim: Claim
    ) -> None:
        holding = asyncio.create_task(
            self._renew_claim(claim.name), name="claim of an idempotency key"
        )
        try:
            await respond(request)
        finally:
            await cancel_all([holding])
            await recorder.finalize()

    async def _finish_claim(self, claim: Claim, answer: bytes | None) -> None:
        try:
            if answer is not None:
                await self._store.store(claim, answer, ttl_s=self._ttl_s)
            else:
                await self._store.release(claim.name)
        except errors.Unavailable as e:
            log.warning(
                "response under an idempotency key not stored: a repeat will run again error=%s", e
            )

    async def _renew_claim(self, name: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._store.renew(name)
            except errors.Unavailable as e:
                log.warning("claim of an idempotency key not renewed error=%s", e)

    async def aclose(self) -> None:
        """Cancel requests whose callers disconnected; their claims lapse."""
        await cancel_all(self.running)
        await self._store.aclose()


_DONE_HERE = frozenset({b"content-encoding", b"content-length", b"accept-encoding"})
"""Headers that are not passed on with a request under a key: its body is decoded, so that a repeat
may be compressed otherwise; and a repeat, which gets the same answer, may not accept its coding."""


class _ResponseRecorder:
    """Forwards a response to the caller while it is connected, and stores it before the last part
    is sent. Owner: one request."""

    def __init__(self, request: Request, store: Callable[[bytes | None], Awaitable[None]]) -> None:
        self._request = request
        self._store_answer = store
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0
        self._is_whole = self._is_finalized = False
        self.is_disconnected = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            if not self.is_disconnected:
                await self._request.start(self._status, self._headers)
            return
        part, more = message.get("body", b""), message.get("more_body", False)
        self._size += len(part)
        if self._size <= MAX_ANSWER_BYTES:
            self._parts.append(part)
        if not more:
            self._is_whole = True
            await self.finalize()
        if not self.is_disconnected:
            await self._request.chunk(part, more=more)

    async def finalize(self) -> None:
        """Store the response, or release the claim. Idempotent."""
        if not self._is_finalized:
            self._is_finalized = True
            await self._store_answer(self._answer())

    def _answer(self) -> bytes | None:
        """Return the response to store; None when it failed, was interrupted, or is too long."""
        if not self._is_whole or not 200 <= self._status < 300 or self._size > MAX_ANSWER_BYTES:
            return None
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers
        ]
        return (
            json.dumps({"status": self._status, "headers": headers}).encode()
            + b"\n"
            + b"".join(self._parts)
        )


async def _replay(request: Request, answer: bytes) -> None:
    head, _, body = answer.partition(b"\n")
    known = json.loads(head)
    headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in known["headers"]
    ]
    await request.respond(known["status"], [*headers, (HEADER_REPLAYED.encode(), b"true")], body)


def _fingerprint(request: Request, body: bytes) -> str:
    parts = [
        request.path.encode(),
        request.scope["query_string"],
        *(request.headers.get(name, b"") for name in _FINGERPRINT_HEADERS),
    ]
    return hashlib.sha256(b"\0".join(parts) + b"\0" + body).hexdigest()


def _replay_body(body: bytes) -> Receive:
    """Return a `receive` that yields the body once and then waits forever: a disconnect of the
    caller does not affect the request."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing comes after the body")

    return again

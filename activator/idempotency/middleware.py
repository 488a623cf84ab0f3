"""The layer in front of the gateway for calls under an idempotency key
(draft-ietf-httpapi-idempotency-key-header).

A key is its API key's alone, and stands for one request: path, headers that decide on the answer,
and body. Its first use runs, and goes on to its end though its caller leaves; a repeat gets the
same answer, marked; one that comes meanwhile is told to come again (409 with `Retry-After`). Kept
is what went well: what failed may be asked for again under the same key. An answer of more than
MAX_ANSWER_BYTES is not kept either; it says so to its repeats by running again, and so does one
that had to make room for newer ones of its tenant.

`:submit` is none of this layer's: there a key is the call's id, which is durable
(`activator.async_calls.service`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from activator.http.bodies import Bodies
from activator.http.request import Headers, Receive, Request, Scope, Send
from activator.idempotency.store import LEASE_S, Claim, IdempotencyStore
from activator.quotas.admission import counted
from activator.routing.access import AccessGrant, parse_tenant_prefix
from activator.routing.resolver import RequestResolver
from activator.routing.route_cache import FUNCTIONS
from pilotlight import errors
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY, HEADER_REPLAYED

log = logging.getLogger(__name__)

KEY = HEADER_IDEMPOTENCY_KEY.encode()
MAX_KEY = 255
MAX_ANSWER_BYTES = 1024 * 1024
_VERBS = (":invoke", ":warmup")
_MODELS = ("/v1/models/", "/v2/models/")
_TELLING = (b"accept", b"content-type", b"pilotlight-environment", b"pilotlight-tag")
"""Headers that decide on what a call is and how it is answered."""
EntryOf = Callable[[Request], AccessGrant]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Idempotency:
    """Owner: the event loop."""

    def __init__(
        self,
        store: IdempotencyStore,
        *,
        reception: RequestResolver,
        entry_of: EntryOf,
        ttl_s: float,
        body_timeout_s: float,
        bodies: Bodies,
    ) -> None:
        """`entry_of`: the way of a request that `concerns` this layer. `bodies`: where bodies count
        while they are read."""
        self._bodies = bodies
        self._entry_of = entry_of
        self._store = store
        self._reception = reception
        self._ttl_s = ttl_s
        self._body_timeout_s = body_timeout_s
        self._running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Idempotency {len(self._running)} running, {self._store!r}>"

    def concerns(self, request: Request) -> bool:
        """Whether a request that carries a key is looked at here."""
        place = parse_tenant_prefix(request.path)[1]
        is_call = place.startswith(FUNCTIONS) and place.endswith(_VERBS)
        return request.verb == "POST" and (is_call or place.startswith(_MODELS))

    async def answer(self, request: Request, app: App) -> None:
        """Run the request by `app`, or repeat its answer.

        Raises Conflict, InvalidInput, Unauthenticated, Unavailable, OverQuota, and what stands in
        the way of any call of its path."""
        caller = self._reception.identify(request, parse_tenant_prefix(request.path)[0])
        if caller.is_anonymous:
            raise errors.Unauthenticated(
                f"{HEADER_IDEMPOTENCY_KEY} needs an API key: without one nobody could say whose it is"
            )
        given = request.headers[KEY]
        if not 0 < len(given) <= MAX_KEY:
            raise errors.InvalidInput(
                f"{HEADER_IDEMPOTENCY_KEY}: write 1 to {MAX_KEY} characters",
                parameter=HEADER_IDEMPOTENCY_KEY,
            )
        entry = self._entry_of(request)
        request.target = None  # no call yet
        async with counted(entry.gate, holds=0 if request.path.endswith(":warmup") else 1):
            with self._bodies.room(request):  # then it counts where it is run
                body = await request.body(
                    limit_bytes=entry.body_bytes, timeout_s=self._body_timeout_s
                )
        name = hashlib.sha256(b"%b\0%b" % (caller.key_id.encode(), given)).hexdigest()
        fingerprint = _fingerprint(request, body)
        known = await self._store.claim(name, fingerprint)
        if known is None:
            await self._run(
                request, body, app, Claim(name=name, tenant=caller.tenant, fingerprint=fingerprint)
            )
        elif known.fingerprint != fingerprint:
            raise errors.Conflict(
                "this idempotency key was used for another request",
                hint="Use a new key for each call.",
            )
        elif known.answer is None:
            raise errors.Conflict(
                "the first request under this idempotency key still runs", retry_after_s=1.0
            )
        else:
            await _replay(request, known.answer)

    async def _run(self, request: Request, body: bytes, app: App, claim: Claim) -> None:
        """In a task of its own, which a caller that leaves does not end: who repeats the request
        finds its answer."""
        keeper = _Keeper(request, lambda answer: self._settle(claim, answer))
        scope = {key: value for key, value in request.scope.items() if key != "connection"}
        task = asyncio.create_task(
            self._work(app, scope, body, keeper, claim), name=f"call under a key {request.id}"
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            keeper.is_left = True
            raise

    async def _work(
        self, app: App, scope: Scope, body: bytes, keeper: _Keeper, claim: Claim
    ) -> None:
        holding = asyncio.create_task(self._hold(claim.name), name="claim of an idempotency key")
        try:
            await app(scope, _given_again(body), keeper)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await keeper.settle()

    async def _settle(self, claim: Claim, answer: bytes | None) -> None:
        try:
            if answer is not None:
                await self._store.keep(claim, answer, ttl_s=self._ttl_s)
            else:
                await self._store.forget(claim.name)
        except errors.Unavailable as e:
            log.warning(
                "answer under an idempotency key not kept: a repeat will run again error=%s", e
            )

    async def _hold(self, name: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._store.hold(name)
            except errors.Unavailable as e:
                log.warning("claim of an idempotency key not renewed error=%s", e)

    async def aclose(self) -> None:
        """End what runs for callers who left; their claims lapse."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._store.aclose()


class _Keeper:
    """Passes an answer on to the caller while it is there; it is kept before its last part goes
    out. Owner: one request."""

    def __init__(self, request: Request, keep: Callable[[bytes | None], Awaitable[None]]) -> None:
        self._request = request
        self._keep = keep
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0
        self._is_whole = self._is_settled = False
        self.is_left = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            if not self.is_left:
                await self._request.start(self._status, self._headers)
            return
        part, more = message.get("body", b""), message.get("more_body", False)
        self._size += len(part)
        if self._size <= MAX_ANSWER_BYTES:
            self._parts.append(part)
        if not more:
            self._is_whole = True
            await self.settle()
        if not self.is_left:
            await self._request.chunk(part, more=more)

    async def settle(self) -> None:
        """Keep the answer, or give the claim up. Again: nothing."""
        if not self._is_settled:
            self._is_settled = True
            await self._keep(self._answer())

    def _answer(self) -> bytes | None:
        """What is kept; None: nothing, because it failed, was cut off, or is too long."""
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
    told = [
        request.path.encode(),
        request.scope["query_string"],
        *(request.headers.get(name, b"") for name in _TELLING),
    ]
    return hashlib.sha256(b"\0".join(told) + b"\0" + body).hexdigest()


def _given_again(body: bytes) -> Receive:
    """A body that was read, and then nothing: whether the caller leaves is no concern of the
    request."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing comes after the body")

    return again

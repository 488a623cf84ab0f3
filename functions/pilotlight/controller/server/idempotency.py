"""Idempotency keys: a change that is requested twice under one key is made once, and gets the same
response twice (draft-ietf-httpapi-idempotency-key).

An idempotency key is scoped to its API key. It is claimed before the request runs, and each
transaction that the request commits also marks the claim, so that after a crash it is known whether
anything was changed. Then the response is stored, sealed (it may contain a new API key), and
returned to every repeat until TTL_S, marked by a header. The claim of a request that failed without
a change is deleted, so that it can be repeated. When a tenant's responses take more than
MAX_TENANT_BYTES, the oldest are deleted, and a repeat of those runs again.

Uploads of blobs and chunks are identified by their content, pages of the dashboard have their own
protection, and batch files are larger than what is compared: they ignore the header."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio.to_thread
import sqlalchemy as sa
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.controller.database import store, tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.database.transactions import in_write
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.server import error_responses
from pilotlight.controller.server.request_id import request_id_in
from pilotlight.controller.server.tenant_threads import TenantThreads
from pilotlight.core.crypto import DecryptionFailed, PlatformKey
from pilotlight.errors import Conflict, InvalidInput, PilotlightError, TooLarge
from pilotlight.protocol import HEADER_ENVIRONMENT, HEADER_IDEMPOTENCY_KEY, HEADER_REPLAYED

TTL_S = 86_400.0
"""How long a response is kept, in seconds; later the same key counts as new."""
MAX_KEY = 255
MAX_ANSWER_BYTES = 1024 * 1024
"""A longer response is not kept. Such responses are logs of builds and transfers, which find their
work done when repeated."""
MAX_TENANT_BYTES = 64 * 1024 * 1024
"""All responses kept for a tenant, sealed; the same as `activator.idempotency_bytes`."""
ROW_BYTES = 1024
"""What a row counts in addition to its response, which may be empty."""
DROPPED_AT_ONCE = 500
"""Rows per statement: databases limit the number of parameters."""
RETRY_AFTER_S = 1.0
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_KEPT_HEADERS = ("content-type", "location", "etag")
_UPLOADS = ("/v1/blobs/", "/v1/volume-chunks/", "/v1/files")
_CLAIMED, _CHANGED = 0, 1
"""Values of the column `status` before a response: the request runs; it runs and has committed a
change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request under a key. `name` is the key as stored: it begins with the API key's id."""

    tenant: str
    name: str
    request_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A stored response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Idempotency:
    """Middleware around the application. `_running` holds the claims of requests that run here; it
    grows only under the store's write lock."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: Store,
        key: PlatformKey,
        threads: TenantThreads,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: wall time in seconds since the epoch."""
        self._app = app
        self._store = store
        self._key = key
        self._threads = threads
        self._clock = clock
        self._running: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<Idempotency {len(self._running)} running>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        given = headers.get(HEADER_IDEMPOTENCY_KEY)
        if given is None or scope["method"] not in _CHANGING or not _applies_to(scope["path"]):
            await self._app(scope, receive, send)
            return
        caller = await self._threads.look_up(partial(self._caller, headers))
        if caller is None or caller.suspended:
            await self._app(scope, receive, send)  # responds with the error
            return
        try:
            await self._once(scope, receive, send, caller, given)
        except PilotlightError as e:
            await _refuse(e, scope, receive, send)
        except HTTPException as e:  # the body is too large; no handler is installed out here
            await _refuse(TooLarge(e.detail), scope, receive, send)

    async def _once(
        self, scope: Scope, receive: Receive, send: Send, caller: Principal, given: str
    ) -> None:
        if not 0 < len(given) <= MAX_KEY or not given.isprintable() or not given.isascii():
            raise InvalidInput(
                f"{HEADER_IDEMPOTENCY_KEY}: write 1 to {MAX_KEY} printable ASCII characters",
                parameter=HEADER_IDEMPOTENCY_KEY,
            )
        body = await _read(receive)
        claim = Claim(
            tenant=caller.tenant,
            name=f"{caller.key}/{given}",
            request_hash=_hash(self._key.node_token, scope, caller, body),
        )
        known = await self._threads.run(claim.tenant, self._claim, claim)
        if known is not None:
            await _replay(known, send)
            return
        token = store.transaction_hook.set(_marking(claim))
        recorder = _ResponseRecorder(send, lambda answer: self._store_answer(claim, answer))
        try:
            await self._app(scope, _replay_body(body, receive), recorder)
        finally:
            store.transaction_hook.reset(token)
            self._running.discard((claim.tenant, claim.name))
            if not recorder.is_stored:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._release, claim)

    def _caller(self, headers: Headers) -> Principal | None:
        try:
            with self._store.read() as sql:
                return access_control.authenticate(
                    sql,
                    authorization=headers.get("authorization"),
                    environment=headers.get(HEADER_ENVIRONMENT),
                    now=self._clock(),
                )
        except PilotlightError:
            return None

    def _claim(self, claim: Claim) -> Answer | None:
        """Claim the key; None: this request must run. Returns the stored response of a repeat.
        Raises Conflict when the key belongs to another request, to one that still runs, or to one
        whose response was lost."""
        with self._store.write() as write:
            table = tables.idempotency_keys
            row = write.sql.execute(sa.select(table).where(*_is(claim))).first()
            if row is not None and row.expires_at > write.now:
                if row.request_hash != claim.request_hash:
                    raise Conflict(
                        f"{HEADER_IDEMPOTENCY_KEY}: this key was used for a different request",
                        hint="Use a new key for each change.",
                    )
                if row.status > _CHANGED:
                    return self._unseal(row)
                if (claim.tenant, claim.name) in self._running:
                    raise Conflict(
                        "the first request under this idempotency key is still running",
                        retry_after_s=RETRY_AFTER_S,
                    )
                if row.status == _CHANGED:
                    raise Conflict(
                        "the first request under this idempotency key made its change, but its "
                        "response was lost: check the current state"
                    )
            write.sql.execute(sa.delete(table).where(*_is(claim)))
            write.sql.execute(
                sa.insert(table).values(
                    **_row(claim), status=_CLAIMED, content_type="", answer="", **_span(write)
                )
            )
            # before the commit: a request that sees the row must also see this
            self._running.add((claim.tenant, claim.name))
            self._make_room(write, claim.tenant)
            return None

    def _unseal(self, row: sa.Row[Any]) -> Answer:
        try:
            body = json.loads(self._key.answers.open(row.answer))
        except DecryptionFailed as e:
            raise Conflict(
                f"the response stored under this idempotency key cannot be read: {e}"
            ) from e
        return Answer(
            status=row.status, headers=body["headers"], body=base64.b64decode(body["body"])
        )

    async def _store_answer(self, claim: Claim, answer: Answer) -> None:
        text = json.dumps(
            {"headers": answer.headers, "body": base64.b64encode(answer.body).decode()}
        )
        sealed = self._key.answers.seal(text)
        values = {
            "status": answer.status,
            "content_type": answer.headers.get("content-type", ""),
            "answer": sealed,
            "kept_bytes": ROW_BYTES + len(sealed),
        }

        def update(write: Write) -> None:
            write.sql.execute(
                sa.update(tables.idempotency_keys).where(*_is(claim)).values(**values)
            )
            self._make_room(write, claim.tenant)

        await in_write(self._store, update)

    def _make_room(self, write: Write, tenant: str) -> None:
        """Delete the tenant's oldest responses until the rest fits; claims of running requests are
        kept."""
        table = tables.idempotency_keys
        kept = sa.select(sa.func.coalesce(sa.func.sum(table.c.kept_bytes), 0)).where(
            table.c.tenant == tenant
        )
        excess = int(write.sql.execute(kept).scalar_one()) - MAX_TENANT_BYTES
        if excess <= 0:
            return
        oldest = (
            sa.select(table.c.key, table.c.kept_bytes)
            .where(table.c.tenant == tenant)
            .order_by(table.c.created_at)
        )
        evicted: list[str] = []
        for row in write.sql.execute(oldest):
            if excess <= 0:
                break
            if (tenant, row.key) not in self._running:
                evicted.append(row.key)
                excess -= row.kept_bytes
        for begin in range(0, len(evicted), DROPPED_AT_ONCE):
            batch = evicted[begin : begin + DROPPED_AT_ONCE]
            write.sql.execute(
                sa.delete(table).where(table.c.tenant == tenant, table.c.key.in_(batch))
            )

    def _release(self, claim: Claim) -> None:
        with self._store.write() as write:
            table = tables.idempotency_keys
            write.sql.execute(sa.delete(table).where(*_is(claim), table.c.status == _CLAIMED))


class _ResponseRecorder:
    """Forwards a response, and stores a successful one before it sends the last part. Owner: one
    request."""

    def __init__(self, send: Send, store_answer: Callable[[Answer], Any]) -> None:
        self._send = send
        self._store_answer = store_answer
        self._answer = Answer(status=0, headers={}, body=b"")
        self.is_stored = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
            self._answer = replace(self._answer, status=message["status"], headers=kept)
        elif message["type"] == "http.response.body" and 200 <= self._answer.status < 300:
            # stop buffering beyond the limit: a long log would be copied for each of its lines
            if len(self._answer.body) <= MAX_ANSWER_BYTES:
                self._answer = replace(
                    self._answer,
                    body=(self._answer.body + message.get("body", b""))[: MAX_ANSWER_BYTES + 1],
                )
            if not message.get("more_body", False) and len(self._answer.body) <= MAX_ANSWER_BYTES:
                await self._store_answer(self._answer)
                self.is_stored = True
        await self._send(message)


def purge(write: Write, *, now: float) -> int:
    """Delete expired keys; return how many."""
    table = tables.idempotency_keys
    return write.sql.execute(sa.delete(table).where(table.c.expires_at < now)).rowcount


def _marking(claim: Claim) -> Callable[[Write], None]:
    def mark(write: Write) -> None:
        table = tables.idempotency_keys
        write.sql.execute(
            sa.update(table).where(*_is(claim), table.c.status == _CLAIMED).values(status=_CHANGED)
        )

    return mark


def _is(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    table = tables.idempotency_keys
    return (table.c.tenant == claim.tenant, table.c.key == claim.name)


def _row(claim: Claim) -> dict[str, Any]:
    return {
        "tenant": claim.tenant,
        "key": claim.name,
        "request_hash": claim.request_hash,
        "kept_bytes": ROW_BYTES,
    }


def _span(write: Write) -> dict[str, float]:
    return {"created_at": write.now, "expires_at": write.now + TTL_S}


def _applies_to(path: str) -> bool:
    return path.startswith(("/v1/", "/v2/")) and not path.startswith(_UPLOADS)


def _hash(secret: str, scope: Scope, caller: Principal, body: bytes) -> str:
    """Return a keyed hash of the whole request. The key prevents someone who can only read the
    table from guessing a body, such as a short secret."""
    head = "\0".join(
        (
            scope["method"],
            scope["path"],
            scope["query_string"].decode("latin-1"),
            caller.environment,
            "",
        )
    )
    return hmac.new(secret.encode(), head.encode() + body, hashlib.sha256).hexdigest()


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise InvalidInput("the client disconnected while sending the body")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first yields a body that was read, then further messages (such as the
    disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _refuse(error: PilotlightError, scope: Scope, receive: Receive, send: Send) -> None:
    document = error_responses.problem_document(error, request_id_in(scope))
    await error_responses.problem_response(document, error.retry_after_s)(scope, receive, send)


async def _replay(answer: Answer, send: Send) -> None:
    fields = {**answer.headers, HEADER_REPLAYED: "true", "content-length": str(len(answer.body))}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body})

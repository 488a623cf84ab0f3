"""Idempotency keys: a change that is asked for twice under one key is made once, and answered twice
(draft-ietf-httpapi-idempotency-key).

A key is its API key's alone. It is claimed before the request runs, and each transaction that the
request commits marks the claim in passing, so that after a crash there is no doubt whether anything
was changed. Then it has the answer, sealed (a new API key is in it as text), which every repeat
gets until TTL_S, marked by a header. What changed nothing and failed is forgotten: it can be asked
for again. So is the oldest of a tenant whose answers take more than MAX_TENANT_BYTES: a repeat of
it runs again.

Bodies of blobs are named by what is in them, and pages of the dashboard have their own guard:
neither looks at the header."""

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

from pilotlight.controller import access, problems, store, tables
from pilotlight.controller.access import Principal
from pilotlight.controller.context import Context
from pilotlight.controller.store import Write
from pilotlight.errors import Conflict, InvalidInput, PilotlightError, TooLarge
from pilotlight.protocol import HEADER_ENVIRONMENT, HEADER_IDEMPOTENCY_KEY, HEADER_REPLAYED
from pilotlight.seal import SealBroken

TTL_S = 86_400.0
"""How long an answer is kept; later the same key is a new one."""
MAX_KEY = 255
MAX_ANSWER_BYTES = 1024 * 1024
"""A longer answer is not kept. Those are logs of builds and transfers, which find their work done
when they are asked for again."""
MAX_TENANT_BYTES = 64 * 1024 * 1024
"""Of all answers that are kept for one tenant, sealed; as `activator.idempotency_bytes`."""
ROW_BYTES = 1024
"""What a row counts beyond its answer, which may be empty."""
DROPPED_AT_ONCE = 500
"""In one statement: databases bound the parameters of a statement."""
RETRY_AFTER_S = 1.0
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_KEPT_HEADERS = ("content-type", "location", "etag")
_CLAIMED, _CHANGED = 0, 1
"""Instead of a status: the request runs; the same, and something was changed by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request under a key. `name` is the key as it is stored: its API key's id comes first."""

    tenant: str
    name: str
    request_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was answered."""

    status: int
    headers: dict[str, str]
    body: bytes


class Idempotency:
    """The layer around the application. `_running` are the claims of requests that run here; it
    grows under the store's write lock only."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context
        self._running: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"<Idempotency {len(self._running)} running>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        given = headers.get(HEADER_IDEMPOTENCY_KEY)
        if given is None or scope["method"] not in _CHANGING or not _looks_here(scope["path"]):
            await self._app(scope, receive, send)
            return
        caller = await self._context.threads.look_up(partial(self._caller, headers))
        if caller is None or caller.suspended:
            await self._app(scope, receive, send)  # which says why not
            return
        try:
            await self._once(scope, receive, send, caller, given)
        except PilotlightError as e:
            await _refuse(e, scope, receive, send)
        except HTTPException as e:  # the bound on bodies, which nobody else is here to translate
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
            request_hash=_hash(self._context.key.node_token, scope, caller, body),
        )
        known = await self._context.threads.run(claim.tenant, self._claim, claim)
        if known is not None:
            await _replay(known, send)
            return
        token = store.riding.set(_marking(claim))
        keeper = _Keeper(send, lambda answer: self._keep(claim, answer))
        try:
            await self._app(scope, _given_again(body, receive), keeper)
        finally:
            store.riding.reset(token)
            self._running.discard((claim.tenant, claim.name))
            if not keeper.is_kept:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._forget, claim)

    def _caller(self, headers: Headers) -> Principal | None:
        try:
            with self._context.store.read() as sql:
                return access.authenticate(
                    sql,
                    authorization=headers.get("authorization"),
                    environment=headers.get(HEADER_ENVIRONMENT),
                    now=self._context.clock(),
                )
        except PilotlightError:
            return None

    def _claim(self, claim: Claim) -> Answer | None:
        """None: it is this request's to run. Raises Conflict for another request, one that runs,
        and one whose answer was lost."""
        with self._context.store.write() as write:
            table = tables.idempotency_keys
            row = write.sql.execute(sa.select(table).where(*_is(claim))).first()
            if row is not None and row.expires_at > write.now:
                if row.request_hash != claim.request_hash:
                    raise Conflict(
                        f"{HEADER_IDEMPOTENCY_KEY}: this key was used for another request",
                        hint="Use a new key for each change.",
                    )
                if row.status > _CHANGED:
                    return self._opened(row)
                if (claim.tenant, claim.name) in self._running:
                    raise Conflict(
                        "the first request under this idempotency key still runs",
                        retry_after_s=RETRY_AFTER_S,
                    )
                if row.status == _CHANGED:
                    raise Conflict(
                        "the first request under this idempotency key was carried out, and its "
                        "answer was lost: look at what is there"
                    )
            write.sql.execute(sa.delete(table).where(*_is(claim)))
            write.sql.execute(
                sa.insert(table).values(
                    **_row(claim), status=_CLAIMED, content_type="", answer="", **_span(write)
                )
            )
            # in the same breath: who finds the row must find this, too
            self._running.add((claim.tenant, claim.name))
            self._make_room(write, claim.tenant)
            return None

    def _opened(self, row: sa.Row[Any]) -> Answer:
        try:
            body = json.loads(self._context.key.answers.open(row.answer))
        except SealBroken as e:
            raise Conflict(f"the answer kept under this idempotency key cannot be read: {e}") from e
        return Answer(
            status=row.status, headers=body["headers"], body=base64.b64decode(body["body"])
        )

    async def _keep(self, claim: Claim, answer: Answer) -> None:
        text = json.dumps(
            {"headers": answer.headers, "body": base64.b64encode(answer.body).decode()}
        )
        sealed = self._context.key.answers.seal(text)
        values = {
            "status": answer.status,
            "content_type": answer.headers.get("content-type", ""),
            "answer": sealed,
            "kept_bytes": ROW_BYTES + len(sealed),
        }

        def keep() -> None:
            with self._context.store.write() as write:
                write.sql.execute(
                    sa.update(tables.idempotency_keys).where(*_is(claim)).values(**values)
                )
                self._make_room(write, claim.tenant)

        await anyio.to_thread.run_sync(keep)

    def _make_room(self, write: Write, tenant: str) -> None:
        """Forget the tenant's oldest until the rest has room; those that run stay."""
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
        gone: list[str] = []
        for row in write.sql.execute(oldest):
            if excess <= 0:
                break
            if (tenant, row.key) not in self._running:
                gone.append(row.key)
                excess -= row.kept_bytes
        for begin in range(0, len(gone), DROPPED_AT_ONCE):
            some = gone[begin : begin + DROPPED_AT_ONCE]
            write.sql.execute(
                sa.delete(table).where(table.c.tenant == tenant, table.c.key.in_(some))
            )

    def _forget(self, claim: Claim) -> None:
        with self._context.store.write() as write:
            table = tables.idempotency_keys
            write.sql.execute(sa.delete(table).where(*_is(claim), table.c.status == _CLAIMED))


class _Keeper:
    """Passes an answer on, and hands a good one over to be kept before its last part goes out.
    Owner: one request."""

    def __init__(self, send: Send, keep: Callable[[Answer], Any]) -> None:
        self._send = send
        self._keep = keep
        self._answer = Answer(status=0, headers={}, body=b"")
        self.is_kept = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
            self._answer = replace(self._answer, status=message["status"], headers=kept)
        elif message["type"] == "http.response.body" and 200 <= self._answer.status < 300:
            # beyond, nothing is kept: a long log is not copied for each of its lines
            if len(self._answer.body) <= MAX_ANSWER_BYTES:
                self._answer = replace(
                    self._answer,
                    body=(self._answer.body + message.get("body", b""))[: MAX_ANSWER_BYTES + 1],
                )
            if not message.get("more_body", False) and len(self._answer.body) <= MAX_ANSWER_BYTES:
                await self._keep(self._answer)
                self.is_kept = True
        await self._send(message)


def purge(write: Write, *, now: float) -> int:
    """Forget keys that ran out; returns how many."""
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


def _looks_here(path: str) -> bool:
    return path.startswith(("/v1/", "/v2/")) and not path.startswith("/v1/blobs/")


def _hash(secret: str, scope: Scope, caller: Principal, body: bytes) -> str:
    """Of the whole request, keyed: who reads the table alone cannot try out what a body (a short
    secret) may have been."""
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
            raise InvalidInput("the caller left while sending its body")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _given_again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and then whatever comes (that the caller leaves)."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _refuse(error: PilotlightError, scope: Scope, receive: Receive, send: Send) -> None:
    document = problems.document(error, str(scope.get("pilotlight.request_id", "")))
    await problems.answer(document, error.retry_after_s)(scope, receive, send)


async def _replay(answer: Answer, send: Send) -> None:
    fields = {**answer.headers, HEADER_REPLAYED: "true", "content-length": str(len(answer.body))}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body})

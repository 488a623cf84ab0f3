"""Submitted calls: durable before their 202, run when there is a slot, polled by id until their result expires.

A call is in the journal from its 202 until the controller has its result, so no death of a process loses it: the next start of this
activator runs what is unfinished again (at least once: a function whose instance died under a call may see it twice). Only as many calls
of a function are dispatched at once as its instances can hold; the rest wait here, not in the throttler's queue, which is for callers who
wait. A call counts as a request of its quotas when it is submitted, and among those that run at once while it runs.

Owner: the event loop. `_held` is the only state; each call's task changes its own entry.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote
from weakref import WeakValueDictionary

import httpx

from activator.billing.books import Books
from activator.call_gates import CallGates
from activator.call_records import answered, collect, event, failed, is_theirs, own_call_id, payload, receipt, receipt_of, unknown, wait_s
from activator.callers import ANONYMOUS, Caller
from activator.control import ControlPlane
from activator.dispatch import Call, Dispatcher, Exchange
from activator.entry import Entrance
from activator.metrics import Metrics
from activator.quotas.admission import Admission
from activator.request import Headers, Request
from activator.routes import RouteTable
from activator.settings import ActivatorSettings
from activator.siblings import PASSED_ON, Siblings
from activator.targets import Target
from activator.upstream import UpstreamGone
from pilotlight import errors
from pilotlight.protocol import CALLS_PATH, HEADER_PLATFORM_TOKEN, CallRecord
from pilotlight.types import FunctionAddress, TenantId

log = logging.getLogger(__name__)

SHIP_BATCH = 200
SHIP_GATHER_S = 0.05
SHIP_RETRY_S = (0.1, 0.5, 1.0, 5.0)
BUSY_RETRY_S = 0.5
"""Pause before a submitted call that found a full queue, or no capacity, asks again."""
_FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


class _Held:
    """A submitted call that this activator is responsible for."""

    __slots__ = ("changed", "record", "task")

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()


class SubmittedCalls:
    """See the module."""

    def __init__(
        self,
        *,
        books: Books,
        dispatcher: Dispatcher,
        table: RouteTable,
        entrance: Entrance,
        control: ControlPlane,
        settings: ActivatorSettings,
        metrics: Metrics,
        controller: Path,
        token: str,
        siblings: Siblings | None = None,
    ) -> None:
        self._siblings = siblings
        self._books = books
        self._dispatcher = dispatcher
        self._table = table
        self._entrance = entrance
        self._control = control
        self._settings = settings
        self._metrics = metrics
        self._held: dict[str, _Held] = {}
        self._gates = CallGates()
        self._putting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unsent: dict[str, CallRecord] = {}
        self._news = asyncio.Event()
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(controller)),
            base_url="http://controller",
            headers={HEADER_PLATFORM_TOKEN: token},
            timeout=30.0,
        )

    def __repr__(self) -> str:
        return f"<SubmittedCalls {len(self._held)} held, {len(self._unsent)} unsent>"

    # -- submitting ---------------------------------------------------------------------------------------------------
    async def submit(self, request: Request, caller: Caller, call: Call) -> None:
        """Hold the call durably, then answer 202 with where to look. Raises TooManyRequests, JournalFull."""
        record = await self.hold(caller, call, fingerprint="")
        await request.respond_json(202, receipt(record), [(b"location", f"/v1/calls/{call.id}".encode())])

    async def hold(self, caller: Caller, call: Call, *, fingerprint: str) -> CallRecord:
        """Take responsibility for a call; returns once it is durable."""
        if len(self._held) >= self._settings.max_pending_submits:
            raise errors.TooManyRequests(f"{len(self._held)} submitted calls are pending, the bound", retry_after_s=5)
        target = call.target
        record = CallRecord(
            id=call.id, tenant=caller.tenant, environment=target.environment, app=target.app, function=target.function, method=call.method,
            state="QUEUED", sequence=1, submitted_at=call.started_at, revision=target.revision,
            expires_at=call.started_at + target.spec.clocks.result_ttl_s, labels={"fingerprint": fingerprint} if fingerprint else {},
        )  # fmt: skip
        held = self._held[call.id] = _Held(record)
        try:
            await self._books.journal.submit(call.id, payload(record, call))
        except BaseException:
            del self._held[call.id]
            raise
        held.task = asyncio.create_task(self._run(held, call), name=f"call {call.id}")
        self._note(held, record)
        return record

    async def put_elsewhere(self, request: Request, caller: Caller, own_id: str) -> bool:
        """Whether another activator keeps the calls of this id, and has answered. Raises Unavailable while it is down."""
        return self._siblings is not None and await self._siblings.hand_over(request, own_call_id(caller.tenant, own_id))

    async def put(self, request: Request, caller: Caller, call: Call, own_id: str) -> None:
        """`PUT /v1/calls/{id}`: the caller's own id makes a repeat the same call. Raises Conflict when the arguments differ."""
        fingerprint = hashlib.sha256(b"%s\0%s\0%s" % (call.target.function_id.encode(), call.method.encode(), call.body)).hexdigest()
        call.id = own_call_id(caller.tenant, own_id)
        async with self._putting.setdefault(call.id, asyncio.Lock()):  # a repeat that comes at once waits for the first to be held
            known = await self._find(request, caller, call.id)
            if known is None:
                record = (await self.hold(caller, call, fingerprint=fingerprint)).to_json()
        if known is not None:
            if known["labels"].get("fingerprint") != fingerprint:
                raise errors.Conflict(f"call {own_id!r} exists already with another function or other arguments")
            record = known
        await request.respond_json(202 if known is None else 200, {**receipt_of(record), "id": own_id})

    # -- running ------------------------------------------------------------------------------------------------------
    async def _run(self, held: _Held, call: Call) -> None:
        try:
            exchange, status, body = await self._wait_for_quotas(held, call)
        except errors.PilotlightError as e:
            self._metrics.observer.refused(call.target, e.status, e)
            self._finish(held, call, failed(held.record, e))
            return
        except UpstreamGone as e:
            self._metrics.observer.refused(call.target, 502)
            self._finish(held, call, failed(held.record, errors.WorkerCrashed(f"the instance died under this call: {e}", reason="crashed")))
            return
        self._metrics.answered(exchange, status, is_awaited=False)
        self._finish(held, call, answered(held.record, exchange, status, body))

    async def _wait_for_quotas(self, held: _Held, call: Call) -> tuple[Exchange, int, bytes]:
        """Its answer. Where its quotas are used up the call waits as long as its result would be kept, in the way of its own key only."""
        async with self._gates.of_key(call.key_id, call.target):
            while True:
                try:
                    async with self._gates.of_all(call.target):
                        return await self._go(held, call)
                except errors.OverQuota:
                    if time.time() > held.record.expires_at:
                        raise
                await asyncio.sleep(BUSY_RETRY_S)
                call.admission = self._admission(call.key_id, call.target)  # it may be other quotas by now

    async def _go(self, held: _Held, call: Call) -> tuple[Exchange, int, bytes]:
        try:
            exchange = await self._begin(held, call)
            return exchange, *await collect(exchange, self._settings.max_body_bytes)
        finally:
            _release(call)

    async def _begin(self, held: _Held, call: Call) -> Exchange:
        """For room the call waits as long as any. Raises OverQuota at once."""
        until = time.monotonic() + call.target.spec.clocks.queue_s
        while True:
            try:
                self._entrance.check_not_suspended(call.caller or call.target.tenant, call.target.tenant)
                if call.admission is not None:
                    await call.admission.hold()
                if held.record.state != "RUNNING":
                    self._note(held, replace(held.record, state="RUNNING", sequence=held.record.sequence + 1))
                return await self._dispatcher.begin(call)
            except errors.OverQuota:
                raise
            except (errors.TooManyRequests, errors.Unavailable):
                _release(call)
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(BUSY_RETRY_S)

    def _admission(self, key_id: str, target: Target) -> Admission | None:
        """What a call that was counted when it came may hold. Raises Forbidden."""
        entry = self._entrance.entry(self._table.caller_of(key_id) or ANONYMOUS, target)
        return Admission(entry.gate, requests=0, holds=0) if entry.gate is not None else None

    def _finish(self, held: _Held, call: Call, record: CallRecord) -> None:
        record = replace(record, sequence=held.record.sequence + 1, finished_at=time.time())
        try:
            self._books.journal.finish(record.id, record.to_json())
        except errors.StorageFull as e:
            log.error("result not journalled, kept in memory until shipped call=%s error=%s", record.id, e)
        self._note(held, record)

    def _note(self, held: _Held, record: CallRecord) -> None:
        held.record = record
        held.changed.set()
        held.changed = asyncio.Event()
        self._unsent[record.id] = record
        self._news.set()

    # -- asking -------------------------------------------------------------------------------------------------------
    async def answer(self, request: Request, caller: Caller, path: str) -> None:
        """`GET /v1/calls/{id}`, `GET …/{id}/stream`, `POST …/{id}:cancel`. Raises NotFound."""
        if await self._is_answered_by_sibling(request, caller, path):
            return
        if request.verb == "POST" and path.endswith(":cancel"):
            await self._cancel(request, caller, path.removesuffix(":cancel"))
        elif request.verb == "GET" and path.endswith("/stream"):
            await self._stream(request, caller, path.removesuffix("/stream"))
        elif request.verb == "GET":
            await self._wait(caller, path, wait_s(request))
            record = await self._find(request, caller, path) or await self._find(request, caller, own_call_id(caller.tenant, path))
            if record is None:
                raise unknown(path)
            await request.respond_json(200, record)
        else:
            raise errors.NotFound(f"{request.verb} is not served at /v1/calls/{path}: GET it, or POST …:cancel")

    async def _is_answered_by_sibling(self, request: Request, caller: Caller, path: str) -> bool:
        """A call that is not held here may be held by another activator, which knows it before the controller does."""
        if self._siblings is None:
            return False
        call_id = path.removesuffix(":cancel").removesuffix("/stream")
        if self._held_here(caller, call_id) is not None:
            return False
        if PASSED_ON in request.headers:
            raise unknown(call_id)  # the one who asked us asks the controller itself
        return await self._siblings.ask(request)

    def _held_here(self, caller: Caller, call_id: str) -> _Held | None:
        for candidate in (call_id, own_call_id(caller.tenant, call_id)):
            held = self._held.get(candidate)
            if held is not None and is_theirs(caller, held.record):
                return held
        return None

    async def _wait(self, caller: Caller, call_id: str, wait_s: float) -> None:
        """Up to `wait_s` for a call held here to end, so that a poll need not be repeated."""
        held = self._held_here(caller, call_id)
        if held is None or wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                while held.record.state not in _FINAL:
                    await held.changed.wait()
        except TimeoutError:
            return

    async def _find(self, request: Request, caller: Caller, call_id: str) -> dict[str, Any] | None:
        held = self._held.get(call_id)
        if held is not None and is_theirs(caller, held.record):
            return held.record.to_json()
        response = await self._control.get_json(f"/v1/calls/{quote(call_id, safe='')}", request.headers.get(b"authorization", b""))
        if response.status_code == 404:
            return None
        if response.status_code == 403:
            raise errors.Forbidden("this API key may not see this call")
        if response.is_error:
            raise errors.Unavailable(f"the control plane answered {response.status_code}", retry_after_s=2)
        body: dict[str, Any] = response.json()
        if "app" in body:
            caller.check_reach(environment=body["environment"], app=body["app"], function=body["function"])
        return body

    def _mine(self, caller: Caller, call_id: str) -> _Held:
        held = self._held_here(caller, call_id)
        if held is None:
            raise unknown(call_id)
        return held

    async def _cancel(self, request: Request, caller: Caller, call_id: str) -> None:
        held = self._mine(caller, call_id)
        if held.record.state not in _FINAL and held.task is not None:
            held.task.cancel()
            await asyncio.wait([held.task])
            if held.record.state not in _FINAL:
                self._finish(held, None, replace(held.record, state="CANCELLED", status=499, outcome="cancelled"))  # type: ignore[arg-type]
        await request.respond_json(200, receipt(held.record))

    async def _stream(self, request: Request, caller: Caller, call_id: str) -> None:
        """Server-sent events: `state` at each change, `result` at the end."""
        held = self._mine(caller, call_id)
        headers: Headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-request-id", request.id.encode()),
        ]
        await request.start(200, headers)
        while held.record.state not in _FINAL:
            changed = held.changed
            await request.chunk(event("state", {"id": held.record.id, "state": held.record.state}))
            await changed.wait()
        await request.chunk(event("result", held.record.to_json()), more=False)

    # -- recovery and shipping ----------------------------------------------------------------------------------------
    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Run what the last process left unfinished, deliver its results, and begin to ship."""
        for left in self._books.recovered.undelivered:
            record = CallRecord.from_json(self._books.journal.payload(left.id))
            self._note(self._held.setdefault(left.id, _Held(record)), record)
        for left in self._books.recovered.unfinished:
            self._resume(self._books.journal.payload(left.id), left.attempts)
        return [group.create_task(self._ship(), name="call results shipping")]

    def _resume(self, kept: dict[str, Any], attempts: int) -> None:
        record = CallRecord.from_json(kept["record"])
        held = self._held[record.id] = _Held(record)
        owner = TenantId(kept.get("owner") or record.tenant)
        address = FunctionAddress(tenant=owner, environment=record.environment, app=record.app, function=record.function)
        try:
            target = self._table.target(address)
            entry = self._entrance.entry(self._table.caller_of(kept["key"]) or ANONYMOUS, target)
        except errors.PilotlightError as e:
            self._finish(held, None, failed(record, e))  # type: ignore[arg-type]
            return
        call = Call(
            id=record.id, target=target, method=record.method, key_id=kept["key"], body=base64.b64decode(kept["body"]),
            content_type=kept["content_type"].encode(), accept=kept["accept"].encode(), rank=entry.ranks[None],
            caller="" if record.tenant == owner else record.tenant,
            admission=self._admission(kept["key"], target),
        )  # fmt: skip
        call.attempt = attempts + 1
        held.task = asyncio.create_task(self._run(held, call), name=f"call {call.id} (resumed)")

    async def _ship(self) -> None:
        failures = 0
        while True:
            await self._news.wait()
            await asyncio.sleep(SHIP_GATHER_S)
            batch = list(self._unsent.values())[:SHIP_BATCH]
            try:
                response = await self._client.post(CALLS_PATH, json={"calls": [record.to_json() for record in batch]})
                response.raise_for_status()
            except httpx.HTTPError as e:
                if failures == 0:
                    log.warning("call states not shipped count=%d error=%r", len(batch), e)
                await asyncio.sleep(SHIP_RETRY_S[min(failures, len(SHIP_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._shipped(batch)

    def _shipped(self, batch: list[CallRecord]) -> None:
        for record in batch:
            if self._unsent.get(record.id) is record:
                del self._unsent[record.id]
                if record.state in _FINAL:
                    self._held.pop(record.id, None)
                    self._books.journal.forget(record.id)
        if not self._unsent:
            self._news.clear()

    async def aclose(self) -> None:
        """Stop: what runs is abandoned here and run again by the next start, because the journal still holds it."""
        tasks = [held.task for held in self._held.values() if held.task is not None and not held.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


def _release(call: Call) -> None:
    if call.admission is not None:
        call.admission.release()


def function_of_put(request: Request) -> str:
    """The `function` query parameter of a PUT. Raises InvalidInput."""
    given = parse_qs(request.scope["query_string"].decode("latin-1")).get("function")
    if not given:
        raise errors.InvalidInput("name the function: PUT /v1/calls/{id}?function=app/function", parameter="function")
    return str(given[0])

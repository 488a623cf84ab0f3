"""Submitted calls: durable before their 202, run when there is a slot, polled by id until their
result expires.

A call is in the journal from its 202 until the controller has its result, so no death of a process
loses it: the next start of this activator runs what is unfinished again (at least once: a function
whose instance died under a call may see it twice, and is told which attempt it sees). Until it runs
its body is in the journal only: what the bodies and results of a tenant, and of all, may take is
bounded in bytes, and so is their number. Only as many calls of a function are dispatched at once as
its instances can hold; the rest wait here, not in the throttler's queue, which is for callers who
wait. A call counts as a request of its quotas when it is submitted, and among those that run at
once while it runs.

Calls that the control plane began (schedules, dead letters sent again) are written down here, too
(`keep`), but run only once the controller has said that they are ours (`begin_kept`).

Owner: the event loop. What is held is `_held`; each call's task changes its own entry.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs
from weakref import WeakValueDictionary

from activator.async_calls.api import AsyncCallApi
from activator.async_calls.pending import LEAST_BYTES, PendingCall, PendingCalls
from activator.async_calls.records import (
    SCHEDULER,
    failed,
    is_dead,
    namespaced_call_id,
    payload,
    queued,
    receipt_of,
    scheduler,
)
from activator.async_calls.result_shipper import ResultShipper
from activator.async_calls.result_stream import FINAL
from activator.async_calls.runner import AsyncCallRunner
from activator.billing.service import BillingService
from activator.calls.runner import Call, CallRunner
from activator.coordination.peers import ActivatorPeers
from activator.gateway.control_plane_proxy import ControlPlaneProxy
from activator.http.payloads import accepts_pickles, checked_type
from activator.http.request import Request
from activator.llm.openai.call import EngineCall, call_of_kept
from activator.metrics.metrics import Metrics
from activator.quotas.admission import Admission
from activator.routing.access import AccessCache
from activator.routing.api_keys import ANONYMOUS, Principal
from activator.routing.route_table import CallTarget, RouteTable
from activator.routing.traffic_split import RoutingDecision
from activator.settings import ActivatorSettings
from activator.tracing.context import Trace
from activator.tracing.tracer import Tracer
from pilotlight import errors
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY, HEADER_REPLAYED, HEADER_WEBHOOK, CallRecord
from pilotlight.types import FunctionAddress, TenantId, check_name
from weight_cache.addresses import Address

log = logging.getLogger(__name__)

DEAD_TTL_S = 7 * 86_400.0
"""A dead letter is kept at least this long: a weekend, and the days in which somebody finds out
why."""
_KEY = HEADER_IDEMPOTENCY_KEY.encode()
_WEBHOOK = HEADER_WEBHOOK.encode()


class AsyncCalls:
    """See the module."""

    def __init__(
        self,
        *,
        books: BillingService,
        dispatcher: CallRunner,
        table: RouteTable,
        entrance: AccessCache,
        control: ControlPlaneProxy,
        settings: ActivatorSettings,
        metrics: Metrics,
        controller: Address,
        token: str,
        siblings: ActivatorPeers | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._siblings = siblings
        self._books = books
        self._table = table
        self._entrance = entrance
        self._settings = settings
        self._held = PendingCalls()
        self._kept: dict[str, tuple[str, int]] = {}
        """By `due`: ids of calls in the journal that may be another activator's, and how many
        attempts were made."""
        self._putting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._attempts = AsyncCallRunner(
            held=self._held,
            dispatcher=dispatcher,
            entrance=entrance,
            metrics=metrics,
            max_result_bytes=settings.max_body_bytes,
            admission=self._admission,
            load=self._load,
            tracer=tracer,
        )
        self._results = ResultShipper(
            self._held, journal=books.journal, controller=controller, token=token
        )
        self._questions = AsyncCallApi(
            self._held,
            control=control,
            siblings=siblings,
            cancel=self._cancel,
            heartbeat_s=settings.heartbeat_s,
        )
        self.answer = self._questions.answer

    def __repr__(self) -> str:
        return f"<AsyncCalls {self._held!r}, {len(self._kept)} not taken>"

    # -- submitting --------------------------------------------------------------------------------
    async def submit(self, request: Request, caller: Principal, call: Call) -> None:
        """Hold the call durably, then answer 202 with where to look; a repeat under the same
        idempotency key is the same call.

        Raises TooManyRequests, JournalFull, Conflict, InvalidInput.
        """
        webhook = webhook_of(request)
        if not is_under_key(request):
            record = (await self.hold(caller, call, fingerprint="", webhook=webhook)).to_json()
            is_new = True
        else:
            record, is_new = await self._once(request, caller, call, id_under_key(request, caller))
        headers = [(b"location", f"/v1/calls/{record['id']}".encode())]
        if not is_new:
            headers.append((HEADER_REPLAYED.encode(), b"true"))
        await request.respond_json(202, receipt_of(record), headers)

    async def hold(
        self, caller: Principal, call: Call, *, fingerprint: str, webhook: str = ""
    ) -> CallRecord:
        """Take responsibility for a call; returns once it is durable."""
        self.check_room(caller.tenant, len(call.body))
        record = queued(caller, call, fingerprint=fingerprint, webhook=webhook)
        held = self._held.add(record, len(call.body))
        try:
            await self._books.journal.submit(call.id, payload(record, call))
        except BaseException:
            self._held.drop(call.id)
            raise
        call.park()
        held.task = asyncio.create_task(self._run(held, call), name=f"call {call.id}")
        if isinstance(call, EngineCall):
            call.is_kept = True
        self._held.note(held, record)
        return record

    def check_room(self, tenant: str, size: int) -> None:
        """Whether a call of so many bytes may be submitted. Raises TooManyRequests."""
        taken, settings, size = self._held.bytes_of, self._settings, max(size, LEAST_BYTES)
        for whose, pending, bound in (
            (
                "of this tenant",
                self._held.calls_of[tenant],
                max(1, settings.max_pending_submits // 2),
            ),
            ("of all tenants", len(self._held), settings.max_pending_submits),
        ):
            if pending >= bound:
                problem = (
                    f"{pending} submitted calls {whose} are pending, the bound "
                    f"(activator.max_pending_submits; a tenant's is half)"
                )
                raise errors.TooManyRequests(problem, retry_after_s=5)
        for whose, used, name, limit in (
            (
                "this tenant's",
                taken[tenant],
                "tenant_submitted_bytes",
                settings.tenant_submitted_bytes,
            ),
            ("all tenants'", taken.total(), "submitted_bytes", settings.submitted_bytes),
        ):
            if used + size > limit:
                problem = (
                    f"{whose} submitted calls take {used} of {limit} bytes, the bound "
                    f"(activator.{name}): wait until some have ended"
                )
                raise errors.TooManyRequests(problem, retry_after_s=5)

    def reading(self, tenant: str, size: int) -> AbstractContextManager[None]:
        """Set room aside for a body that is about to be read, of `size` bytes at most. Raises
        TooManyRequests."""
        self.check_room(tenant, size)
        return self._held.reading(tenant, size)

    def _load(self, call: Call) -> None:
        """Read a parked call's body again. Raises Unavailable."""
        try:
            call.load(base64.b64decode(self._books.journal.payload(call.id)["body"]))
        except (OSError, StopIteration, ValueError, KeyError) as e:
            raise errors.Unavailable(
                f"the journal cannot be read: {type(e).__name__}", retry_after_s=1
            ) from e

    async def put_elsewhere(self, request: Request, caller: Principal, own_id: str) -> bool:
        """Whether another activator keeps the calls of this id, and has answered.

        Raises Unavailable while it is down, TooManyRequests.
        """
        return self._siblings is not None and await self._siblings.hand_over(
            request, caller.tenant, namespaced_call_id(caller.tenant, own_id)
        )

    async def put(self, request: Request, caller: Principal, call: Call, own_id: str) -> None:
        """`PUT /v1/calls/{id}`: the caller's own id makes a repeat the same call. Raises Conflict
        when the arguments differ."""
        record, is_new = await self._once(request, caller, call, own_id)
        await request.respond_json(202 if is_new else 200, {**receipt_of(record), "id": own_id})

    async def _once(
        self, request: Request, caller: Principal, call: Call, own_id: str
    ) -> tuple[dict[str, Any], bool]:
        """The call of this id, and whether it is new."""
        fingerprint = hashlib.sha256(
            b"%s\0%s\0%s" % (call.target.function_id.encode(), call.method.encode(), call.said)
        ).hexdigest()
        call.id = namespaced_call_id(caller.tenant, own_id)
        # a repeat that comes at once waits for the first to be held
        async with self._putting.setdefault(call.id, asyncio.Lock()):
            known = await self._questions.find(request, caller, call.id)
            if known is None:
                return (
                    await self.hold(
                        caller, call, fingerprint=fingerprint, webhook=webhook_of(request)
                    )
                ).to_json(), True
        if known["labels"].get("fingerprint") != fingerprint:
            raise errors.Conflict(
                "this id, or idempotency key, was used already for another function or other "
                "arguments"
            )
        return known, False

    # -- running -----------------------------------------------------------------------------------
    async def _run(self, held: PendingCall, call: Call) -> None:
        held.target = call.target
        try:
            record = await self._attempts.run(held, call)
        finally:
            if call.tokens is not None:
                call.tokens.settle()
        self._finish(held, record, ttl_s=call.target.spec.clocks.result_ttl_s)

    def _finish(self, held: PendingCall, record: CallRecord, *, ttl_s: float = 0.0) -> None:
        now = time.time()
        record = replace(
            record,
            sequence=held.record.sequence + 1,
            finished_at=now,
            expires_at=max(record.expires_at, now + ttl_s),
        )
        kept: dict[str, Any] = {}
        if is_dead(record):
            record = replace(
                record, is_dead=True, expires_at=max(record.expires_at, now + DEAD_TTL_S)
            )
            kept = {"payload": self._books.journal.payload(record.id)}
        try:
            self._books.journal.finish(record.id, {**record.to_json(), **kept})
        except errors.StorageFull as e:
            log.error(
                "result not journalled, kept in memory until shipped call=%s error=%s", record.id, e
            )
        self._held.note(held, record)

    async def _cancel(self, held: PendingCall) -> None:
        if held.record.state in FINAL:
            return
        if held.task is None:
            raise errors.Conflict(
                f"call {held.record.id} has not begun, and cannot be cancelled yet: try again",
                retry_after_s=1,
            )
        held.task.cancel()
        await asyncio.wait([held.task])
        if held.record.state not in FINAL:
            self._attempts.left(held)
            self._finish(
                held, replace(held.record, state="CANCELLED", status=499, outcome="cancelled")
            )

    def _admission(self, call: Call) -> Admission | None:
        """What a call that was counted when it came may hold. Raises Forbidden."""
        entry = self._entrance.entry(self._caller(call.key_id, call.target.tenant), call.target)
        return Admission(entry.gate, requests=0, holds=0) if entry.gate is not None else None

    def _caller(self, key_id: str, tenant: str) -> Principal:
        return (
            scheduler(tenant) if key_id == SCHEDULER else self._table.caller_of(key_id) or ANONYMOUS
        )

    # -- recovery ----------------------------------------------------------------------------------
    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Run what the last process left unfinished, deliver its results, and begin to ship."""
        for left in self._books.recovered.undelivered:
            record = CallRecord.from_json(self._books.journal.payload(left.id))
            self._held.note(self._held.get(left.id) or self._held.add(record), record)
        for left in self._books.recovered.unfinished:
            kept = self._books.journal.payload(left.id)
            if "due" in kept:
                self._held.add(CallRecord.from_json(kept["record"]), _size_of(kept))
                self._kept[kept["due"]] = (left.id, left.attempts)
            else:
                self._resume(kept, left.attempts)
        return [group.create_task(self._results.run(), name="call results shipping")]

    def _resume(self, kept: dict[str, Any], attempts: int) -> None:
        record = CallRecord.from_json(kept["record"])
        self._held.drop(record.id)
        held = self._held.add(record, _size_of(kept))
        try:
            call = self._call(record, kept)
        except errors.PilotlightError as e:
            self._finish(held, failed(record, e))
            return
        call.attempt = max(attempts, record.attempt) + 1
        # the one that was cut off by our own end does not count against it
        call.retries = max(0, attempts - record.attempt - 1)
        if "due" in kept:  # only here it is known how long its result is kept
            held.give_up_at = time.time() + call.target.spec.clocks.result_ttl_s
            held.record = replace(record, expires_at=held.give_up_at)
        call.park()
        held.task = asyncio.create_task(self._run(held, call), name=f"call {call.id} (resumed)")

    def _call(self, record: CallRecord, kept: dict[str, Any]) -> Call:
        """The call that a journal holds, as its function and its key are now.

        Raises NotFound, Forbidden, Unavailable; UnsupportedMediaType for a pickle that an older
        version took from another tenant."""
        owner = TenantId(kept.get("owner") or record.tenant)
        address = FunctionAddress(
            tenant=owner, environment=record.environment, app=record.app, function=record.function
        )
        target = self._table.target(address, record.revision)
        target.check(record.method)
        # the key of its caller may have been revoked since
        accepts_pickle = accepts_pickles(record.tenant, owner)
        content_type = checked_type(kept["content_type"].encode(), accepts=accepts_pickle)
        choice = _choice_of(record, target)
        entry = self._entrance.entry(self._caller(kept["key"], owner), target)
        deadline_at = kept.get("deadline_at")
        make = (
            partial(call_of_kept, kept)
            if target.spec.engine is not None or "path" in kept
            else Call
        )
        call = make(
            body=base64.b64decode(kept["body"]),
            id=record.id,
            target=target,
            method=record.method,
            key_id=kept["key"],
            content_type=content_type,
            accepts_pickle=accepts_pickle,
            accept=kept["accept"].encode(),
            rank=entry.ranks[None],
            caller="" if record.tenant == owner else record.tenant,
            deadline_s=None if deadline_at is None else max(0.001, deadline_at - time.time()),
            choice=choice,
            extra_headers=choice.line if choice is not None else b"",
        )
        call.admission = self._admission(call)
        call.trace = Trace.from_json(kept["trace"]) if kept.get("trace") else None
        return call

    # -- what the control plane began --------------------------------------------------------------
    async def keep(self, kept: dict[str, Any]) -> None:
        """Write a due call down, without running it; again: nothing. Raises TooManyRequests,
        JournalFull; Conflict while an earlier life of it is still being told."""
        record = CallRecord.from_json(kept["record"])
        if kept["due"] in self._kept:
            return
        if record.id in self._held:
            raise errors.Conflict(
                f"call {record.id} has not been told to its end yet", retry_after_s=1
            )
        self.check_room(record.tenant, _size_of(kept))
        self._held.add(record, _size_of(kept))
        try:
            await self._books.journal.submit(record.id, kept)
        except BaseException:
            self._held.drop(record.id)
            raise
        self._kept[kept["due"]] = (record.id, 0)

    def kept(self) -> list[str]:
        """Those that are written down and not begun, by `due`."""
        return list(self._kept)

    def begin_kept(self, asked: Collection[str], ours: Collection[str]) -> None:
        """Of those `request` about run `ours`; the others are another activator's, and
        forgotten."""
        mine = frozenset(ours)
        for name in asked:
            call_id, attempts = self._kept.pop(name)
            if name in mine:
                self._resume(self._books.journal.payload(call_id), attempts)
            else:
                self._held.drop(call_id)
                self._books.journal.delete_call(call_id)

    async def aclose(self) -> None:
        """Stop: what runs is abandoned here and run again by the next start, because the journal
        still holds it."""
        tasks = self._held.tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._results.aclose()


def _size_of(kept: dict[str, Any]) -> int:
    """Bytes of the body of a call in the journal."""
    return len(kept["body"]) * 3 // 4


def _choice_of(record: CallRecord, target: CallTarget) -> RoutingDecision | None:
    """The arm that a call was given: it is still in it while the arm's revision answers."""
    if not record.arm or target.revision != record.revision:
        return None
    return RoutingDecision(target, experiment=record.experiment, arm=record.arm, unit=record.unit)


def is_under_key(request: Request) -> bool:
    """Whether the request carries an idempotency key."""
    return _KEY in request.headers


def id_under_key(request: Request, caller: Principal) -> str:
    """The own id of a call that is submitted under an idempotency key. Raises InvalidInput."""
    key = request.headers[_KEY]
    if not 0 < len(key) <= 255:
        raise errors.InvalidInput(
            f"{HEADER_IDEMPOTENCY_KEY}: write 1 to 255 characters", parameter=HEADER_IDEMPOTENCY_KEY
        )
    return f"key\0{caller.key_id}\0{key.decode('latin-1')}"


def webhook_of(request: Request) -> str:
    """Which webhook is told of a call's end; "" = none by name. Raises InvalidInput."""
    given = request.headers.get(_WEBHOOK, b"").decode("latin-1")
    try:
        return check_name("webhook", given) if given else ""
    except ValueError as e:
        raise errors.InvalidInput(f"{HEADER_WEBHOOK}: {e}", parameter=HEADER_WEBHOOK) from e


def function_of_put(request: Request) -> str:
    """The `function` query parameter of a PUT. Raises InvalidInput."""
    given = parse_qs(request.scope["query_string"].decode("latin-1")).get("function")
    if not given:
        raise errors.InvalidInput(
            "name the function: PUT /v1/calls/{id}?function=app/function", parameter="function"
        )
    return str(given[0])

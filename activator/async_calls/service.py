"""Submitted calls: durable before their 202, run when there is a slot, polled by id until their
result expires.

A call is in the journal from its 202 until the controller has its result, so it survives a crash:
the next process of this activator runs unfinished calls again (at least once: a function whose
instance died during a call may get it twice, with the number of the attempt). Until a call runs,
its body is only in the journal. Bytes and number of pending calls are limited per tenant and for
all tenants. Calls of a function are dispatched up to the capacity of its instances; the others
wait here, not in the throttler's queue, which is for synchronous callers. A call counts as a
request of its quotas when it is submitted, and towards the concurrency quota while it runs.

Calls from the control plane (schedules, dead letters sent again) are also stored here (`store`),
but run only once the controller has confirmed the claim (`begin_stored`).

Owner: the event loop. `pending` has the pending calls; each call's task changes its own entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from activator.access.grants import AccessCache, AccessGrant
from activator.async_calls.api import AsyncCallApi, RemoteCalls
from activator.async_calls.journaled_calls import JournaledCalls, size_of
from activator.async_calls.pending import LEAST_BYTES, PendingCalls
from activator.async_calls.pending_call import PendingCall
from activator.async_calls.records import (
    failed,
    is_dead,
    namespaced_call_id,
    payload,
    queued,
    receipt_of,
)
from activator.async_calls.result_shipper import ResultShipper
from activator.async_calls.result_stream import FINAL
from activator.async_calls.runner import AsyncCallRunner
from activator.async_calls.sandboxes import SandboxesApi
from activator.async_calls.submission import id_under_key, is_under_key, webhook_of
from activator.billing.service import BillingService
from activator.calls.call import Call
from activator.calls.runner import CallRunner
from activator.http.request import Request
from activator.llm.openai.call import EngineCall
from activator.metrics.metrics import Metrics
from activator.routing.api_keys import SCHEDULER, Principal
from activator.routing.route_table import RouteTable
from activator.settings import ActivatorSettings
from activator.tracing.tracer import Tracer
from pilotlight import errors
from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from pilotlight.protocol import HEADER_REPLAYED, CallRecord

log = logging.getLogger(__name__)

DEAD_TTL_S = 7 * 86_400.0
"""A dead letter is stored at least this long: enough to find the cause, weekends included."""


class AsyncCalls:
    """Accepts, runs and finishes submitted calls.

    Attributes:
        pending: those of this activator.
        admit_line: admits the call of a batch's line, as other calls are admitted with their
            requests; None = its request alone is counted.
    """

    admit_line: Callable[[AccessGrant, Call], Awaitable[None]] | None = None

    def __init__(
        self,
        *,
        billing: BillingService,
        runner: CallRunner,
        table: RouteTable,
        access: AccessCache,
        remote: RemoteCalls,
        settings: ActivatorSettings,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._billing = billing
        self._settings = settings
        self.pending = PendingCalls()
        self._stored: dict[str, tuple[str, int]] = {}
        """By `due`: ids of stored calls whose claim is not confirmed, and their number of
        attempts."""
        self._ending = BackgroundTasks()
        self._put_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._journaled = JournaledCalls(billing.journal, table=table, access=access)
        self._attempts = AsyncCallRunner(
            held=self.pending,
            runner=runner,
            access=access,
            metrics=metrics,
            max_result_bytes=settings.max_body_bytes,
            admission=self._journaled.admission,
            load=self._journaled.load,
            tracer=tracer,
        )
        self._attempts.admit_line = self._admit_line
        self._results = ResultShipper(
            self.pending,
            journal=billing.journal,
            controller=remote.controller,
            token=remote.token,
        )
        self.api = AsyncCallApi(
            self.pending,
            remote,
            cancel=self._cancel,
            heartbeat_s=settings.heartbeat_s,
        )
        self.answer = self.api.answer
        self.sandboxes = SandboxesApi(
            self.pending, siblings=remote.siblings, body_timeout_s=settings.body_timeout_s
        )

    def __repr__(self) -> str:
        return f"<AsyncCalls {self.pending!r}, {len(self._stored)} not claimed>"

    # -- submitting --------------------------------------------------------------------------------
    async def submit(self, request: Request, caller: Principal, call: Call) -> None:
        """Store the call durably, then answer 202 with its location; a repeat with the same
        idempotency key is the same call.

        Raises TooManyRequests, JournalFull, Conflict, InvalidInput.
        """
        webhook = webhook_of(request)
        if not is_under_key(request):
            record = (await self.accept(caller, call, fingerprint="", webhook=webhook)).to_json()
            is_new = True
        else:
            record, is_new = await self._once(request, caller, call, id_under_key(request, caller))
        headers = [(b"location", f"/v1/calls/{record['id']}".encode())]
        if not is_new:
            headers.append((HEADER_REPLAYED.encode(), b"true"))
        await request.respond_json(202, receipt_of(record), headers)

    async def accept(
        self, caller: Principal, call: Call, *, fingerprint: str, webhook: str = ""
    ) -> CallRecord:
        """Accept a call; returns once it is durable."""
        self.check_room(caller.tenant, len(call.body))
        record = queued(caller, call, fingerprint=fingerprint, webhook=webhook)
        held = self.pending.add(record, len(call.body))
        try:
            await self._billing.journal.submit(call.id, payload(record, call))
        except BaseException:
            self.pending.drop(call.id)
            raise
        call.park()
        self._start(held, call)
        if isinstance(call, EngineCall):
            call.is_kept = True
        self.pending.record_change(held, record)
        return record

    def check_room(self, tenant: str, size: int) -> None:
        """Check that a call of `size` bytes may be submitted. Raises TooManyRequests."""
        taken, settings, size = self.pending.bytes_of, self._settings, max(size, LEAST_BYTES)
        for whose, pending, bound in (
            (
                "of this tenant",
                self.pending.calls_of[tenant],
                max(1, settings.max_pending_submits // 2),
            ),
            ("of all tenants", len(self.pending), settings.max_pending_submits),
        ):
            if pending >= bound:
                problem = (
                    f"{pending} submitted calls {whose} are pending, the limit "
                    f"(activator.max_pending_submits; half of it for one tenant)"
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
                    f"{whose} submitted calls use {used} of {limit} bytes, the limit "
                    f"(activator.{name}): retry once some have ended"
                )
                raise errors.TooManyRequests(problem, retry_after_s=5)

    def reading(self, tenant: str, size: int) -> AbstractContextManager[None]:
        """Reserve room for a body of at most `size` bytes that is about to be read. Raises
        TooManyRequests."""
        self.check_room(tenant, size)
        return self.pending.reading(tenant, size)

    async def forward_put(self, request: Request, caller: Principal, own_id: str) -> bool:
        """Forward a PUT to the activator that owns this id. Returns whether it was answered there.

        Raises Unavailable while it is down, TooManyRequests.
        """
        return self.api.siblings is not None and await self.api.siblings.forward_to_owner(
            request, caller.tenant, namespaced_call_id(caller.tenant, own_id)
        )

    async def put(self, request: Request, caller: Principal, call: Call, own_id: str) -> None:
        """Handle `PUT /v1/calls/{id}`: a repeat with the same id is the same call. Raises Conflict
        when the arguments differ."""
        record, is_new = await self._once(request, caller, call, own_id)
        await request.respond_json(202 if is_new else 200, {**receipt_of(record), "id": own_id})

    async def _once(
        self, request: Request, caller: Principal, call: Call, own_id: str
    ) -> tuple[dict[str, Any], bool]:
        """Return the call of this id, and whether it is new."""
        fingerprint = hashlib.sha256(
            b"%s\0%s\0%s"
            % (call.target.function_id.encode(), call.method.encode(), call.caller_arguments)
        ).hexdigest()
        call.id = namespaced_call_id(caller.tenant, own_id)
        # a concurrent repeat waits until the first is stored
        async with self._put_locks.setdefault(call.id, asyncio.Lock()):
            known = await self.api.find(request, caller, call.id)
            if known is None:
                return (
                    await self.accept(
                        caller, call, fingerprint=fingerprint, webhook=webhook_of(request)
                    )
                ).to_json(), True
        if known["labels"].get("fingerprint") != fingerprint:
            raise errors.Conflict(
                "this id, or idempotency key, was already used for another function or other "
                "arguments"
            )
        return known, False

    # -- running -----------------------------------------------------------------------------------
    def _start(self, held: PendingCall, call: Call) -> None:
        held.task = asyncio.create_task(self._run(held, call), name=f"call {call.id}")
        held.task.add_done_callback(partial(self._on_end, held))

    def _on_end(self, held: PendingCall, task: asyncio.Task[None]) -> None:
        """Fail a call of which the activator's own code has raised: it would stay RUNNING."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("call.lost call=%s", held.record.id, exc_info=error)
        if held.record.state not in FINAL:
            lost = errors.PilotlightError("an error of the activator ended the call: see its log")
            self._finish(held, failed(held.record, lost))

    async def _run(self, held: PendingCall, call: Call) -> None:
        held.call = call
        call.on_open = held.opened
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
            kept = {"payload": self._billing.journal.payload(record.id)}
        try:
            self._billing.journal.finish(record.id, {**record.to_json(), **kept})
        except errors.StorageFull as e:
            log.error(
                "cannot journal result; keeping it in memory until shipped call=%s error=%s",
                record.id,
                e,
            )
        self.pending.record_change(held, record)

    async def _cancel(self, held: PendingCall) -> None:
        if held.record.state in FINAL:
            return
        if held.task is None:
            raise errors.Conflict(
                f"call {held.record.id} has not begun, and cannot be cancelled yet: retry",
                retry_after_s=1,
            )
        held.task.cancel()
        await asyncio.wait([held.task])
        if held.record.state not in FINAL:
            self._attempts.record_cancelled(held)
            self._finish(
                held, replace(held.record, state="CANCELLED", status=499, outcome="cancelled")
            )

    async def _admit_line(self, call: Call) -> None:
        """Admit the call of a batch's line, whose body is loaded. Raises InvalidInput, Forbidden,
        OverQuota, TooManyRequests, Unavailable."""
        if self.admit_line is None:
            call.admission = self._journaled.admission(call)
            await call.admission.count_retry()
        else:
            await self.admit_line(self._journaled.grant(call), call)

    # -- recovery ----------------------------------------------------------------------------------
    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Resume the unfinished calls of the last process, ship its results, and start the
        shipper."""
        for left in self._billing.recovered.undelivered:
            record = CallRecord.from_json(self._billing.journal.payload(left.id))
            self.pending.record_change(
                self.pending.get(left.id) or self.pending.add(record), record
            )
        for left in self._billing.recovered.unfinished:
            kept = self._billing.journal.payload(left.id)
            if "due" in kept:
                self.pending.add(CallRecord.from_json(kept["record"]), size_of(kept))
                self._stored[kept["due"]] = (left.id, left.attempts)
            else:
                self._resume(kept, left.attempts)
        return [group.create_task(self._results.run(), name="call results shipping")]

    def _resume(self, kept: dict[str, Any], attempts: int) -> None:
        record = CallRecord.from_json(kept["record"])
        self.pending.drop(record.id)
        held = self.pending.add(record, size_of(kept))
        try:
            call = self._journaled.call(record, kept)
        except errors.PilotlightError as e:
            self._finish(held, failed(record, e))
            return
        if attempts > 0 and call.target.spec.sandbox:
            restarted = errors.WorkerCrashed(
                "the activator was restarted: the sandbox has ended, and its files with it",
                reason="restarted",
            )
            self._finish(held, failed(record, restarted))
            return
        call.attempt = max(attempts, record.attempt) + 1
        # the attempt that our own shutdown interrupted does not count as a retry
        call.retries = max(0, attempts - record.attempt - 1)
        if "due" in kept:  # the expiry of its result is known only now
            until = kept.get("retry_until")
            held.is_patient = until is not None
            held.retry_until = until or time.time() + call.target.spec.clocks.result_ttl_s
            held.record = replace(record, expires_at=held.retry_until)
            # no activator has counted it: the dashboard's form has no quotas at hand
            held.is_uncounted = kept["key"] != SCHEDULER and record.attempt == 0
            held.needs_tokens = (
                isinstance(call, EngineCall) and call.wanted.counts and attempts == 0
            )
        call.park()
        self._start(held, call)

    # -- calls from the control plane --------------------------------------------------------------
    async def store(self, kept: dict[str, Any]) -> None:
        """Store a due call, without running it. Idempotent. Raises TooManyRequests, JournalFull;
        Conflict while the result of an earlier run is not shipped yet."""
        record = CallRecord.from_json(kept["record"])
        if kept["due"] in self._stored:
            return
        if record.id in self.pending:
            raise errors.Conflict(
                f"the result of the earlier run of call {record.id} is not shipped yet",
                retry_after_s=1,
            )
        self.check_room(record.tenant, size_of(kept))
        self.pending.add(record, size_of(kept))
        try:
            await self._billing.journal.submit(record.id, kept)
        except BaseException:
            self.pending.drop(record.id)
            raise
        self._stored[kept["due"]] = (record.id, 0)

    def stored(self) -> list[str]:
        """Return the `due` ids of calls that are stored and not begun."""
        return list(self._stored)

    def begin_stored(self, asked: Collection[str], ours: Collection[str]) -> None:
        """Run the calls in `ours`; the others in `asked` belong to another activator and are
        deleted."""
        mine = frozenset(ours)
        for name in asked:
            call_id, attempts = self._stored.pop(name)
            if name in mine:
                self._resume(self._billing.journal.payload(call_id), attempts)
            else:
                self.pending.drop(call_id)
                self._billing.journal.delete_call(call_id)

    async def cancel_stored(self, calls: Collection[str]) -> None:
        """Cancel calls from the control plane that are pending here. One that has not begun is
        named again later."""
        for call_id in calls:
            if (held := self.pending.get(call_id)) is not None:
                with contextlib.suppress(errors.Conflict):
                    await self._cancel(held)

    def end_tenant(self, tenant: str) -> None:
        """Cancel the calls of a deleted tenant that do not run; those that do end with their
        instances, and are billed until then (`SuspendedTenants`)."""
        theirs = [
            held.record.id
            for held in self.pending
            if held.record.tenant == tenant and held.record.state != "RUNNING"
        ]
        if theirs:
            self._ending.run(self.cancel_stored(theirs), name=f"end calls of {tenant}")

    async def aclose(self) -> None:
        """Stop: running calls are cancelled, and the next process runs them again from the
        journal."""
        await self._ending.cancel()
        await cancel_all(self.pending.tasks())
        await self._results.aclose()

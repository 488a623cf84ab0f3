"""The call that an entry of the journal describes, with the current state of its function, its key
and its quotas: what an activator runs after a restart, or later than its caller has submitted."""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import Any

from activator.access.grants import AccessCache, AccessGrant
from activator.async_calls.records import without_key
from activator.billing.journal import Journal
from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.calls.trace_context import Trace
from activator.http.payloads import Payload, accepts_pickles, stored_type
from activator.llm.openai.call import call_of_kept
from activator.quotas.admission import UNCOUNTED, Admission
from activator.routing.api_keys import ANONYMOUS, FUNCTION_KEY, FunctionPrincipal, Principal
from activator.routing.call_origin import CallOrigin
from activator.routing.route_table import CallTarget, RouteTable
from activator.routing.traffic_split import RoutingDecision
from pilotlight import errors
from pilotlight.protocol import CallRecord
from pilotlight.spec.identifiers import FunctionAddress, TenantId


class JournaledCalls:
    """Reads calls from the journal. Owner: the event loop."""

    def __init__(self, journal: Journal, *, table: RouteTable, access: AccessCache) -> None:
        self._journal = journal
        self._table = table
        self._access = access

    def __repr__(self) -> str:
        return f"<JournaledCalls of {self._journal!r}>"

    def load(self, call: Call) -> None:
        """Read a parked call's body again. Raises Unavailable."""
        try:
            call.load(base64.b64decode(self._journal.payload(call.id)["body"]))
        except (OSError, StopIteration, ValueError, KeyError) as e:
            raise errors.Unavailable(
                f"the journal cannot be read: {type(e).__name__}", retry_after_s=1
            ) from e

    def call(self, record: CallRecord, kept: dict[str, Any]) -> Call:
        """Return the call of a journal entry, with the current state of its function and its key.

        Raises NotFound, Forbidden, Unavailable; UnsupportedMediaType for a pickle of another tenant
        that an older version accepted."""
        owner = TenantId(kept.get("owner") or record.tenant)
        address = FunctionAddress(
            tenant=owner, environment=record.environment, app=record.app, function=record.function
        )
        target = self._table.target(address, record.revision)
        target.check(record.method)
        # the key of its caller may have been revoked since
        accepts_pickle = accepts_pickles(record.tenant, owner)
        content_type = stored_type(kept["content_type"].encode(), accepts=accepts_pickle)
        entry = self._access.entry(self._caller(kept["key"], record.tenant), target)
        deadline_at = kept.get("deadline_at")
        make = (
            partial(call_of_kept, kept)
            if target.spec.language_model is not None or "path" in kept
            else Call
        )
        call = make(
            id=record.id,
            target=target,
            method=record.method,
            payload=Payload(base64.b64decode(kept["body"]), content_type, kept["accept"].encode()),
            caller=Caller(
                key_id=kept["key"],
                tenant="" if record.tenant == owner else record.tenant,
                rank=entry.callers[kept["priority"].encode() if "priority" in kept else None].rank,
                accepts_pickle=accepts_pickle,
                origin=CallOrigin.from_json(kept["origin"]) if "origin" in kept else None,
                customer=kept.get("customer", ""),
            ),
            choice=_choice_of(record, target),
            deadline_s=None if deadline_at is None else max(0.001, deadline_at - time.time()),
        )
        call.admission = self.admission(call)
        call.trace = Trace.from_json(kept["trace"]) if kept.get("trace") else None
        return call

    def grant(self, call: Call) -> AccessGrant:
        """Return what the call's caller may do with its function now. Raises Forbidden."""
        caller = self._caller(call.caller.key_id, call.caller.tenant or call.target.tenant)
        return self._access.entry(caller, call.target, customer=call.caller.customer)

    def admission(self, call: Call) -> Admission:
        """Return the admission of a call that was counted at submission. Raises Forbidden."""
        quota_check = self.grant(call).quota_check
        return UNCOUNTED if quota_check is None else Admission(quota_check, requests=0, holds=0)

    def _caller(self, key_id: str, tenant: str) -> Principal:
        """Return the caller of an accepted call. Where its key was revoked since, the call keeps
        the rights and quotas of its tenant: revoking a key refuses requests, and this one was
        answered."""
        if key_id.startswith(FUNCTION_KEY):
            return FunctionPrincipal(key_id)
        if not key_id:
            return ANONYMOUS
        return self._table.caller_of(key_id) or without_key(key_id, tenant)


def size_of(kept: dict[str, Any]) -> int:
    """Return the size of the body of a journal entry."""
    return len(kept["body"]) * 3 // 4


def _choice_of(record: CallRecord, target: CallTarget) -> RoutingDecision | None:
    """Return the experiment arm of a call, while the arm's revision is still routed."""
    if not record.arm or target.revision != record.revision:
        return None
    return RoutingDecision(target, experiment=record.experiment, arm=record.arm, unit=record.unit)

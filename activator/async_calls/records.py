"""Records of submitted calls: their form in the journal, the responses to callers, and their final
states."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from activator.async_calls.pending_call import PendingCall, StreamBuffer
from activator.calls.attempt_end import ResponseReader
from activator.calls.call import AnsweredCall, Call
from activator.http.payloads import answered_type
from activator.http.request import Request
from activator.routing.api_keys import FunctionPrincipal, Principal
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import BATCH_LABEL, CONTENT_PROBLEM, CallRecord, KeyRecord, problem
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.sandboxes import LABEL

CALLER_LABEL, PARENT_LABEL = "caller", "parent"
"""Labels of a call that a function submitted: `app/function`, and the id of its usage record."""
MAX_WAIT_S = 60.0
"""Longest wait of a long poll."""


def namespaced_call_id(tenant: str, own_id: str) -> str:
    """Return the platform's id of a call with a caller's id: unique for tenant and caller's id."""
    return "req-" + hashlib.sha256(f"{tenant}\0{own_id}".encode()).hexdigest()[:32]


async def collect(
    attempt: AnsweredCall, limit_bytes: int, held: PendingCall | None = None
) -> tuple[int, bytes]:
    """Read a worker's whole response, also of a generator, and return its status and body: status
    500 where a generator raised. `held` publishes it to stream readers as it arrives.

    Raises TooLarge, WorkerCrashed, DeadlineExceeded.
    """
    answer = attempt.answer
    body = answer.body
    try:
        with ResponseReader(attempt, attempt.call.reading(answer)) as response:
            if body is None:
                body = await _collect_stream(attempt, limit_bytes, held, response)
            body = response.whole(body)
    except WorkerConnectionLost as e:
        raise attempt.cut_by or await attempt.crash_error() from e
    return response.status, body


async def _collect_stream(
    attempt: AnsweredCall, limit_bytes: int, held: PendingCall | None, response: ResponseReader
) -> bytes:
    answer = attempt.answer
    content_type = answered_type(
        attempt.call.content_type, answer.header(b"content-type").decode("latin-1")
    )
    log = (
        held.begin_log(attempt.call.attempt, content_type)
        if held is not None and answer.status < 400
        else StreamBuffer(0, "")
    )
    async for piece in response:
        if attempt.bytes_out > limit_bytes:
            raise errors.TooLarge(
                f"the result is larger than {limit_bytes} bytes: store it and return its location",
                limit_bytes=limit_bytes,
            )
        log.data += piece
        if held is not None:
            held.notify()
    return bytes(log.data)


def queued(caller: Principal, call: Call, *, fingerprint: str, webhook: str) -> CallRecord:
    """Return the record of a newly submitted call."""
    target, choice = call.target, call.choice
    record = CallRecord(
        id=call.id,
        tenant=caller.tenant,
        environment=target.environment,
        app=target.app,
        function=target.function,
        method=call.method,
        state="QUEUED",
        sequence=1,
        submitted_at=call.started_at,
        revision=target.revision,
        expires_at=call.started_at + target.spec.clocks.result_ttl_s,
        labels={
            **({"fingerprint": fingerprint} if fingerprint else {}),
            **({LABEL: "true"} if target.spec.sandbox else {}),
            **_origin_labels(call),
        },
        webhook=webhook,
    )
    return (
        record
        if choice is None
        else replace(record, arm=choice.arm, unit=choice.unit, experiment=choice.experiment)
    )


def _origin_labels(call: Call) -> dict[str, str]:
    """Return the labels of a call that a function submitted: the function, and its usage record."""
    origin = call.caller.origin
    return {} if origin is None else {CALLER_LABEL: origin.function, PARENT_LABEL: origin.record}


def is_dead(record: CallRecord) -> bool:
    """Return whether an ended call becomes a dead letter: it failed, and not because of invalid
    input. A sandbox does not: another one would have none of its files; nor does a line of a batch,
    whose failure is in the batch's error file."""
    is_apart = LABEL in record.labels or BATCH_LABEL in record.labels
    return record.state == "FAILED" and record.status not in (400, 415) and not is_apart


def without_key(key_id: str, tenant: str) -> Principal:
    """Return the principal of a tenant's scheduled calls, and of calls whose key was revoked since:
    the tenant's own rights and quotas."""
    return Principal(KeyRecord(id=key_id, hash="", tenant=tenant, scope=Scope.INVOKE.value))


def payload(record: CallRecord, call: Call) -> dict[str, Any]:
    """Return the journal entry of a submitted call: enough to run it again."""
    deadline = {} if call.deadline_s is None else {"deadline_at": call.started_at + call.deadline_s}
    return {
        **deadline,
        **({"trace": call.trace.to_json()} if call.trace is not None else {}),
        "record": record.to_json(),
        "owner": call.target.tenant,
        "key": call.caller.key_id,
        **({"origin": call.caller.origin.to_json()} if call.caller.origin is not None else {}),
        **({"customer": call.caller.customer} if call.caller.customer else {}),
        "content_type": call.content_type.decode("latin-1"),
        "accept": call.accept.decode("latin-1"),
        "body": base64.b64encode(call.body).decode(),
        **call.kept(),
    }


def answered(record: CallRecord, attempt: AnsweredCall, status: int, body: bytes) -> CallRecord:
    """Return the record of a call that its worker answered."""
    call, answer = attempt.call, attempt.answer
    return replace(
        record,
        state="SUCCEEDED" if status < 400 else "FAILED",
        status=status,
        content_type=answered_type(
            call.content_type, answer.header(b"content-type").decode("latin-1")
        ),
        result=base64.b64encode(body).decode(),
        outcome=answer.header(b"pilotlight-outcome").decode("latin-1")
        if status == answer.status
        else "raised",
        revision=call.target.revision,
        start_kind=call.start_kind.value,
        queued_ms=int(call.queued_ms),
        start_ms=int(call.start_ms),
        exec_ms=int(attempt.exec_ms),
        cost=attempt.cost,
    )


def failed(record: CallRecord, error: errors.PilotlightError) -> CallRecord:
    """Return the record of a call that ended with a platform error."""
    body = problem(
        type=error.type,
        title=error.type,
        status=error.status,
        detail=str(error),
        instance=record.id,
        extra=dict(error.detail),
    )
    return replace(
        record,
        state="FAILED",
        status=error.status,
        content_type=CONTENT_PROBLEM,
        result=base64.b64encode(json.dumps(body).encode()).decode(),
        outcome="error",
    )


def receipt_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a submission, from a record as JSON."""
    return {"id": record["id"], "state": record["state"], "url": f"/v1/calls/{record['id']}"}


def unknown(call_id: str) -> errors.NotFound:
    """Return the error for an id that does not exist or belongs to another tenant."""
    return errors.NotFound(
        f"no call {call_id!r}: it does not exist, belongs to another tenant, or its result has "
        f"expired"
    )


def is_visible_to(caller: Principal, record: CallRecord) -> bool:
    """Return whether a call belongs to the caller's tenant and environment, and, for a function,
    was submitted by its app. Raises Forbidden when the key is for another function."""
    if not is_of_app(caller, record.labels):
        return False
    if record.tenant != caller.tenant or caller.environment not in (None, record.environment):
        return False
    caller.check_reach(environment=record.environment, app=record.app, function=record.function)
    return True


def is_of_app(caller: Principal, labels: Mapping[str, str]) -> bool:
    """Return whether a caller may see a call with these labels: a function sees those that
    functions of its app submitted."""
    return (
        not isinstance(caller, FunctionPrincipal)
        or labels.get(CALLER_LABEL, "").partition("/")[0] == caller.calling_app
    )


def wait_s(request: Request) -> float:
    """Return the `wait_s` query parameter of a poll, 0 when there is none. Raises InvalidInput."""
    given = parse_qs(request.scope["query_string"].decode("latin-1")).get("wait_s", ["0"])[0]
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise errors.InvalidInput(
            f"wait_s = {given!r}: must be a number of seconds from 0 to {MAX_WAIT_S:g}",
            parameter="wait_s",
        )
    return seconds

"""Calls for tests, as if they were admitted."""

from __future__ import annotations

from typing import Any

from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.http.payloads import JSON, Payload
from activator.routing.call_target import CallTarget
from tests.fakes.routes import spec_of, target_of


def call_of(
    target: CallTarget | None = None,
    body: bytes = b"{}",
    *,
    id: str = "req-1",
    method: str = "",
    content_type: bytes = JSON,
    accept: bytes = b"",
    key_id: str = "k",
    **more: Any,
) -> Call:
    """A call of `target` (default: the function of `spec_of`) with a key. `more`: attributes of
    Caller and other arguments of Call."""
    who = {name: more.pop(name) for name in ("tenant", "accepts_pickle", "rank") if name in more}
    return Call(
        id=id,
        target=target or target_of(spec_of()),
        method=method,
        payload=Payload(body, content_type, accept),
        caller=Caller(key_id=key_id, **who),
        **more,
    )

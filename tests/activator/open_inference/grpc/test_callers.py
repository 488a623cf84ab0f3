"""The address of a gRPC caller is the one that the activator's own process names, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from activator.gateway.forwarded_callers import ForwardedCallers
from activator.http.request import CALLER
from pilotlight.protocol import HEADER_GRPC_CALLER, HEADER_GRPC_TOKEN

TOKEN, NAMED = HEADER_GRPC_TOKEN.encode(), HEADER_GRPC_CALLER.encode()


def recorded(callers: ForwardedCallers, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    scope: dict[str, Any] = {"type": "http", "client": None, "headers": list(headers)}
    callers.record(scope)
    return scope


def test_the_process_names_the_caller_and_its_secret_goes_no_further() -> None:
    callers = ForwardedCallers((), token="", grpc_token="secret")
    scope = recorded(callers, (TOKEN, b"secret"), (NAMED, b"192.0.2.7"))
    assert scope[CALLER] == "192.0.2.7"
    assert scope["headers"] == [(NAMED, b"192.0.2.7")]


@pytest.mark.parametrize("grpc_token,sent", [("secret", b"other"), ("secret", b""), ("", b"")])
def test_a_request_without_the_secret_names_none(grpc_token: str, sent: bytes) -> None:
    callers = ForwardedCallers((), token="", grpc_token=grpc_token)
    assert CALLER not in recorded(callers, (TOKEN, sent), (NAMED, b"192.0.2.7"))
    assert CALLER not in recorded(callers, (NAMED, b"192.0.2.7"))


def test_a_trusted_proxy_before_it_names_the_caller() -> None:
    callers = ForwardedCallers(("192.0.2.0/24",), token="", grpc_token="secret")
    own = ((TOKEN, b"secret"), (NAMED, b"192.0.2.7"))
    assert recorded(callers, *own, (b"x-forwarded-for", b"198.51.100.1"))[CALLER] == "198.51.100.1"
    stranger = ((TOKEN, b"secret"), (NAMED, b"203.0.113.9"))
    forged = recorded(callers, *stranger, (b"x-forwarded-for", b"198.51.100.1"))
    assert forged[CALLER] == "203.0.113.9"

"""What a request says of the call that it submits: its id, the function of a PUT, its webhook."""

from __future__ import annotations

from urllib.parse import parse_qs

from activator.http.request import Request
from activator.routing.api_keys import Principal
from pilotlight import errors
from pilotlight.protocol import HEADER_IDEMPOTENCY_KEY, HEADER_WEBHOOK
from pilotlight.spec.identifiers import check_name

_KEY = HEADER_IDEMPOTENCY_KEY.encode()
_WEBHOOK = HEADER_WEBHOOK.encode()


def is_under_key(request: Request) -> bool:
    """Return whether the request carries an idempotency key."""
    return _KEY in request.headers


def id_under_key(request: Request, caller: Principal) -> str:
    """Return the caller's id of a call that is submitted under an idempotency key. Raises
    InvalidInput."""
    key = request.headers[_KEY]
    if not 0 < len(key) <= 255:
        raise errors.InvalidInput(
            f"{HEADER_IDEMPOTENCY_KEY}: write 1 to 255 characters", parameter=HEADER_IDEMPOTENCY_KEY
        )
    return f"key\0{caller.key_id}\0{key.decode('latin-1')}"


def webhook_of(request: Request) -> str:
    """Return the webhook that is notified when a call ends; "" = none. Raises InvalidInput."""
    given = request.headers.get(_WEBHOOK, b"").decode("latin-1")
    try:
        return check_name("webhook", given) if given else ""
    except ValueError as e:
        raise errors.InvalidInput(f"{HEADER_WEBHOOK}: {e}", parameter=HEADER_WEBHOOK) from e


def function_of_put(request: Request) -> str:
    """Return the `function` query parameter of a PUT. Raises InvalidInput."""
    given = parse_qs(request.scope["query_string"].decode("latin-1")).get("function")
    if not given:
        raise errors.InvalidInput(
            "query parameter function is missing: PUT /v1/calls/{id}?function=app/function",
            parameter="function",
        )
    return str(given[0])

"""Conversion of error responses to exceptions: problem documents (RFC 9457) and pickled
exceptions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pilotlight import errors
from pilotlight.errors import FunctionRaised, PilotlightError, RemoteError
from pilotlight.protocol import PROBLEM_BASE

_STANDARD_MEMBERS = frozenset({"type", "title", "status", "detail", "instance"})
_PARAMETERS = frozenset({"self", "message"})
"""Of PilotlightError: members with these names are no details."""
_LONGEST_TEXT = 300
"""Characters quoted from an error page that is not the platform's: enough to recognise a proxy,
short enough for a terminal."""


def _tree(root: type[PilotlightError]) -> dict[str, type[PilotlightError]]:
    found = {root.type: root}
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__ and kind is not RemoteError:
            found.update(_tree(kind))
    return found


_BY_TYPE = _tree(PilotlightError)
_BY_STATUS = {
    kind.status: kind
    for kind in reversed(_BY_TYPE.values())
    if kind.status < 500 or kind.status in (503, 504, 507)
}


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the Retry-After header in seconds, None if absent or not a number (RFC 9110 §10.2.3;
    the platform never sends dates)."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def error_from_response(status: int, headers: Mapping[str, str], body: bytes) -> PilotlightError:
    """Return the exception for a response with an error status and any body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "type" not in document:
        return _foreign(status, headers, body)
    return error_from_problem(document, retry_after=retry_after_s(headers))


def error_from_problem(
    document: Mapping[str, Any], *, retry_after: float | None = None
) -> PilotlightError:
    """Return the exception that a problem document describes, which a function of others may have
    written. Its extension members become `detail`."""
    slug = str(document.get("type", "")).removeprefix(PROBLEM_BASE)
    given = document.get("status", 500)
    status = given if isinstance(given, int) else 500
    kind = _BY_TYPE.get(slug) or _BY_STATUS.get(status, PilotlightError)
    message = str(document.get("detail") or document.get("title") or slug)
    extra = {str(k): v for k, v in document.items() if k not in _STANDARD_MEMBERS | _PARAMETERS}
    asked = extra.pop("retry_after_s", None)
    if "instance" in document:
        extra["request_id"] = document["instance"]
    error = document.get("error")
    if kind is FunctionRaised and isinstance(error, Mapping) and error.get("traceback"):
        return RemoteError(
            f"{error.get('type', 'Exception')}: "
            f"{error.get('message', message)}\n\n{error['traceback']}",
            **extra,
        )
    wait = retry_after
    if wait is None and isinstance(asked, int | float):
        wait = asked
    return kind(message, retry_after_s=wait, **extra)


def _foreign(status: int, headers: Mapping[str, str], body: bytes) -> PilotlightError:
    kind = _BY_STATUS.get(status, PilotlightError)
    if not body:  # such as to HEAD
        return kind(f"the server answered status {status}", retry_after_s=retry_after_s(headers))
    text = body[:_LONGEST_TEXT].decode(errors="replace").strip()
    return kind(
        f"the server returned status {status} without a problem document: {text!r}",
        retry_after_s=retry_after_s(headers),
    )


def remote_exception(pickled: bytes) -> BaseException:
    """Return the exception that user code raised remotely, with its original type if that can be
    loaded.

    The notes of the exception (PEP 678) contain the remote traceback, added by the worker."""
    from pilotlight.client.pickling import UnpicklingFailed, loads

    try:
        value = loads(pickled)
    except UnpicklingFailed as e:
        return RemoteError(
            f"the function raised an exception whose class cannot be loaded in this process: {e}"
        )
    if isinstance(value, BaseException):
        return value
    return RemoteError(
        f"the function raised an object of type {type(value).__name__}, which is not an "
        f"exception: {value!r}"
    )

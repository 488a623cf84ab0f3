"""Answers that are not results, turned into exceptions: problem documents (RFC 9457) and pickled
exceptions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pilotlight import errors
from pilotlight.errors import FunctionRaised, PilotlightError, RemoteError
from pilotlight.protocol import PROBLEM_BASE

_STANDARD_MEMBERS = frozenset({"type", "title", "status", "detail", "instance"})
_LONGEST_TEXT = 300
"""Characters of a foreign error page that are quoted: enough to recognise a proxy, short enough for
a terminal."""


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
    """The Retry-After header in seconds, None when absent or not a number (RFC 9110 §10.2.3; we
    never send dates)."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def error_from_response(status: int, headers: Mapping[str, str], body: bytes) -> PilotlightError:
    """The exception for an answer with an error status, whatever its body is."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or "type" not in document:
        return _foreign(status, headers, body)
    return error_from_problem(document, retry_after=retry_after_s(headers))


def error_from_problem(
    document: Mapping[str, Any], *, retry_after: float | None = None
) -> PilotlightError:
    """The exception that a problem document describes; its further members become `detail`."""
    slug = str(document.get("type", "")).removeprefix(PROBLEM_BASE)
    status = int(document.get("status", 500))
    kind = _BY_TYPE.get(slug) or _BY_STATUS.get(status, PilotlightError)
    message = str(document.get("detail") or document.get("title") or slug)
    extra = {str(k): v for k, v in document.items() if k not in _STANDARD_MEMBERS}
    if "instance" in document:
        extra["request_id"] = document["instance"]
    error = document.get("error")
    if kind is FunctionRaised and isinstance(error, Mapping) and error.get("traceback"):
        return RemoteError(
            f"{error.get('type', 'Exception')}: "
            f"{error.get('message', message)}\n\n{error['traceback']}",
            **extra,
        )
    wait = retry_after if retry_after is not None else extra.pop("retry_after_s", None)
    return kind(message, retry_after_s=wait, **extra)


def _foreign(status: int, headers: Mapping[str, str], body: bytes) -> PilotlightError:
    kind = _BY_STATUS.get(status, PilotlightError)
    text = body[:_LONGEST_TEXT].decode(errors="replace").strip()
    return kind(
        f"the server answered {status} without a problem document: {text!r}",
        retry_after_s=retry_after_s(headers),
    )


def remote_exception(pickled: bytes) -> BaseException:
    """The exception that user code raised remotely, of its own type where that can be loaded here.

    The worker has put the remote traceback into the exception's notes (PEP 678), which travel with
    it."""
    from pilotlight.client.pickling import UnpicklingFailed, loads

    try:
        value = loads(pickled)
    except UnpicklingFailed as e:
        return RemoteError(
            f"the function raised an exception whose class cannot be loaded here: {e}"
        )
    if isinstance(value, BaseException):
        return value
    return RemoteError(
        f"the function raised, and what came back is {type(value).__name__}, not an exception: "
        f"{value!r}"
    )

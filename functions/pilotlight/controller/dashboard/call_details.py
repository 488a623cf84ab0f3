"""What a call's page shows of its error, its result and its times. Pure; everything is text that
user code wrote, cut to a bound."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.dashboard.log_lines import Line
from pilotlight.protocol import ARGUMENTS_PREFIX, CONTENT_PROBLEM, UsageRecord

MAX_RESULT = 65_536
"""Bytes of a result that are shown; longer ones are only described."""
RESULT_CHARS = (MAX_RESULT + 2) // 3 * 4
"""The same as base64: what is read of the database."""
MAX_DETAIL = 4000
"""Characters of an error's message that are shown."""
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Why a call failed; "" where nothing is known.

    Attributes:
        message: of the problem that its caller got, or the last line of the traceback.
        traceback: from the instance's log.
        arguments: types and sizes of the arguments, from the instance's log.
    """

    message: str = ""
    traceback: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """A submitted call's result: `text` if it is shown, otherwise None."""

    content_type: str
    size_bytes: int
    text: str | None


def error_of(submitted: Mapping[str, Any] | None, lines: Iterable[Line]) -> CallError:
    """Return why a call failed, by its stored problem (`submitted_calls.find`) and its log
    lines."""
    arguments, previous = "", ""
    traceback: list[str] = []
    for line in lines:
        text = str(line["text"])
        if text.startswith(ARGUMENTS_PREFIX):
            arguments = text.removeprefix(ARGUMENTS_PREFIX)
            traceback = traceback or [previous]  # an error without a frame in user code
        elif arguments and _TRACEBACK in text:
            arguments, traceback = "", [text]  # of the next attempt
        elif not arguments and (traceback or _TRACEBACK in text):
            traceback.append(text)
        previous = text
    own = [text for text in traceback if text and not text[0].isspace() and _TRACEBACK not in text]
    return CallError(
        message=(_problem(submitted) or (own[-1] if own else ""))[:MAX_DETAIL],
        traceback="\n".join(traceback),
        arguments=arguments,
    )


def _problem(submitted: Mapping[str, Any] | None) -> str:
    if submitted is None or submitted["content_type"] != CONTENT_PROBLEM:
        return ""
    try:
        body = json.loads(_bytes(submitted["result"]))
    except (ValueError, RecursionError):
        return ""
    return str(body.get("detail", "")) if isinstance(body, dict) else ""


def result_of(submitted: Mapping[str, Any] | None) -> CallResult | None:
    """Return the result of a submitted call that has one. Text is shown, pickles never opened."""
    if submitted is None or not submitted["result_length"]:
        return None
    content_type, encoded = str(submitted["content_type"]), str(submitted["result"])
    size_bytes = submitted["result_length"] * 3 // 4 - encoded[-2:].count("=")
    kind = content_type.partition(";")[0].strip().lower()
    is_text = kind.startswith("text/") or kind in ("application/json", "application/x-ndjson")
    is_text = is_text or kind == CONTENT_PROBLEM
    text = None
    if is_text and encoded:
        text = _bytes(encoded).decode("utf-8", "replace")
    return CallResult(content_type=content_type, size_bytes=size_bytes, text=text)


def _bytes(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded)
    except binascii.Error:
        return b""


def server_timing(record: UsageRecord) -> str:
    """Return an attempt's phases as its caller got them in the header `Server-Timing`."""
    phases = {"queue": record.queued_ms, "start": record.start_ms, "exec": record.exec_ms}
    return ", ".join(f"{phase};dur={ms}" for phase, ms in phases.items())

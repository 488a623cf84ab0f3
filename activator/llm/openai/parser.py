"""Parses an engine's answers: their token counts and finish reasons, and removes what was requested
for accounting only.

An engine reports its usage in each event of a stream, and other servers at its end, because that
was requested (`OpenAIRequest.written_for`). It is removed again unless the caller requested it.
This costs a few microseconds per event: only the usage itself is parsed, and found by text that
cannot occur inside a JSON string (where quotes are escaped), with the spaces that JSON may have.
Lines may end with CR LF. Unexpected content is passed on unchanged."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from activator.http.sse import SseSplitter
from activator.llm.openai.errors import error_of
from activator.llm.openai.request import OpenAIRequest
from activator.quotas.token_reservation import TokenReservation
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE
from pilotlight.spec.engines import MAX_TOKENS

USAGE_BYTES: Final = 4096
"""Upper limit of the size of a usage object or a finish reason; no more is kept of an answer that
is too long to be buffered."""
MAX_LOOKS: Final = 64
"""Of the last places that could be a usage or a finish reason, so many are looked at: in an answer
that is meant to be read the last one or two are."""
DONE: Final = b"data: [DONE]\n\n"
_DONE: Final = b"[DONE]"
_SSE: Final = CONTENT_SSE.encode()
_END: Final = b"\n\n"
_DATA: Final = re.compile(rb"(?:\A|\n)data: ?")
_ERROR: Final = re.compile(rb'\s*\{\s*"error"\s*:(?!\s*null)')
_USAGE: Final = '"usage"'
_VALUE: Final = re.compile(r"\s*:\s*")
_FINISH: Final = re.compile(r'"finish_reason"\s*:\s*"(\w{1,64})"')
_FINISH_SAID: Final = b'"finish_reason"'
_USAGE_SAID: Final = b'"usage"'
_OBJECT: Final = re.compile(rb"\s*:\s*\{")
_TEXT: Final = re.compile(rb'\s*:\s*"')
_CHOICES: Final = re.compile(r'"choices"\s*:\s*\[\s*\{')
_NO_CHOICES: Final = re.compile(r'"choices"\s*:\s*\[\s*\]')
_INDEX: Final = re.compile(r'"index"\s*:\s*(\d{1,4})\b')
_ROLE: Final = re.compile(r'"role"\s*:')
_NOTHING: Final = re.compile(r'"delta"\s*:\s*\{\s*\}')
_GENERATED: Final = re.compile(r'"(?:content|reasoning|reasoning_content|text)"\s*:\s*"[^"]')
_decode = json.JSONDecoder().raw_decode


class StreamParser:
    """Parses one stream. Owner: the task of its request.

    Attributes:
        is_done: the engine reported the end.
        error: the engine's error in place of the rest; None = none."""

    __slots__ = (
        "_counts",
        "_cutter",
        "_is_each",
        "_is_usage_asked",
        "_is_usage_kept",
        "_seen",
        "error",
        "is_done",
    )

    def __init__(
        self, counts: TokenReservation, asked: OpenAIRequest, *, is_each: bool = True
    ) -> None:
        """`is_each`: the usage in each piece was requested of the server; else the one at the end,
        which may be in the last piece."""
        self._counts = counts
        self._cutter = SseSplitter()
        self._seen: dict[int, int] = {}
        self._is_usage_asked = asked.shows_usage
        self._is_usage_kept = asked.shows_each_usage
        self._is_each = is_each
        self.is_done = False
        self.error: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<StreamParser {sum(self._seen.values())} tokens{' done' if self.is_done else ''}>"

    @property
    def is_inside(self) -> bool:
        """Whether only a part of an event was passed on so far."""
        return self._cutter.is_inside

    def feed(self, data: bytes, now_ns: int) -> bytes:
        """Parse bytes and return what to send to the caller; b"" for nothing."""
        if b"\r" in data:  # a line's end: inside JSON it is escaped
            data = data.replace(b"\r", b"")
        events = self._cutter.feed(data)
        if not events:
            return b""
        if events.find(_END) == len(events) - len(_END):
            return self._event(events, now_ns)
        # `rest` is a part of an event that is too long to be buffered
        *whole, rest = events.split(_END)
        return b"".join(
            [self._event(event + _END, now_ns) for event in whole if event]
            + ([self._event(rest, now_ns)] if rest else [])
        )

    def end(self, status: int) -> tuple[int, bytes]:
        """Status of the stream, see `calls.call.ResponseFilter`."""
        if self.error is not None:
            return status_of(self.error), b""
        if not self.is_done:
            raise WorkerConnectionLost("the engine closed the stream before its end", sent=True)
        return status, b""

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of a collected stream, see `calls.call.ResponseFilter`."""
        status, _ = self.end(status)
        if self.error is not None:
            return status, json.dumps({"error": self.error}).encode()
        return status, body + DONE

    def _event(self, event: bytes, now_ns: int) -> bytes:
        if self.error is not None:
            return b""  # the caller already got the error
        data = _DATA.search(event)
        if data is None:
            return event
        if event.startswith(_DONE, data.end()):
            self.is_done = True
            return b""  # the end event is sent by us, after the cost is known
        if _ERROR.match(event, data.end()):
            self.error = _error_in(event[data.end() :])
            return b""
        text = event.decode("utf-8", "replace")
        at = _usage_at(text)
        if at < 0:
            self._count_pieces(text, now_ns)
            return event
        try:
            usage, end = _decode(text, _value_at(text, at))
        except (ValueError, RecursionError):
            return event
        is_usage = isinstance(usage, dict)
        is_last = is_usage and _NO_CHOICES.search(text) is not None
        if is_usage:
            self._count_usage(text, usage, now_ns, is_last=is_last)
            self._record_finish(text)
        else:  # null: it is in the last event
            self._count_pieces(text, now_ns)
        if self._is_usage_kept or (self._is_usage_asked and (is_last or not self._is_each)):
            return event
        return b"" if is_last else _cut(text, at, end).encode()

    def _count_usage(self, text: str, usage: dict[str, Any], now_ns: int, *, is_last: bool) -> None:
        prompt, completion, cached = tokens_of(usage)
        if is_last:
            self._counts.on_usage(prompt, completion, cached)
            return
        choice = int(found[1]) if (found := _INDEX.search(text)) else 0
        new = completion - self._seen.get(choice, 0)
        if new > 0:
            self._seen[choice] = completion
            self._counts.on_piece(now_ns, new)
        self._counts.on_usage(prompt, completion, cached, choice=choice)

    def _count_pieces(self, text: str, now_ns: int) -> None:
        """Count an engine without usage by pieces: a piece has at least one token."""
        is_opening = _ROLE.search(text) is not None and _GENERATED.search(text) is None
        if _CHOICES.search(text) and not is_opening and not _NOTHING.search(text):
            self._counts.on_piece(now_ns, 1)
        self._record_finish(text)

    def _record_finish(self, text: str) -> None:
        if found := _FINISH.search(text):
            self._counts.on_finish(found[1])


class BodyParser:
    """Parses an answer that is not a stream, once complete. The usage may be followed by the whole
    prompt, if the caller requested that."""

    __slots__ = ("_asked", "_counts", "_finish", "_served", "_tail", "_usage")
    is_inside: Final = False

    def __init__(self, counts: TokenReservation, asked: OpenAIRequest, served: str) -> None:
        """`served`: the engine's name of the model; "" = unknown."""
        self._counts = counts
        self._asked = asked
        self._served = served
        self._tail = self._usage = self._finish = b""

    def __repr__(self) -> str:
        return f"<BodyParser of {self._asked!r}>"

    def feed(self, data: bytes, now_ns: int) -> bytes:  # as the protocol says
        """Keep the end of the answer, see `calls.call.ResponseFilter`."""
        text = self._tail + data
        if (at := _last(text, _USAGE_SAID, _OBJECT)) >= 0:
            self._usage = text[at : at + USAGE_BYTES]
        if (at := _last(text, _FINISH_SAID, _TEXT)) >= 0:
            self._finish = text[at : at + USAGE_BYTES]
        self._tail = text[-USAGE_BYTES:]
        return data

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer, see `calls.call.ResponseFilter`."""
        if status >= 400:
            return status, as_error(body, status)
        read_whole(body, self._counts)
        if self._asked.model and self._served:
            body = renamed(body, served=self._served, model=self._asked.model)
        return status, body

    def end(self, status: int) -> tuple[int, bytes]:
        """Record the counts of an answer that was passed on without being collected."""
        read_whole(self._finish + self._usage, self._counts)
        return status, b""


def reading_of(
    asked: OpenAIRequest,
    counts: TokenReservation | None,
    answer: WorkerResponse,
    *,
    served: str = "",
    is_engine: bool = True,
) -> StreamParser | BodyParser:
    """The parser for an answer. `served`: the server's name of the model; `is_engine`: it is vLLM's
    own."""
    counts = counts or uncounted()
    if answer.header(b"content-type").startswith(_SSE):
        return StreamParser(counts, asked, is_each=is_engine)
    return BodyParser(counts, asked, served)


def uncounted(began_ns: int = 0) -> TokenReservation:
    """Receives the token counts of an answer that uses no tokens."""
    return TokenReservation(estimated_in=0, max_out=0, began_ns=began_ns)


def status_of(error: dict[str, Any]) -> int:
    """The status that corresponds to an engine's error within a stream."""
    code = error.get("code")
    return code if type(code) is int and 400 <= code < 600 else 500


def _usage_at(text: str) -> int:
    """Where the name of the usage begins; -1 = nowhere."""
    at = text.rfind(_USAGE)
    for _ in range(MAX_LOOKS):
        if at < 0 or _VALUE.match(text, at + len(_USAGE)):
            return at
        at = text.rfind(_USAGE, 0, at)
    return -1


def _value_at(text: str, at: int) -> int:
    """Where the value of the usage begins, whose name begins at `at`."""
    found = _VALUE.match(text, at + len(_USAGE))
    return found.end() if found is not None else at


def _cut(text: str, at: int, end: int) -> str:
    """The event without its member from `at` to `end`, and without the comma beside it."""
    before, after = text[:at].rstrip(), text[end:]
    if before.endswith(","):
        return before[:-1] + after
    return before + after.lstrip().removeprefix(",")


def _last(text: bytes, name: bytes, value: re.Pattern[bytes]) -> int:
    """Where the last member with this name and kind of value begins; -1 = nowhere."""
    at = text.rfind(name)
    for _ in range(MAX_LOOKS):
        if at < 0 or value.match(text, at + len(name)):
            return at
        at = text.rfind(name, 0, at)
    return -1


def _error_in(data: bytes) -> dict[str, Any]:
    try:
        error = json.loads(data)["error"]
    except (ValueError, RecursionError):
        error = None
    if isinstance(error, str):
        return {"message": error[:2000], "code": 500}
    return (
        error
        if isinstance(error, dict)
        else {"message": "the engine failed in the middle of its answer", "code": 500}
    )


def tokens_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of prompt and answer, and cached prompt tokens, of a usage object; 0 for missing
    ones."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return (
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(cached),
    )


def _count(value: Any) -> int:
    return min(value, MAX_TOKENS) if type(value) is int and value >= 0 else 0


def read_whole(body: bytes, counts: TokenReservation) -> None:
    """Record the counts and the finish reason of a whole answer, or of the end of one, if
    present."""
    if (at := _last(body, _USAGE_SAID, _OBJECT)) >= 0:
        text = body[at : at + USAGE_BYTES].decode("utf-8", "replace")
        try:
            usage, _ = _decode(text, _value_at(text, 0))
            counts.on_usage(*tokens_of(usage))
        except (ValueError, RecursionError):
            pass
    if (at := _last(body, _FINISH_SAID, _TEXT)) >= 0:
        text = body[at : at + USAGE_BYTES].decode("utf-8", "replace")
        if found := _FINISH.match(text):
            counts.on_finish(found[1])


def renamed(body: bytes, *, served: str, model: str) -> bytes:
    """Replace the model's name in a whole answer by the caller's; it precedes all generated
    text."""
    # ASCII: the caller's name may contain invalid text
    mine, theirs = json.dumps(model).encode(), json.dumps(served).encode()
    named = re.compile(rb'("model"\s*:\s*)' + re.escape(theirs))
    return named.sub(lambda found: found[1] + mine, body, count=1)


def as_error(body: bytes, status: int) -> bytes:
    """An engine's error in OpenAI's format, which most have already."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        return body
    message = (
        document.get("message") or document.get("detail")
        if isinstance(document, dict)
        else body[:500].decode("utf-8", "replace")
    )
    error = errors.InvalidInput if status < 500 else errors.WorkerCrashed
    return json.dumps(error_of(error(f"the engine answered {status}: {message}"))).encode()

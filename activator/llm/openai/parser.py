"""Parses an engine's answers: their token counts and finish reasons, and removes what was requested
for accounting only.

An engine reports its usage in each event of a stream, because that was requested
(`OpenAIRequest.written_for`). It is removed again unless the caller requested it. This costs a few
microseconds per event: only the usage itself is parsed, and found by text that cannot occur inside
a JSON string (where quotes are escaped). Unexpected content is passed on unchanged."""

from __future__ import annotations

import json
from typing import Any, Final

from activator.http.sse import SseSplitter
from activator.llm.openai.errors import error_of
from activator.llm.openai.request import OpenAIRequest
from activator.quotas.token_reservation import TokenReservation
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

USAGE_BYTES: Final = 4096
"""Upper limit of the size of a usage object or a finish reason; no more is kept of an answer that
is too long to be buffered."""
DONE: Final = b"data: [DONE]\n\n"
_DONE: Final = DONE.rstrip()
_SSE: Final = CONTENT_SSE.encode()
_ERROR: Final = b'data: {"error":'
_DATA: Final = b"data: {"
_END: Final = b"\n\n"
_USAGE: Final = ',"usage":'
_FINISH: Final = '"finish_reason":"'
_USAGE_OPENS: Final = b'"usage":{'
_FINISH_SAID: Final = _FINISH.encode()
_CHOICE: Final = '"choices":[{"index":'
_NO_CHOICES: Final = '"choices":[]'
_decode = json.JSONDecoder().raw_decode


class StreamParser:
    """Parses one stream. Owner: the task of its request.

    Attributes:
        is_done: the engine reported the end.
        error: the engine's error in place of the rest; None = none."""

    __slots__ = (
        "_counts",
        "_cutter",
        "_is_usage_asked",
        "_is_usage_kept",
        "_seen",
        "error",
        "is_done",
    )

    def __init__(self, counts: TokenReservation, asked: OpenAIRequest) -> None:
        self._counts = counts
        self._cutter = SseSplitter()
        self._seen: dict[int, int] = {}
        self._is_usage_asked = asked.shows_usage
        self._is_usage_kept = asked.shows_each_usage
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
        if event.startswith(_ERROR):
            self.error = _error_in(event)
            return b""
        if not event.startswith(_DATA):
            self.is_done = self.is_done or event.startswith(_DONE)
            # the end event is sent by us, after the cost is known
            return b"" if event.startswith(_DONE) else event
        text = event.decode("utf-8", "replace")
        at = text.rfind(_USAGE)
        if at < 0:
            self._counted_by_pieces(text, now_ns)
            return event
        try:
            usage, end = _decode(text, at + len(_USAGE))
        except ValueError:
            return event
        is_last = _NO_CHOICES in text
        if isinstance(usage, dict):
            self._counted(text, usage, now_ns, is_last=is_last)
        self._record_finish(text)
        if self._is_usage_kept or (is_last and self._is_usage_asked):
            return event
        return b"" if is_last else (text[:at] + text[end:]).encode()

    def _counted(self, text: str, usage: dict[str, Any], now_ns: int, *, is_last: bool) -> None:
        prompt, completion, cached = tokens_of(usage)
        if is_last:
            self._counts.on_usage(prompt, completion, cached)
            return
        choice = _choice_of(text)
        new = completion - self._seen.get(choice, 0)
        if new > 0:
            self._seen[choice] = completion
            self._counts.on_piece(now_ns, new)
        self._counts.on_usage(prompt, completion, cached, choice=choice)

    def _counted_by_pieces(self, text: str, now_ns: int) -> None:
        """Count an engine without usage by pieces: a piece has at least one token."""
        if _CHOICE in text and '"role":' not in text:
            self._counts.on_piece(now_ns, 1)
        self._record_finish(text)

    def _record_finish(self, text: str) -> None:
        if (at := text.find(_FINISH)) >= 0:
            at += len(_FINISH)
            self._counts.on_finish(text[at : text.find('"', at)])


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
        if (at := text.rfind(_USAGE_OPENS)) >= 0:
            self._usage = text[at : at + USAGE_BYTES]
        if (at := text.rfind(_FINISH_SAID)) >= 0:
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
) -> StreamParser | BodyParser:
    """The parser for an answer. `served`: the engine's name of the model."""
    counts = counts or uncounted()
    if answer.header(b"content-type").startswith(_SSE):
        return StreamParser(counts, asked)
    return BodyParser(counts, asked, served)


def uncounted(began_ns: int = 0) -> TokenReservation:
    """Receives the token counts of an answer that uses no tokens."""
    return TokenReservation(estimated_in=0, max_out=0, began_ns=began_ns)


def status_of(error: dict[str, Any]) -> int:
    """The status that corresponds to an engine's error within a stream."""
    code = error.get("code")
    return code if type(code) is int and 400 <= code < 600 else 500


def _choice_of(text: str) -> int:
    at = text.find(_CHOICE)
    if at < 0:
        return 0
    digits = text[at + len(_CHOICE) : at + len(_CHOICE) + 4].partition(",")[0]
    return int(digits) if digits.isdecimal() else 0


def _error_in(event: bytes) -> dict[str, Any]:
    try:
        error = json.loads(event[len(b"data: ") :])["error"]
    except ValueError:
        error = None
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
    return value if type(value) is int and value >= 0 else 0


def read_whole(body: bytes, counts: TokenReservation) -> None:
    """Record the counts and the finish reason of a whole answer, or of the end of one, if
    present."""
    text = body.decode("utf-8", "replace")
    if (at := text.rfind('"usage":{')) >= 0:
        try:
            usage, _ = _decode(text, at + len('"usage":'))
        except ValueError:
            usage = {}
        counts.on_usage(*tokens_of(usage))
    at = text.rfind(_FINISH)
    if at >= 0:
        at += len(_FINISH)
        counts.on_finish(text[at : text.find('"', at)])


def renamed(body: bytes, *, served: str, model: str) -> bytes:
    """Replace the model's name in a whole answer by the caller's; it precedes all generated
    text."""
    # ASCII: the caller's name may contain invalid text
    mine, theirs = json.dumps(model).encode(), json.dumps(served).encode()
    return body.replace(b'"model":' + theirs, b'"model":' + mine, 1)


def as_error(body: bytes, status: int) -> bytes:
    """An engine's error in OpenAI's format, which most have already."""
    try:
        document = json.loads(body)
    except ValueError:
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

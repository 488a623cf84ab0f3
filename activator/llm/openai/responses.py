"""The form of an engine's answers for their callers: OpenAI's bodies and events.

After the engine's last event comes `data: [DONE]`, where OpenAI's clients stop reading, and after
it our end event. A failed stream has an error in OpenAI's format in place of `[DONE]`, which their
clients raise."""

from __future__ import annotations

import json

from activator.calls.call import AnsweredCall, Call, ResponseFilter
from activator.calls.response import ResponseFormat, end_of
from activator.llm.openai.call import served_name
from activator.llm.openai.errors import error_event
from activator.llm.openai.parser import DONE, BodyParser, StreamParser, uncounted
from activator.llm.openai.request import OpenAIRequest
from activator.quotas.token_reservation import TokenReservation
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

_SSE = CONTENT_SSE.encode()


class OpenAIFormat(ResponseFormat):
    """The form of one answer. Owner: the task of its request."""

    def __init__(self, asked: OpenAIRequest, use: TokenReservation) -> None:
        self._asked = asked
        self._use = use
        self._reading: StreamParser | None = None

    def __repr__(self) -> str:
        return f"<OpenAIFormat of {self._asked!r}>"

    def accepts_events(self, call: Call) -> bool:
        """The body asks for a stream."""
        return self._asked.is_stream

    def requires_events(self, call: Call) -> bool:
        """A stream begins before the engine answers."""
        return True

    def is_events(self, answer: WorkerResponse) -> bool:
        """A whole answer (a declared fallback) is sent as a stream, a refusal as it is."""
        if answer.body is None:
            return answer.header(b"content-type").startswith(_SSE)
        return answer.status < 400

    def filter(self, attempt: AnsweredCall, *, is_events: bool) -> ResponseFilter:
        """Count the tokens, and remove what was requested for accounting only. An answer that did
        not come from an engine uses no tokens."""
        if attempt.answer.body is not None:
            use = self._use if attempt.held is not None else uncounted()
            return BodyParser(use, self._asked, served_name(self._asked, attempt.call.target))
        if not is_events:
            return BodyParser(self._use, self._asked, "")
        is_engine = attempt.call.target.spec.engine is not None
        self._reading = StreamParser(self._use, self._asked, is_each=is_engine)
        return self._reading

    def as_events(self, answer: WorkerResponse, body: bytes) -> bytes:
        """A whole answer is a single chunk; an error is already in OpenAI's format."""
        return b"data: %b\n\n" % (as_chunk(body) if answer.status < 400 else body)

    def error(self, error: errors.PilotlightError, request_id: str) -> bytes:
        """An error that ends the stream in place of the engine's own."""
        self._reading = None
        return error_event(error)

    def end(self, attempt: AnsweredCall | None, finish: str) -> bytes:
        """`[DONE]` or the engine's error, then the finish reason, usage and cost."""
        if attempt is None:
            return end_of(None, finish)
        use, last = self._use, b""
        if finish == "stop":
            last, finish = DONE, use.finish or finish
        elif self._reading is not None and self._reading.error is not None:
            last = b"data: %b\n\n" % json.dumps({"error": self._reading.error}).encode()
        return last + end_of(
            attempt,
            finish,
            tokens_in=use.tokens_in,
            tokens_out=use.tokens_out,
            tokens_cached=use.tokens_cached,
        )

    def rest(self, attempt: AnsweredCall) -> bytes:
        """Nothing follows a body."""
        return b""


def as_chunk(body: bytes) -> bytes:
    """Convert a whole answer to a single chunk of a stream."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body
    choices = (
        document.get("choices")
        if isinstance(document, dict) and document.get("object") == "chat.completion"
        else None
    )
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return body
    choices = [
        {**{k: v for k, v in choice.items() if k != "message"}, "delta": choice.get("message")}
        for choice in choices
    ]
    return json.dumps({**document, "object": "chat.completion.chunk", "choices": choices}).encode()

"""Server-sent events as they are read (WHATWG HTML §9.2), and what the stream of a submitted call
means. No I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pilotlight.client.errors import error_from_problem, remote_exception
from pilotlight.client.responses import decode_result, parse_record_result
from pilotlight.errors import ClientClosedRequest, PilotlightError, RemoteError
from pilotlight.protocol import CONTENT_PICKLE, CallRecord

_DONE = "[DONE]"
"""What OpenAI's streams have where others have an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSentEvent:
    """One event. `name` "" = it has none; `id` is the last one that the stream gave, of this event
    or of one before."""

    name: str
    data: str
    id: str


class SseParser:
    """Cuts bytes into events. Fed as they come; owned by one stream."""

    def __init__(self, last_id: str = "") -> None:
        self._begun: list[bytes] = []
        self._name = ""
        self._data: list[str] = []
        self._id = last_id

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """The events that `data` completes. An event that the stream ends within is none."""
        self._begun.append(data)
        if b"\n" not in data:
            return
        *whole, begun = b"".join(self._begun).split(b"\n")
        self._begun = [begun] if begun else []
        for line in whole:
            yield from self._line(line.removesuffix(b"\r").decode(errors="replace"))

    def _line(self, line: str) -> Iterator[ServerSentEvent]:
        if not line:
            name, data = self._name, self._data
            self._name, self._data = "", []
            if data:
                yield ServerSentEvent(name=name, data="\n".join(data), id=self._id)
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._id = value


class CallStreamItems:
    """What a submitted call has made, from the events of its stream. Owned by one reader. `pickles`
    False: the call was sent as JSON.

    Attributes:
        after: id of the last item that was read: where a stream that broke off goes on.
        is_over: the call has ended, and all was read.
    """

    def __init__(self, call_id: str, after: str = "", *, pickles: bool = True) -> None:
        self._pickles = pickles
        self._call_id = call_id
        self._failure: BaseException | None = None
        self.after = after
        self.is_over = False

    def of(self, event: ServerSentEvent) -> Iterator[Any]:
        """The item of an event, if it is one. Raises what the call raised, at its end;
        ClientClosedRequest where it was cancelled."""
        self.after = event.id
        if event.name == "":
            if event.data != _DONE:
                yield json.loads(event.data)
        elif event.name == "pickle":
            yield decode_result(CONTENT_PICKLE, base64.b64decode(event.data), pickles=self._pickles)
        elif event.name == "exception" and not self._pickles:
            self._failure = RemoteError(
                "the function raised a pickled exception, which the call did not ask for: it is "
                "not opened"
            )
        elif event.name == "exception":
            self._failure = remote_exception(base64.b64decode(event.data))
        elif event.name == "error":
            self._failure = error_from_problem(json.loads(event.data))
        elif event.name == "state":
            self._failure = None  # of an attempt that is made again
        elif event.name == "result":
            yield parse_record_result(
                CallRecord.from_json(json.loads(event.data)), pickles=self._pickles
            )
        elif event.name == "end":
            self._end(str(json.loads(event.data)["finish_reason"]))

    def _end(self, finish_reason: str) -> None:
        self.is_over = True
        if finish_reason == "cancelled":
            raise ClientClosedRequest(f"call {self._call_id} was cancelled")
        if finish_reason == "stop" and self._failure is None:
            return
        raise self._failure or PilotlightError(f"call {self._call_id} ended: {finish_reason}")

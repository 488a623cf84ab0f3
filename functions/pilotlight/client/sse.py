"""Parser of server-sent events (WHATWG HTML §9.2), and interpretation of the stream of a background
call. No I/O."""

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
"""The data that ends streams of the OpenAI protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSentEvent:
    """One event. `name` is "" if absent; `id` is the last id in the stream, of this event or an
    earlier one."""

    name: str
    data: str
    id: str


class SseParser:
    """An incremental parser of events, for one stream."""

    def __init__(self, last_id: str = "") -> None:
        self._begun: list[bytes] = []
        self._name = ""
        self._data: list[str] = []
        self._id = last_id

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events completed by `data`. An incomplete event at the end is discarded."""
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
    """Converts the events of the stream of a background call to items, for one reader. `pickles` is
    False if the call was sent as JSON.

    Attributes:
        after: id of the last item read, from which a broken stream is resumed.
        is_over: the call has ended and everything was read."""

    def __init__(self, call_id: str, after: str = "", *, pickles: bool = True) -> None:
        self._pickles = pickles
        self._call_id = call_id
        self._failure: BaseException | None = None
        self.after = after
        self.is_over = False

    def of(self, event: ServerSentEvent) -> Iterator[Any]:
        """Yield the item of an event, if it has one. At the end, raises the exception of the call;
        ClientClosedRequest if it was cancelled."""
        self.after = event.id
        if event.name == "":
            if event.data != _DONE:
                yield json.loads(event.data)
        elif event.name == "pickle":
            yield decode_result(CONTENT_PICKLE, base64.b64decode(event.data), pickles=self._pickles)
        elif event.name == "exception" and not self._pickles:
            self._failure = RemoteError(
                "the function raised a pickled exception, which the call did not accept: it was "
                "not opened"
            )
        elif event.name == "exception":
            self._failure = remote_exception(base64.b64decode(event.data))
        elif event.name == "error":
            self._failure = error_from_problem(json.loads(event.data))
        elif event.name == "state":
            self._failure = None  # that of an attempt that is retried
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

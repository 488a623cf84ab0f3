"""A call of an engine by its own API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from activator.calls.call import Call, ResponseFilter
from activator.http.payloads import Payload
from activator.llm.openai.errors import ModelNotFound
from activator.llm.openai.parser import reading_of
from activator.llm.openai.request import PATHS, OpenAIRequest, parsed
from activator.llm.request_size import CHAT, EMBEDDINGS, write_cap
from activator.llm.token_admission import restore_reservation
from activator.quotas.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.protocol import WORKER_ASGI


class EngineCall(Call):
    """A call of an engine through its own API.

    Attributes:
        wanted: the request to the model.
        is_kept: it was submitted, and runs until its end, which is also that of its `tokens`.
        is_wrapped: its body in the journal is that of a schedule, `{"path", "body"}`."""

    __slots__ = ("affinity", "is_kept", "is_wrapped", "tokens", "wanted")

    def __init__(
        self,
        wanted: OpenAIRequest,
        *,
        tokens: TokenReservation | None,
        affinity: int | None = None,
        accept: bytes = b"",
        **call: Any,
    ) -> None:
        """`call`: arguments of Call, without its payload. Raises InvalidInput."""
        payload = Payload(wanted.written_for(call["target"]), accept=accept)
        super().__init__(payload=payload, **call)
        self.wanted = wanted
        self.tokens: TokenReservation | None = tokens
        self.affinity: int | None = affinity
        self.is_kept = False
        self.is_wrapped = False

    @property
    def is_cacheable(self) -> bool:
        """Whether an equal call may get its answer: embeddings, and text at temperature 0 that is
        not streamed."""
        wanted = self.wanted
        if wanted.path == EMBEDDINGS:
            return True
        return wanted.counts and not wanted.is_stream and wanted.body.get("temperature") == 0

    @property
    def place(self) -> str:
        """Path of the engine's API."""
        return self.wanted.path

    @property
    def caller_arguments(self) -> bytes:
        """The body as the caller sent it."""
        return self.wanted.said or self.body

    def body_for(self, target: CallTarget) -> bytes:
        """The body for an engine. Raises ModelNotFound, InvalidInput."""
        return self.wanted.written_for(target)

    def reading(self, answer: WorkerResponse) -> ResponseFilter:
        """The parser of an answer."""
        return reading_of(
            self.wanted,
            self.tokens,
            answer,
            served=served_name(self.wanted, self.target),
            is_engine=self.target.spec.engine is not None,
        )

    def park(self) -> None:
        """Drop the body from memory. The size is then not learned, because that needs the
        prompt."""
        super().park()
        self.wanted.body, self.wanted.said = {}, b""
        if self.tokens is not None:
            self.tokens.drop_prompt()

    def load(self, body: bytes) -> None:
        """Restore the body from the journal."""
        if self.is_wrapped:
            self.wanted.body = parsed(body)["body"]
            if self.tokens is not None:
                is_engine = self.target.spec.engine is not None
                write_cap(self.wanted.path, self.wanted.body, self.tokens.cap, is_engine=is_engine)
            super().load(self.wanted.written_for(self.target))
        else:
            super().load(body)
            self.wanted.body = parsed(body)

    def kept(self) -> dict[str, Any]:
        """What is stored in addition to an ordinary call to recreate it (`call_of_kept`)."""
        wanted = self.wanted
        # the written body always requests both, for accounting
        shows = [wanted.shows_usage, wanted.shows_each_usage]
        return {
            "path": wanted.path,
            "adapter": wanted.adapter,
            "model": wanted.model,
            "shows_usage": shows,
        }

    def request_head(self, execution_s: float) -> bytes:
        """The request to the server, up to its body. An engine's log and ours use the same call
        id; there are other servers that answer 400 to a request id that is no UUID."""
        name = self.id.encode()
        is_engine = self.target.spec.engine is not None
        return b"".join(
            (
                b"POST ",
                b"" if is_engine else WORKER_ASGI.encode(),
                self.wanted.path.encode(),
                b" HTTP/1.1\r\nhost: ",
                b"engine\r\nx-request-id: " + name if is_engine else b"localhost",
                b"\r\npilotlight-call: ",
                name,
                b"\r\ncontent-type: ",
                self.content_type,
                self.extra_headers,
                self.trace_lines(),
                b"\r\ncontent-length: ",
                b"%d" % len(self.body),
                b"\r\n\r\n",
            )
        )


@contextmanager
def release_unless_stored(call: Call) -> Iterator[None]:
    """Release the quotas of a submitted call unless it will be run; a repeated submission is not
    run."""
    try:
        yield
    finally:
        if isinstance(call, EngineCall) and not call.is_kept and call.tokens is not None:
            call.tokens.settle()


def call_of_kept(
    kept: Mapping[str, Any], payload: Payload, target: CallTarget, **call: Any
) -> EngineCall:
    """Recreate a submitted call from a journal.

    Its body is one that was or would be sent to an engine; or, for a schedule, `{"path", "body"}`.
    Raises InvalidInput, ModelNotFound."""
    if "path" in kept:
        wanted = OpenAIRequest(kept["path"], parsed(payload.body))
        wanted.adapter, wanted.model = kept["adapter"], kept["model"]
        wanted.shows_usage, wanted.shows_each_usage = kept["shows_usage"]
    else:
        wanted = wrapped(payload.body, target)
    tokens = restore_reservation(target, wanted.path, wanted.body, began_ns=time.monotonic_ns())
    made = EngineCall(wanted, tokens=tokens, accept=payload.accept, target=target, **call)
    made.is_wrapped = "path" not in kept
    return made


def wrapped(data: bytes, target: CallTarget) -> OpenAIRequest:
    """Parse `{"path", "body"}` into a request to an engine, by the names of its adapters. Raises
    InvalidInput, ModelNotFound."""
    given = parsed(data)
    path, body = given.get("path"), given.get("body")
    if path not in PATHS or not isinstance(body, dict) or set(given) != {"path", "body"}:
        hint = (
            f'write {{"path": "{CHAT}", "body": {{…}}}}; valid paths are {", ".join(sorted(PATHS))}'
        )
        raise errors.InvalidInput(
            f"{target.app}/{target.function} is a language model: {hint}", parameter="path"
        )
    asked = OpenAIRequest(path, body)
    asked.adapter = adapter_of(asked.model, target)
    return asked


def served_name(wanted: OpenAIRequest, target: CallTarget) -> str:
    """The name that the server of a function knows the requested model by; "" if it is no language
    model."""
    model = target.spec.language_model
    return wanted.adapter or (model.served if model is not None else "")


def adapter_of(model: str, target: CallTarget) -> str:
    """The adapter that `model` names if the function is known: "" for the function's own names, or
    for none. Raises ModelNotFound."""
    place, _, adapter = model.partition(":")
    if place.partition("@")[0] in ("", target.function, f"{target.app}/{target.function}"):
        return adapter
    found = target.spec.language_model
    others = found.others if found is not None else ()
    if model in others:
        return model
    there = ", ".join((target.function, *others))
    raise ModelNotFound(f"no model {model[:80]!r}: available are {there}", parameter="model")

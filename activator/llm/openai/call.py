"""A call of an engine by its own API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from activator.calls.call import Call, Reading
from activator.llm.openai.errors import ModelNotFound
from activator.llm.openai.parser import reading_of
from activator.llm.openai.request import PATHS, OpenAIRequest, parsed
from activator.llm.request_size import CHAT
from activator.llm.token_admission import use_of_kept
from activator.llm.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from activator.tracing.context import worker_lines
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors


class EngineCall(Call):
    """See the module.

    Attributes:
        wanted: what its caller asks of the model.
        is_kept: it was submitted, and is run until its end, which is that of its `tokens`, too.
    """

    __slots__ = ("affinity", "is_kept", "tokens", "wanted")

    def __init__(
        self,
        wanted: OpenAIRequest,
        *,
        tokens: TokenReservation | None,
        affinity: int | None = None,
        **call: Any,
    ) -> None:
        """`call`: as of any Call, but for its body. Raises InvalidInput."""
        super().__init__(body=wanted.written_for(call["target"]), **call)
        self.wanted = wanted
        self.tokens: TokenReservation | None = tokens
        self.affinity: int | None = affinity
        self.is_kept = False

    @property
    def place(self) -> str:
        """See Call."""
        return self.wanted.path

    @property
    def caller_arguments(self) -> bytes:
        """See Call."""
        return self.wanted.said or self.body

    def body_for(self, target: CallTarget) -> bytes:
        """See Call. Raises ModelNotFound, InvalidInput."""
        return self.wanted.written_for(target)

    def reading(self, answer: WorkerResponse) -> Reading:
        """See Call."""
        return reading_of(
            self.wanted, self.tokens, answer, served=self.wanted.adapter or self.target.spec.name
        )

    def park(self) -> None:
        """See Call. What is learned of its size is left out then: that needs the prompt."""
        super().park()
        self.wanted.body, self.wanted.said = {}, b""
        if self.tokens is not None:
            self.tokens.forget_prompt()

    def load(self, body: bytes) -> None:
        """See Call."""
        super().load(body)
        self.wanted.body = parsed(body)

    def kept(self) -> dict[str, Any]:
        """What it needs beside an ordinary call's to be made again (`call_of_kept`)."""
        wanted = self.wanted
        # its body asks for both, on our behalf
        shows = [wanted.shows_usage, wanted.shows_each_usage]
        return {
            "path": wanted.path,
            "adapter": wanted.adapter,
            "model": wanted.model,
            "shows_usage": shows,
        }

    def request_head(self, execution_s: float) -> bytes:
        """The request to the engine, up to its body; its log and ours call it by one name."""
        name = self.id.encode()
        return b"".join(
            (
                b"POST ",
                self.wanted.path.encode(),
                b" HTTP/1.1\r\nhost: engine\r\nx-request-id: ",
                name,
                b"\r\npilotlight-call: ",
                name,
                b"\r\ncontent-type: ",
                self.content_type,
                self.extra_headers,
                worker_lines(self),
                b"\r\ncontent-length: ",
                b"%d" % len(self.body),
                b"\r\n\r\n",
            )
        )


@contextmanager
def kept_or_left(call: Call) -> Iterator[None]:
    """Of a call that is submitted: what it holds of its quotas is given back unless somebody runs
    it; a repeat of one is not run."""
    try:
        yield
    finally:
        if isinstance(call, EngineCall) and not call.is_kept and call.tokens is not None:
            call.tokens.leave()


def call_of_kept(
    kept: Mapping[str, Any], body: bytes, target: CallTarget, **call: Any
) -> EngineCall:
    """A submitted call from a journal.

    Its body is one that went, or was to go, to an engine; or, of a schedule, `{"path", "body"}`.
    Raises InvalidInput, ModelNotFound."""
    if "path" in kept:
        wanted = OpenAIRequest(kept["path"], parsed(body))
        wanted.adapter, wanted.model = kept["adapter"], kept["model"]
        wanted.shows_usage, wanted.shows_each_usage = kept["shows_usage"]
    else:
        wanted = wrapped(body, target)
    tokens = use_of_kept(target, wanted.path, wanted.body, began_ns=time.monotonic_ns())
    return EngineCall(wanted, tokens=tokens, target=target, **call)


def wrapped(data: bytes, target: CallTarget) -> OpenAIRequest:
    """What `{"path", "body"}` asks of an engine, by the names of its adapters. Raises InvalidInput,
    ModelNotFound."""
    given = parsed(data)
    path, body = given.get("path"), given.get("body")
    if path not in PATHS or not isinstance(body, dict) or set(given) != {"path", "body"}:
        hint = f'write {{"path": "{CHAT}", "body": {{…}}}}; paths are {", ".join(sorted(PATHS))}'
        raise errors.InvalidInput(
            f"{target.app}/{target.function} is a language model: {hint}", parameter="path"
        )
    asked = OpenAIRequest(path, body)
    asked.adapter = adapter_of(asked.model, target)
    return asked


def adapter_of(model: str, target: CallTarget) -> str:
    """The adapter that `model` names where the function is known: "" for its own names, or for
    none. Raises ModelNotFound."""
    place, _, adapter = model.partition(":")
    if place.partition("@")[0] in ("", target.function, f"{target.app}/{target.function}"):
        return adapter
    lora = target.spec.engine.lora if target.spec.engine is not None else {}
    if model in lora:
        return model
    there = ", ".join((target.function, *sorted(lora)))
    raise ModelNotFound(f"no model {model[:80]!r}: there are {there}", parameter="model")

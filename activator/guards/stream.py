"""The check of a streamed answer: pieces are held back while their text could still
become something that is refused, so that nothing of it is sent.

A piece is passed on as it came, or not at all. Each text of each choice (its content, reasoning,
arguments of tools, …) is followed by itself, over the pieces that it is split into. Patterns hold
back what may be the beginning of a match; expressions and the guard's function a window. A refusal
ends the whole answer: what is held is dropped, and a last piece says `content_filter`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from activator.guards.checks import TextCheck
from activator.guards.texts import Path, answer_texts
from activator.llm.openai.parser import tokens_of
from activator.quotas.token_reservation import TokenReservation
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.core.yield_budget import YieldBudget
from pilotlight.validation.json_size import require_few_values

REFUSED: Final = "content_filter"
"""Finish reason of what a guard refused, as of OpenAI's API."""
TOO_LONG: Final = "too-long"
"""The rule of an answer that exceeds one of the limits below: it would be sent unchecked."""
MAX_EVENT_BYTES: Final = 256 * 1024
"""Longest event: a thousand times that of one token."""
MAX_EVENT_VALUES: Final = 20_000
"""Most JSON values of an event (`json_size`): a few milliseconds."""
MAX_HELD_BYTES: Final = 4 * 2**20
"""Longest sum of the events that are held back."""
MAX_TEXTS: Final = 1024
"""Most texts of one answer: 128 choices with eight each."""
_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_RAW: Final = ""
"""Where the text of events that are no JSON is."""


class _Text:
    """One text of the answer.

    Attributes:
        tail: its last characters, of which some were passed on; `end`: its length so far.
        safe: characters that may be passed on.
        allowed: characters that the guard's function has allowed."""

    __slots__ = ("allowed", "end", "safe", "tail")

    def __init__(self) -> None:
        self.tail = ""
        self.end = self.safe = self.allowed = 0

    def add(self, text: str) -> int:
        """Append a piece. Returns the new length."""
        self.tail += text
        self.end += len(text)
        return self.end

    def since(self, start: int, context: int) -> str:
        """Return the text from `start` on, with up to `context` characters before it."""
        return self.tail[max(0, len(self.tail) - (self.end - start) - context) :]

    def trim(self, context: int) -> None:
        """Drop what is neither held back nor context of it."""
        kept = self.end - min(self.safe, self.allowed) + context
        if len(self.tail) > 2 * kept:
            self.tail = self.tail[-kept:]


class _Event:
    """An event that is held back, and which text it has up to which length.

    Attributes:
        ends: the choices that it ends.
        tokens: the pieces of text in it, where it has no usage."""

    __slots__ = ("data", "ends", "parts", "tokens")

    def __init__(
        self, data: bytes, parts: list[tuple[_Text, int]], ends: list[int], tokens: int
    ) -> None:
        self.data = data
        self.parts = parts
        self.ends = ends
        self.tokens = tokens

    @property
    def is_safe(self) -> bool:
        """Whether all of its text may be passed on."""
        return all(end <= text.safe for text, end in self.parts)


class GuardedStream:
    """One streamed answer. Owner: the task of its call.

    Attributes:
        rule: the rule by which it was refused; "" = it was not."""

    def __init__(self, check: TextCheck, tokens: TokenReservation | None) -> None:
        self._check = check
        self._tokens = tokens
        self._partial = b""
        self._held: deque[_Event] = deque()
        self._held_bytes = 0
        self._texts: dict[Path, _Text] = {}
        self._changed: dict[Path, _Text] = {}
        self._choices: dict[int, bool] = {}
        self._finished: set[int] = set()
        self._usage: dict[int, dict[str, Any]] = {}
        self._total: dict[str, Any] | None = None
        self._head: Mapping[str, Any] = {}
        self._is_counted = self._is_too_long = False
        self._turns = YieldBudget()
        self.rule = ""

    def __repr__(self) -> str:
        return f"<GuardedStream {len(self._held)} events held{' refused' if self.rule else ''}>"

    async def feed(self, data: bytes) -> bytes:
        """Take bytes of the server, and return what may be passed on; once `rule` is set, the end
        of the answer."""
        self._partial += data.replace(b"\r", b"")
        *events, self._partial = self._partial.split(_END)
        if len(self._partial) > MAX_EVENT_BYTES:
            return self._refuse(TOO_LONG)
        out: list[bytes] = []
        for event in events:
            await self._turns.handled(event)
            is_done = self._add_event(event + _END)
            if len(self._texts) > MAX_TEXTS or self._is_too_long:
                out.append(self._refuse(TOO_LONG))
            else:
                out.append(await self._release(is_end=is_done))
            if self.rule:
                break
        return b"".join(out)

    async def end(self) -> bytes:
        """Return the rest, once the server has ended the answer."""
        if self._partial:
            self._add_event(self._partial)
            self._partial = b""
        return await self._release(is_end=True)

    def _add_event(self, event: bytes) -> bool:
        """Buffer an event. Returns whether it is the last one."""
        parts: list[tuple[_Text, int]] = []
        data = b"\n".join(
            line[len(_DATA) :].lstrip(b" ") for line in event.split(b"\n") if line.startswith(_DATA)
        )
        if data.startswith(_DONE):
            self._buffer(_Event(event, [], [], 0))
            return True
        ends: list[int] = []
        has_usage = False
        if data:
            document = self._parsed(data)
            if isinstance(document, dict):
                ends, has_usage = self._record_choices(document), self._record_usage(document)
            for path, text in answer_texts(document):
                known = self._changed[path] = self._texts.setdefault(path, _Text())
                parts.append((known, known.add(text)))
        self._buffer(_Event(event, parts, ends, int(bool(parts) and not has_usage)))
        return False

    def _buffer(self, event: _Event) -> None:
        self._held.append(event)
        self._held_bytes += len(event.data)

    def _parsed(self, data: bytes) -> Any:
        try:
            require_few_values(data, MAX_EVENT_VALUES, "")
            return json.loads(data)
        except errors.TooLarge:
            self._is_too_long = True
            return None
        except (ValueError, RecursionError):
            return {_RAW: data.decode("utf-8", "replace")}

    def _record_choices(self, document: Mapping[str, Any]) -> list[int]:
        """Record which choices there are. Returns those that end."""
        ends = []
        choices = document.get("choices")
        for at, choice in enumerate(choices if isinstance(choices, list) else ()):
            if not isinstance(choice, dict):
                continue
            self._head = document
            number = choice["index"] if type(choice.get("index")) is int else at
            if choice.get("finish_reason") is None:
                self._choices.setdefault(number, False)
                continue
            ends.append(number)
            self._choices[number] = True
            of_it = ("choices", number)
            self._changed.update(
                (path, text) for path, text in self._texts.items() if path[:2] == of_it
            )
        return ends

    def _record_usage(self, document: Mapping[str, Any]) -> bool:
        """Record the usage, of one choice so far or of the whole answer, for the last piece.
        Returns whether there is one."""
        usage, choices = document.get("usage"), document.get("choices")
        if not isinstance(usage, dict):
            return False
        if not choices or not isinstance(choices, list):
            self._total = usage
        elif isinstance(choices[0], dict):
            number = choices[0].get("index")
            self._usage[number if type(number) is int else 0] = usage
        return True

    def count(self) -> None:
        """Count the usage of what has arrived, passed on or not: should its caller leave now, it
        is billed."""
        if self._tokens is None:
            return
        if self._total is not None:
            self._tokens.on_usage(*tokens_of(self._total))
            return
        for number, usage in self._usage.items():
            self._tokens.on_usage(*tokens_of(usage), choice=number)

    # -- what may be passed on ---------------------------------------------------------------------
    async def _release(self, *, is_end: bool) -> bytes:
        if self.rule:
            return b""
        changed, self._changed = self._texts if is_end else self._changed, {}
        for path, text in changed.items():
            if rule := await self._check_text(text, is_ended=is_end or self._is_ended(path)):
                return self._refuse(rule)
        out: list[bytes] = []
        while self._held and self._held[0].is_safe:
            event = self._held.popleft()
            self._held_bytes -= len(event.data)
            self._finished.update(event.ends)
            out.append(event.data)
        if self._held_bytes > MAX_HELD_BYTES:
            return self._refuse(TOO_LONG)
        if is_end and not self._is_counted:
            self._is_counted = True
            self._check.record_decision("")
        return b"".join(out)

    def _is_ended(self, path: Path) -> bool:
        """Whether the choice of a text has ended."""
        is_of_choice = len(path) > 1 and path[0] == "choices" and isinstance(path[1], int)
        return is_of_choice and self._choices.get(int(path[1]), False)

    async def _check_text(self, text: _Text, *, is_ended: bool) -> str:
        """Check a text as far as it is known. Returns the rule that refuses it."""
        check, patterns = self._check, self._check.patterns
        known = text.since(min(text.safe, text.allowed), patterns.context_chars)
        if rule := await check.apply_failure_policy(check.match_patterns(known, is_end=is_ended)):
            return rule
        safe = text.end - (0 if is_ended else patterns.hold(known))
        if check.spec.function:
            window = check.spec.window_chars
            if text.end - text.allowed >= window or (is_ended and text.end > text.allowed):
                if rule := await check.apply_failure_policy(
                    check.call_function(text.since(text.allowed, window))
                ):
                    return rule
                text.allowed = text.end
            safe = min(safe, text.allowed)
        else:
            text.allowed = text.end
        text.safe = max(text.safe, safe)
        text.trim(patterns.context_chars)
        return ""

    # -- refusals ----------------------------------------------------------------------------------
    def _refuse(self, rule: str) -> bytes:
        self.rule = rule
        self._check.record_decision(rule)
        if self._tokens is not None and not self._usage and self._total is None:
            for _ in range(sum(event.tokens for event in self._held)):
                self._tokens.on_piece(time.monotonic_ns())
        self._held.clear()
        self._texts.clear()
        return b"".join(self._closing_events())

    def _closing_events(self) -> Iterator[bytes]:
        """The end of a refused answer: of each choice that had not ended, and the usage."""
        head = {
            name: value
            for name, value in self._head.items()
            if name in ("id", "object", "created", "model", "system_fingerprint")
        }
        is_chat = head.get("object") != "text_completion"
        left = sorted(self._choices.keys() - self._finished)
        choices: list[dict[str, Any]] = [
            {
                "index": number,
                **({"delta": {}} if is_chat else {"text": ""}),
                "logprobs": None,
                "finish_reason": REFUSED,
            }
            for number in left or [0]
        ]
        yield _event({**head, "choices": choices})
        if self._usage or self._total is not None:
            usage = self._total if self._total is not None else _sum(self._usage)
            yield _event({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(document, separators=(",", ":")).encode()


def _sum(usage: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The usage of all choices: each has its own completion, and they share the prompt."""
    *_, last = usage.values()
    counts = [one.get("completion_tokens") for one in usage.values()]
    completion = sum(count for count in counts if type(count) is int)
    prompt = last.get("prompt_tokens")
    total = completion + (prompt if type(prompt) is int else 0)
    return {**last, "completion_tokens": completion, "total_tokens": total}


class GuardedResponse(WorkerResponse):
    """A server's response whose stream passes a guard."""

    __slots__ = ("_answer", "_stop", "_stream")

    def __init__(
        self, answer: WorkerResponse, stream: GuardedStream, stop: Callable[[], None]
    ) -> None:
        """`stop`: ends the server's work on an answer that was refused."""
        super().__init__(None, answer.status, answer.headers, None, answer.head)
        self._answer = answer
        self._stream = stream
        self._stop = stop

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what passes. Raises WorkerConnectionLost when the worker dies before its end."""
        chunks = self._answer.chunks()
        assert isinstance(chunks, AsyncGenerator)
        async with aclosing(chunks):
            async for chunk in chunks:
                passed = await self._stream.feed(chunk)
                if self._stream.rule:
                    self._stop()
                if passed:
                    yield passed
                if self._stream.rule:
                    return
                self._stream.count()
        if passed := await self._stream.end():
            yield passed

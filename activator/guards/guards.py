"""Checks calls of functions with a guard: prompts before anything is started for them, and answers
before their callers get them.

`calls.runner` uses it for every call of a function with a guard, whichever way it came: OpenAI's
API, `:invoke`, submitted calls and schedules. Other ways to the server of such a function are
closed (`llm.openai.api.require_uncounted`)."""

from __future__ import annotations

import json
from typing import Any, Final

from activator.calls.attempt import Attempt
from activator.calls.call import AnsweredCall, Call
from activator.calls.fallback_rules import Unchecked
from activator.guards.checks import (
    FAILED,
    INPUT,
    OUTPUT,
    CheckTerms,
    TextCheck,
)
from activator.guards.stream import REFUSED, GuardedResponse, GuardedStream
from activator.guards.texts import (
    SEPARATOR,
    answer_texts,
    request_text,
    require_text_answers,
)
from activator.llm.openai.call import EngineCall
from activator.llm.request_size import CHAT, COMPLETIONS
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.core.yield_budget import YieldBudget
from pilotlight.protocol import CONTENT_SSE
from pilotlight.validation.json_size import require_few_values

MAX_ANSWER_BYTES: Final = 2 * 2**20
"""Longest whole answer that is checked."""
MAX_ANSWER_VALUES: Final = 100_000
"""Most JSON values of a whole answer (`json_size`): some 20 ms."""
_HINT: Final = "ask for a stream, or for less"
RETRY_S = 1.0
GENERATED: Final = frozenset({CHAT, COMPLETIONS})
"""Paths whose answers a model writes."""
_SSE: Final = CONTENT_SSE.encode()


class ContentRefused(errors.InvalidInput):
    """Raised when a guard refuses a prompt; `detail` has the `rule`. OpenAI's and Azure's API have
    this code."""

    type = REFUSED


class Guards:
    """Checks calls (`calls.runner.CallGuard`). Owner: the event loop."""

    def __init__(self, terms: CheckTerms) -> None:
        self._terms = terms

    def __repr__(self) -> str:
        return f"<Guards {'open' if self._terms.is_open else 'closed'} where checks fail>"

    async def check_prompt(self, call: Call) -> None:
        """Check what a call asks for. Raises ContentRefused; InvalidInput for what cannot be read;
        Unchecked where the check failed."""
        spec = call.target.spec.guard
        if not isinstance(call, EngineCall):
            raise errors.InvalidInput(
                f"{call.target.app}/{call.target.function} has a guard, which reads requests in "
                f"OpenAI's format: call it at {CHAT}"
            )
        if spec is not None and spec.output:
            require_text_answers(call.wanted.body)
        if spec is None or not spec.input:
            return
        text = request_text(call.wanted.body)
        rule = await TextCheck(self._terms, call, spec, INPUT).find_refusal(text)
        if rule == FAILED:
            raise Unchecked(
                "the guard of this model could not check the prompt, and what is unchecked is "
                "refused: try again",
                retry_after_s=RETRY_S,
            )
        if rule:
            raise ContentRefused(
                f"the prompt was refused by rule {rule!r} of this model's guard", rule=rule
            )

    async def check_answer(self, call: Call, attempt: AnsweredCall) -> None:
        """Check an answer, and replace it. Ends the attempt where that fails."""
        spec = call.target.spec.guard
        if spec is None or not spec.output or attempt.answer.status >= 400:
            return
        if call.place not in GENERATED:  # what has no text, or none of a model
            return
        try:
            check = TextCheck(self._terms, call, spec, OUTPUT)
            answer = attempt.answer
            if answer.body is None and answer.header(b"content-type").lower().startswith(_SSE):
                stream = GuardedStream(check, call.tokens)
                attempt.answer = GuardedResponse(answer, stream, lambda: _abort_generation(attempt))
                return
            body = await _read_whole(answer) if answer.body is None else answer.body
            body = await _check_choices(check, body)
            if attempt.cut_by is not None:  # by a deadline, meanwhile
                raise attempt.cut_by
            attempt.answer = WorkerResponse(None, answer.status, answer.headers, body, answer.head)
        except WorkerConnectionLost as e:
            attempt.fail(e)
            raise attempt.cut_by or await attempt.crash_error() from e
        except BaseException as e:
            attempt.fail(e)
            raise


def _abort_generation(attempt: AnsweredCall) -> None:
    """End the server's work on an answer: it sees its caller disconnect."""
    if isinstance(attempt, Attempt) and attempt.connection is not None:
        attempt.connection.close()


async def _read_whole(answer: WorkerResponse) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.chunks():
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise errors.TooLarge(
                f"the answer has more than {MAX_ANSWER_BYTES} bytes, which a guard cannot check: "
                f"{_HINT}",
                limit_bytes=MAX_ANSWER_BYTES,
            )
        pieces.append(piece)
    return b"".join(pieces)


async def _check_choices(check: TextCheck, body: bytes) -> bytes:
    """Return a whole answer without the choices that are refused. Raises TooLarge."""
    require_few_values(body, MAX_ANSWER_VALUES, f"a guard cannot check it: {_HINT}")
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list):
        return await _check_as_text(check, body, document)
    is_changed, turns = False, YieldBudget()
    for at, choice in enumerate(choices):
        await turns.handled(b"")
        if await check.find_refusal(_text_of(choice)):
            choices[at], is_changed = _empty_choice(choice, at), True
    rest = {name: value for name, value in document.items() if name != "choices"}
    if (text := _text_of(rest)) and await check.find_refusal(text):
        document = {
            name: rest[name] for name in ("id", "object", "created", "usage") if name in rest
        }
        choices = [_empty_choice(choice, at) for at, choice in enumerate(choices)]
        document["choices"], is_changed = choices, True
    return json.dumps(document, separators=(",", ":")).encode() if is_changed else body


async def _check_as_text(check: TextCheck, body: bytes, document: Any) -> bytes:
    """Check an answer that has no choices: embeddings, which have no text, or what a server has
    invented."""
    text = body.decode("utf-8", "replace") if document is None else _text_of(document)
    if not text or not (rule := await check.find_refusal(text)):
        return body
    raise ContentRefused(
        f"the answer was refused by rule {rule!r} of this model's guard", rule=rule
    )


def _text_of(document: Any) -> str:
    return SEPARATOR.join(text for _, text in answer_texts(document))


def _empty_choice(choice: Any, at: int) -> dict[str, Any]:
    """A choice without its text."""
    fields = choice if isinstance(choice, dict) else {}
    number = fields["index"] if type(fields.get("index")) is int else at
    empty = {"text": ""} if "text" in fields else {"message": {"role": "assistant", "content": ""}}
    return {"index": number, **empty, "logprobs": None, "finish_reason": REFUSED}

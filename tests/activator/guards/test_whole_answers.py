"""Whole answers that would keep the event loop busy are refused before they are parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from activator.calls.call import AnsweredCall
from activator.guards.checks import CheckTerms
from activator.guards.guards import MAX_ANSWER_BYTES, Guards
from activator.llm.request_size import CHAT
from activator.worker_client.connection import WorkerResponse
from pilotlight.errors import TooLarge
from pilotlight.spec.engines import GuardSpec
from tests.activator.llm.openai.conftest import llm
from tests.fakes.calls import call_of
from tests.fakes.routes import target_of


class _Failed(AnsweredCall):
    """An attempt that notes how it ended."""

    error: BaseException | None = None

    def fail(self, error: BaseException, *, finish: str = "", is_noted: bool = True) -> None:
        self.error = error


async def test_an_answer_with_too_many_values_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    guards = Guards(CheckTerms(checker=nothing, function=nothing, recorder=nothing, is_open=True))
    target = target_of(llm(guard=GuardSpec(patterns=("email",))))
    attempt = _Failed(call_of(target, method=CHAT))
    body = b'{"choices": [%b[]]}' % (b"[]," * ((MAX_ANSWER_BYTES - 100) // 3))
    attempt.answer = WorkerResponse(None, 200, [(b"content-type", b"application/json")], body)
    parse = json.loads

    def small(data: bytes) -> Any:
        assert len(data) < 10_000, "the answer was parsed"
        return parse(data)

    monkeypatch.setattr(json, "loads", small)
    with pytest.raises(TooLarge, match="a guard cannot check it: ask for a stream"):
        await guards.check_answer(attempt.call, attempt)
    assert isinstance(attempt.error, TooLarge)

"""Proofs of guards: through an activator, and what happens where they fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.activator.llm.openai.conftest import chat, llm
from tests.fakes.routes import route_of, spec_of
from tests.options.contract import proves
from tests.options.world import serving


async def ask(edge: Edge, text: str, **more: Any) -> httpx.Response:
    return await edge.client.post(
        f"{edge.url}/v1/chat/completions",
        json=chat(text, **{"max_tokens": 4, **more}),
        headers={"authorization": f"Bearer {KEY}"},
    )


@proves("GuardSpec.patterns", "GuardSpec.words", "GuardSpec.expressions", "GuardSpec.input")
async def test_prompts_are_refused_by_each_kind_of_rule(fleet: str, edge: Edge) -> None:
    for guard, text, rule in (
        (GuardSpec(patterns=("email",)), "to a@b.com", "email"),
        (GuardSpec(words=("falcon",)), "the Falcon", "words"),
        (GuardSpec(expressions={"ticket": "TCK-[0-9]+"}), "on TCK-1", "ticket"),
    ):
        edge.add(route_of(llm(guard=guard)))
        refused = await ask(edge, text)
        assert (refused.status_code, f"'{rule}'" in refused.text) == (400, True)
        assert (await ask(edge, "hello")).status_code == 200
    edge.add(route_of(llm(guard=GuardSpec(patterns=("email",), input=False))))
    assert (await ask(edge, "to a@b.com")).status_code == 200


@proves("GuardSpec.output", "GuardSpec.window_chars")
async def test_answers_are_checked_in_windows(fleet: str, edge: Edge) -> None:
    edge.add(route_of(llm()))
    text: str = (await ask(edge, "hello", max_tokens=9)).json()["choices"][0]["message"]["content"]
    *_, before, last = text.split()
    rule = {"last": f" {before} {last}"}
    for output, window_chars, sees in ((True, 1, True), (True, 4000, False), (False, 1, True)):
        guard = GuardSpec(expressions=rule, output=output, input=True, window_chars=window_chars)
        edge.add(route_of(llm(guard=guard)))
        answer = await ask(edge, "hello", max_tokens=9, stream=True)
        assert ('"content_filter"' in answer.text) is output
        assert (f'"{text[:3]}"' in answer.text) is sees, "what was before the window was sent"


@proves("GuardSpec.function", "ActivatorSettings.guard_on_error")
async def test_a_function_that_is_gone_refuses_or_allows(fleet: str, short_tmp: Path) -> None:
    for guard_on_error, status in (("refuse", 503), ("allow", 200)):
        directory = short_tmp / guard_on_error
        directory.mkdir()
        async with serving(directory, fleet, guard_on_error=guard_on_error) as edge:
            guard = GuardSpec(patterns=("email",), function="judge")
            edge.add(route_of(llm(guard=guard)))
            assert (await ask(edge, "hello")).status_code == status
            assert (await ask(edge, "hello", stream=True)).status_code == status
            assert (await ask(edge, "to a@b.com")).status_code == 400, "patterns still apply"


@proves("ActivatorSettings.guard_deadline_s")
async def test_a_function_has_a_deadline(fleet: str, short_tmp: Path) -> None:
    async with serving(short_tmp, fleet, guard_deadline_s=0.2) as edge:
        edge.fleet.gate.clear()
        edge.add(route_of(spec_of("judge", methods=(MethodSpec(),))))
        edge.add(route_of(llm(guard=GuardSpec(function="judge"))))
        began = time.monotonic()
        refused = await ask(edge, "hello")
        assert (refused.status_code, json.loads(refused.text)["error"]["code"]) == (
            503,
            "unavailable",
        )
        assert 0.2 <= time.monotonic() - began < 20
        edge.fleet.gate.set()

"""Guards through real HTTP: what callers of a language model get, and what is billed, counted and
recorded."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import openai
import pytest

from activator.settings import ActivatorSettings
from pilotlight.spec.engines import GUARD_PATTERNS, GuardSpec, Task
from pilotlight.spec.function import Clocks, MethodSpec
from pilotlight.spec.policies import Fallback
from snapshotter.errors import StartFailed
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.llm.openai.conftest import Shop, chat, events_of, llm
from tests.activator.test_gateway import until
from tests.activator.test_modules_of_a_call import modules_passed
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

CARD = "4111 1111 1111 1111"
PATTERNS = GuardSpec(patterns=GUARD_PATTERNS, words=("purple falcon",))
JUDGE = GuardSpec(function="judge", window_chars=8)
LONG = 400


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=40_000,
        body_timeout_s=PATIENCE_S,
        header_timeout_s=PATIENCE_S,
        unauthenticated_per_s=5.0,
        heartbeat_s=PATIENCE_S,
        guard_deadline_s=1.0,
    )


@pytest.fixture(name="shop")
async def _shop(edge: Edge) -> AsyncIterator[Shop]:
    shop = Shop(edge)
    guard(shop, PATTERNS)
    yield shop
    await shop.aclose()


def guard(shop: Shop, spec: GuardSpec | None, **more: Any) -> None:
    """Deploy the model with a guard."""
    shop.edge.add(route_of(llm(guard=spec, **more)))


async def said(shop: Shop, count: int = 8) -> list[str]:
    """The first words that the engine says without a guard."""
    guard(shop, None)
    answer = await shop.post(chat(max_tokens=count))
    words: str = answer.json()["choices"][0]["message"]["content"]
    await shop.edge.settle()
    shop.edge.ledger.records.clear()
    return words.split()


async def refuse_word(shop: Shop, at: int, *, count: int = 8) -> list[str]:
    """Deploy a guard of the word that the engine says at this place first. Returns the words."""
    words = await said(shop, count)
    assert words.index(words[at]) == at
    guard(shop, GuardSpec(words=(words[at],), input=False))
    return words


async def records(shop: Shop, function: str = "assistant") -> list[Any]:
    return [one for one in (await shop.edge.settle()).values() if one.function == function]


def checks(shop: Shop, stage: str, outcome: str) -> float:
    labels = {"tenant": TENANT, "app": "shop", "function": "assistant"}
    found = shop.edge.metrics.registry.get_sample_value(
        "pilotlight_guard_checks_total", {**labels, "stage": stage, "outcome": outcome}
    )
    return found or 0.0


def spoken(events: list[str]) -> str:
    """The text of a stream."""
    pieces = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or ""
        for piece in pieces
        for choice in piece.get("choices", ())
    )


# -- prompts ---------------------------------------------------------------------------------------
async def test_a_refused_prompt_starts_nothing_costs_nothing_and_is_recorded_without_its_text(
    shop: Shop,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await shop.client.chat.completions.create(**chat(f"my card is {CARD}"))

    assert (refused.value.code, refused.value.status_code) == ("content_filter", 400)
    assert "'credit_card'" in str(refused.value)
    assert shop.edge.fleet.started == []
    assert await shop.edge.settle() == {}
    assert checks(shop, "input", "refused") == 1
    await shop.edge.refusals.flush()
    (entry,) = shop.edge.refused
    assert (entry["tenant"], entry["function"], entry["key"]) == (
        TENANT,
        "main/shop/assistant",
        f"k-{KEY}",
    )
    assert (entry["stage"], entry["rule"], entry["calls"]) == ("input", "credit_card", 1)
    assert "4111" not in json.dumps(entry)


async def test_refusals_of_one_kind_are_one_entry_of_the_log(shop: Shop) -> None:
    for _ in range(3):
        await shop.post(chat(CARD))
    await shop.edge.refusals.flush()
    assert [entry["calls"] for entry in shop.edge.refused] == [3]


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "system", "content": CARD}, {"role": "user", "content": "hi"}]),
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "it is 4111 1111 "},
                        {"type": "text", "text": "1111 1111"},
                    ],
                }
            ]
        ),
        chat(messages=[{"role": "user", "name": "purple falcon", "content": "hi"}]),
        chat(
            messages=[
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": json.dumps({"to": "a@b.com"})},
                        }
                    ],
                }
            ]
        ),
        chat(messages=[{"role": "assistant", "content": "x", "reasoning_content": CARD}]),
        chat(
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {CARD: {}}}},
                }
            ]
        ),
        chat(documents=[{"title": "t", "text": CARD}]),
        chat(chat_template=f"{{{{ '{CARD}' }}}}"),
        chat(metadata={"account": 4111111111111111}),
    ],
)
async def test_no_field_of_a_request_is_a_way_around(shop: Shop, body: dict[str, Any]) -> None:
    answer = await shop.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "content_filter")


async def test_texts_and_embeddings_are_checked_too(shop: Shop) -> None:
    body = {"model": "shop/assistant", "prompt": ["one", f"two {CARD}"]}
    assert (await shop.post(body, path="/v1/completions")).status_code == 400
    guard(shop, PATTERNS, task=Task.EMBED)
    body = {"model": "shop/assistant", "input": ["one", CARD]}
    answer = await shop.post(body, path="/v1/embeddings")
    assert answer.json()["error"]["code"] == "content_filter"
    answer = await shop.post({**body, "input": "one"}, path="/v1/embeddings")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3]]])
async def test_token_ids_cannot_be_read_and_are_refused(shop: Shop, prompt: Any) -> None:
    body = {"model": "shop/assistant", "prompt": prompt}
    answer = await shop.post(body, path="/v1/completions")
    assert answer.status_code == 400
    assert "send text in place of token ids" in answer.json()["error"]["message"]


async def test_what_is_allowed_is_answered_as_without_a_guard(shop: Shop) -> None:
    words = await said(shop)
    guard(shop, PATTERNS)
    answer = await shop.client.chat.completions.create(**chat(max_tokens=8))
    assert (answer.choices[0].message.content or "").split() == words
    stream = await shop.post(chat(max_tokens=8, stream=True))
    assert spoken(events_of(stream.text)).split() == words
    assert [one.finish for one in await records(shop)] == ["length", "length"]
    assert checks(shop, "output", "allowed") == checks(shop, "input", "allowed") == 2


async def test_a_long_prompt_is_checked_in_a_process(shop: Shop) -> None:
    guard(shop, PATTERNS, engine={"max_model_len": 30_000})
    answer = await shop.post(chat("11 22 " * 1000 + CARD, max_tokens=1))
    assert answer.json()["error"]["code"] == "content_filter"
    answer = await shop.post(chat("11 22 33 44 55 66 77 " * 300, max_tokens=1))
    assert answer.status_code == 200, answer.text


async def test_a_guard_of_prompts_only_leaves_answers_alone(shop: Shop) -> None:
    words = await said(shop)
    guard(shop, GuardSpec(words=(words[3],), output=False))
    answer = await shop.post(chat(max_tokens=8))
    assert answer.json()["choices"][0]["message"]["content"].split() == words


# -- answers ---------------------------------------------------------------------------------------
async def test_a_refused_answer_is_empty_says_so_and_is_billed(shop: Shop) -> None:
    await refuse_word(shop, 3)
    answer = await shop.client.chat.completions.create(**chat(max_tokens=8, n=2))

    assert [choice.finish_reason for choice in answer.choices] == ["content_filter"] * 2
    assert [choice.message.content for choice in answer.choices] == ["", ""]
    assert answer.model == "shop/assistant"
    (record,) = await records(shop)
    assert (record.status, record.outcome, record.finish) == (200, "ok", "content_filter")
    assert (record.tokens_out, record.tokens_in > 0) == (16, True)
    assert checks(shop, "output", "refused") == 2


async def test_a_refused_stream_ends_frees_its_slot_and_is_billed_for_what_ran(shop: Shop) -> None:
    shop.edge.fleet.engine_options = {"token_s": 0.01}
    words = await refuse_word(shop, 4)
    engine = shop.engine
    answer = await shop.post(
        chat(max_tokens=LONG, stream=True, stream_options={"include_usage": True})
    )

    events = events_of(answer.text)
    assert spoken(events).split() == words[:4], "what was before it was sent"
    assert events[-2] == "data: [DONE]"
    last, usage = (json.loads(one.removeprefix("data: ")) for one in events[-4:-2])
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["delta"]) == (
        "content_filter",
        {},
    )
    assert json.loads(events[-1].partition("data: ")[2])["finish_reason"] == "content_filter"
    async with asyncio.timeout(PATIENCE_S):
        await engine.wait_idle()
    assert engine.counts.finished["abort"] == 1
    (record,) = await records(shop)
    assert (record.status, record.outcome, record.finish) == (200, "ok", "content_filter")
    assert 5 <= record.tokens_out < LONG
    assert usage["usage"]["completion_tokens"] == record.tokens_out
    await until(lambda: sum(one.in_flight for one in shop.edge.scaler.throttlers()) == 0)


async def test_openais_client_reads_a_refused_stream_to_its_end(shop: Shop) -> None:
    await refuse_word(shop, 2)
    stream = await shop.client.chat.completions.create(**chat(max_tokens=8), stream=True)
    pieces = [piece async for piece in stream]
    assert pieces[-1].choices[0].finish_reason == "content_filter"
    answer = await shop.client.completions.create(
        model="shop/assistant", prompt="hello there", max_tokens=8, stream=True
    )
    assert [piece async for piece in answer]


async def test_submitted_calls_and_calls_by_name_pass_the_guard(
    shop: Shop, shipping: object
) -> None:
    await refuse_word(shop, 3)
    body = {"path": "/v1/chat/completions", "body": chat(max_tokens=8)}
    invoked = await shop.edge.call("shop/assistant:invoke", json=body)
    assert invoked.json()["choices"][0]["finish_reason"] == "content_filter"
    for stream in (False, True):
        submitted = await shop.edge.call(
            "shop/assistant:submit",
            json={**body, "body": chat(max_tokens=8, stream=stream)},
        )
        url = f"/v1/calls/{submitted.json()['id']}?wait_s=30"
        result = await shop.get(url)
        body_of = result.json()["result"]
        text = base64.b64decode(body_of).decode() if stream else json.dumps(body_of)
        assert '"content_filter"' in text
    guard(shop, PATTERNS)
    refused = await shop.edge.call(
        "shop/assistant:submit", json={"path": body["path"], "body": chat(CARD)}
    )
    result = await shop.get(f"/v1/calls/{refused.json()['id']}?wait_s=30")
    assert (result.json()["state"], result.json()["status"]) == ("FAILED", 400)
    assert "content_filter" in result.text


# -- functions -------------------------------------------------------------------------------------
class Judge:
    """The function of a guard: what it was asked, and what it answers.

    Attributes:
        forbids: text that it refuses."""

    def __init__(self, shop: Shop, spec: GuardSpec = JUDGE) -> None:
        self.asked: list[dict[str, str]] = []
        self.forbids = "\n"
        self.answer: WorkerAnswer | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        shop.edge.fleet.behaviours["judge"] = self._behave
        shop.edge.add(route_of(spec_of("judge", methods=(MethodSpec(),))))
        guard(shop, spec)

    async def _behave(self, request: WorkerRequest) -> WorkerAnswer:
        self.asked.append(json.loads(request.body))
        await self.may_answer.wait()
        if self.answer is not None:
            return self.answer
        if self.forbids in self.asked[-1]["text"]:
            return WorkerAnswer(body=b'{"allow": false, "rule": "rude"}')
        return WorkerAnswer(body=b'{"allow": true}')


async def test_a_function_is_asked_and_its_calls_are_billed_as_the_models(shop: Shop) -> None:
    judge = Judge(shop)
    answer = await shop.post(chat("hello there", max_tokens=8))
    assert answer.status_code == 200, answer.text
    assert [one["stage"] for one in judge.asked] == ["input", "output"]
    assert judge.asked[0]["text"] == "hello there"
    assert judge.asked[1]["text"] == answer.json()["choices"][0]["message"]["content"]
    (model,), asked = await records(shop), await records(shop, "judge")
    assert {one.parent for one in asked} == {model.id}
    assert {one.key for one in asked} == {f"function:{TENANT}/main/shop/assistant"}
    assert sum(Decimal(one.cost) for one in asked) > 0


async def test_a_function_refuses_a_prompt_and_names_its_rule(shop: Shop) -> None:
    judge = Judge(shop)
    judge.forbids = "stupid"
    answer = await shop.post(chat("you stupid thing"))
    assert answer.json()["error"]["code"] == "content_filter"
    assert "'rude'" in answer.json()["error"]["message"]
    assert (await records(shop), len(await records(shop, "judge"))) == ([], 1)


async def test_a_function_gets_windows_of_a_stream_and_nothing_is_sent_before_its_answer(
    shop: Shop,
) -> None:
    words = await said(shop, 12)
    judge = Judge(shop, GuardSpec(function="judge", window_chars=8, input=False))
    judge.forbids = words[7]
    assert words.index(words[7]) == 7
    answer = await shop.post(chat(max_tokens=12, stream=True))
    events = events_of(answer.text)
    sent = spoken(events).split()
    assert sent == words[: len(sent)]
    assert 0 < len(sent) <= 7, "the windows before it"
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == (
        "content_filter"
    )
    assert all(len(one["text"]) >= 8 for one in judge.asked)
    assert "".join(one["text"] for one in judge.asked).count(words[0]) >= 1


@pytest.mark.parametrize(
    "answer",
    [
        WorkerAnswer(status=500, body=b"{}", outcome="raised"),
        WorkerAnswer(body=b"true"),
        WorkerAnswer(body=b'{"allow": 1}'),
        WorkerAnswer(body=b'{"allow": false, "rule": 7}'),
        WorkerAnswer(body=b'{"allow": true, "pad": "%b"}' % (b"x" * 5000)),
        WorkerAnswer(body=b"\xff"),
    ],
)
async def test_a_function_that_fails_or_answers_nonsense_refuses(
    shop: Shop, answer: WorkerAnswer
) -> None:
    judge = Judge(shop)
    judge.answer = answer
    refused = await shop.post(chat("hello there"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await records(shop), checks(shop, "input", "failed")) == ([], 1)


async def test_no_fallback_answers_a_prompt_that_was_not_checked(
    shop: Shop, shipping: object
) -> None:
    judge = Judge(shop)
    judge.answer = WorkerAnswer(status=500, body=b"{}", outcome="raised")
    shop.edge.add(route_of(llm("assistant2")))
    rungs = (Fallback(kind="function", function="assistant2"),)
    guard(shop, JUDGE, fallback=rungs, clocks=Clocks(queue_s=0.1))
    assert (await shop.post(chat("hello there"))).status_code == 503
    body = {"path": "/v1/chat/completions", "body": chat("hello there")}
    submitted = await shop.edge.call("shop/assistant:submit", json=body)
    result = await shop.get(f"/v1/calls/{submitted.json()['id']}?wait_s=30")
    assert (result.json()["state"], result.json()["status"]) == ("FAILED", 503)
    assert await records(shop, "assistant2") == []


async def test_a_slow_function_refuses_at_its_deadline(shop: Shop) -> None:
    judge = Judge(shop)
    judge.may_answer.clear()
    assert (await shop.post(chat("hello there"))).status_code == 503
    judge.may_answer.set()


@pytest.mark.parametrize("function", ["nothing", "shop/assistant2", "judge"])
async def test_a_function_that_is_not_there_or_does_not_start_refuses(
    shop: Shop, function: str
) -> None:
    shop.edge.add(route_of(llm("assistant2")))
    shop.edge.fleet.broken["judge"] = StartFailed("no such file")
    shop.edge.add(route_of(spec_of("judge", methods=(MethodSpec(),))))
    guard(shop, GuardSpec(function=function))
    assert (await shop.post(chat("hello there"))).status_code == 503


async def test_a_failing_function_ends_a_stream_as_refused(shop: Shop) -> None:
    judge = Judge(shop, GuardSpec(function="judge", window_chars=8, input=False))
    judge.answer = WorkerAnswer(body=b"[]")
    answer = await shop.post(chat(max_tokens=8, stream=True))
    events = events_of(answer.text)
    assert spoken(events) == ""
    assert json.loads(events[-1].partition("data: ")[2])["finish_reason"] == "content_filter"
    await shop.edge.refusals.flush()
    assert [one["rule"] for one in shop.edge.refused] == ["guard-failed"]


async def test_patterns_are_checked_before_the_function_which_is_spared(shop: Shop) -> None:
    judge = Judge(shop, GuardSpec(patterns=("credit_card",), function="judge"))
    assert (await shop.post(chat(CARD))).status_code == 400
    assert judge.asked == []


async def test_a_caller_that_leaves_while_the_function_is_asked_leaves_nothing(shop: Shop) -> None:
    judge = Judge(shop, GuardSpec(function="judge", window_chars=8, input=False))
    judge.may_answer.clear()
    asking = asyncio.create_task(shop.post(chat(max_tokens=8, stream=True)))
    await until(lambda: judge.asked)
    asking.cancel()
    await until(lambda: sum(one.in_flight for one in shop.edge.scaler.throttlers()) == 0)
    judge.may_answer.set()
    (model,), (asked,) = await records(shop), await records(shop, "judge")
    assert (model.outcome, model.finish, asked.outcome) == ("cancelled", "cancelled", "cancelled")
    assert model.tokens_out > 0, "what ran, although nothing of it was sent"


async def test_an_engine_that_dies_while_text_is_held_back_ends_the_stream_with_its_error(
    shop: Shop,
) -> None:
    guard(shop, GuardSpec(expressions={"never": "xyzzy{9}"}))
    assert (await shop.post(chat(max_tokens=1))).status_code == 200
    answer = await shop.post(chat("!crash", max_tokens=9, stream=True))
    assert '"worker-crashed"' in answer.text
    assert spoken(events_of(answer.text)) == "", "what was held back is not known to be allowed"


# -- the others ------------------------------------------------------------------------------------
async def test_a_model_without_a_guard_passes_no_module_of_it(shop: Shop) -> None:
    guard(shop, None)
    await shop.post(chat(max_tokens=2, stream=True))
    with modules_passed() as passed:
        assert (await shop.post(chat(max_tokens=2, stream=True))).status_code == 200
        assert (await shop.post(chat(max_tokens=2))).status_code == 200
    assert not [module for module in passed if module.startswith("guards")]
    with modules_passed() as passed:
        guard(shop, PATTERNS)
        assert (await shop.post(chat(max_tokens=2))).status_code == 200
    assert [module for module in passed if module.startswith("guards")]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version"])
async def test_what_says_nothing_of_a_model_is_still_answered(shop: Shop, path: str) -> None:
    assert (await shop.get(f"/fn/shop/assistant{path}")).status_code == 200


async def test_a_deadline_while_text_is_held_back_sends_nothing_of_it(shop: Shop) -> None:
    guard(shop, GuardSpec(expressions={"never": "xyzzy"}), clocks=Clocks(execution_s=1.0))
    answer = await shop.post(chat("!stall", max_tokens=9, stream=True))
    events = events_of(answer.text)
    assert '"deadline-exceeded"' in answer.text
    assert spoken(events) == ""
    (record,) = await records(shop)
    assert (record.status, record.tokens_out) == (504, 3), "what ran is billed"

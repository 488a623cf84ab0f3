"""A streamed answer past a guard, piece by piece: what is passed on, when, and what it costs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.arguments.checker import ArgumentChecker
from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.guards.checks import (
    COSTLY_FOR_S,
    COSTLY_S,
    OUTPUT,
    SHARE_S,
    CheckTerms,
    LoopTime,
    TextCheck,
)
from activator.guards.stream import MAX_EVENT_BYTES, GuardedStream
from activator.http.payloads import JSON, Payload
from activator.quotas.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from pilotlight.spec.engines import GUARD_PATTERNS, GuardSpec
from pilotlight.spec.pricing import Rates
from tests.activator.llm.openai.conftest import llm
from tests.fakes.routes import route_of

CARD = "4111 1111 1111 1111"
PATTERNS = GuardSpec(patterns=GUARD_PATTERNS)
ADDED_MS = 15.0


class Notes:
    """Notes outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.rules: list[str] = []

    def count_check(self, target: CallTarget, stage: str, outcome: str) -> None:
        self.outcomes.append(outcome)

    def record_refusal(self, call: Call, stage: str, rule: str) -> None:
        self.rules.append(rule)


class Asked:
    """A guard's function that refuses a text with "rude" in it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def check(self, call: Call, function: str, *, stage: str, text: str) -> str:
        self.texts.append(text)
        return "rude" if "rude" in text else ""


class World:
    """One stream, and what watches it."""

    def __init__(self, spec: GuardSpec = PATTERNS, *, is_open: bool = False) -> None:
        self.notes, self.function = Notes(), Asked()
        route = route_of(llm(guard=spec))
        target = CallTarget(route, route.traffic[0][0], Rates(version="test"))
        call = Call(
            id="req-1",
            target=target,
            method="",
            payload=Payload(b"", JSON, JSON),
            caller=Caller(key_id="k-1"),
        )
        terms = CheckTerms(
            checker=ArgumentChecker(),
            function=self.function,
            recorder=self.notes,
            is_open=is_open,
        )
        self.tokens = TokenReservation(estimated_in=1, max_out=100, began_ns=0)
        self.stream = GuardedStream(TextCheck(terms, call, spec, OUTPUT), self.tokens)

    async def run(self, events: list[bytes]) -> list[bytes]:
        """What is passed on for each event, and at the end."""
        out = []
        for event in events:
            out.append(await self.stream.feed(event))
            if self.stream.rule:
                return out
        return [*out, await self.stream.end()]


def piece(text: Any, *, index: int = 0, finish: str | None = None, name: str = "content") -> bytes:
    """A piece of a chat's stream; `text`: the value of the member `name`."""
    choice = {"index": index, "delta": {name: text}, "finish_reason": finish}
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: %b\n\n" % json.dumps({**head, "choices": [choice]}).encode()


def of_logprobs(text: str) -> bytes:
    """A piece with the tokens of a text that the server leaves out."""
    choice = {"index": 0, "delta": {}, "logprobs": {"content": [{"token": text}]}}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


DONE = b"data: [DONE]\n\n"


def text_of(out: list[bytes], name: str = "content") -> str:
    """The text that was passed on."""
    events = [
        json.loads(one[6:]) for one in b"".join(out).split(b"\n\n") if one.startswith(b"data: {")
    ]
    return "".join(
        choice["delta"].get(name) or "" for event in events for choice in event["choices"]
    )


async def test_pieces_are_passed_on_as_they_came_and_in_their_order() -> None:
    events = [piece(""), b": comment\n\n", piece("Hello"), piece(", you"), piece("."), DONE]
    out = await World().run(events)
    assert b"".join(out) == b"".join(events)
    assert out[0] == events[0]
    assert out[2] == b"", "it may be the beginning of an address"


async def test_ordinary_words_are_not_held_back_where_no_address_is_searched() -> None:
    world = World(GuardSpec(patterns=("credit_card", "iban", "us_ssn", "private_key", "api_key")))
    for event in (piece("Hello"), piece(" you"), piece(" 12"), piece(" apples")):
        out = await world.stream.feed(event)
        assert bool(out) is (b" 12" not in event)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.booleans())
def test_however_an_answer_is_split_nothing_of_a_number_is_sent(
    sizes: list[int], is_one_chunk: bool
) -> None:
    text = f"it is {CARD}, I think"
    events, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        events.append(piece(text[at : at + size]))
        at, turn = at + size, turn + 1
    events.append(DONE)
    world = World()
    out = asyncio.run(world.run([b"".join(events)] if is_one_chunk else events))
    assert "4" not in text_of(out)
    assert text_of(out) in text
    assert world.stream.rule == "credit_card"
    assert out[-1].endswith(DONE)
    assert b'"finish_reason":"content_filter"' in out[-1]
    assert (world.notes.outcomes, world.notes.rules) == (["refused"], ["credit_card"])


@pytest.mark.parametrize("cut", range(1, 60))
async def test_chunks_of_bytes_are_not_events(cut: int) -> None:
    data = piece("so ") + piece("be it. ") + DONE
    out = await World().run([data[:cut], data[cut:]])
    assert b"".join(out) == data


@pytest.mark.parametrize(
    "make",
    [
        lambda text: piece(text, name="reasoning_content"),
        lambda text: piece(text, name="refusal"),
        lambda text: piece([{"index": 0, "function": {"arguments": text}}], name="tool_calls"),
        lambda text: piece({"arguments": text}, name="function_call"),
        lambda text: piece(text, index=1),
        lambda text: piece({"transcript": text}, name="audio"),
        of_logprobs,
        lambda text: b"data: %b\n\n" % json.dumps({"token": {"text": text}}).encode(),
        lambda text: b"data: %b\n\n" % text.encode(),
    ],
)
async def test_no_field_of_a_piece_is_a_way_around(make: Any) -> None:
    world = World()
    out = await world.run([piece("Well, "), make("4111 1111"), make(" 1111 1111 "), DONE])
    assert b"1111" not in b"".join(out)
    assert world.stream.rule == "credit_card"


async def test_choices_are_followed_each_by_itself_and_end_together() -> None:
    world = World()
    events = [
        piece("4111 1111 ", index=0),
        piece("1111 1111 ", index=1),
        piece("so", index=1),
        piece(" ", index=1),
        piece(None, index=0, finish="stop"),
        piece(f"x {CARD} ", index=1),
        DONE,
    ]
    out = await world.run(events)
    assert text_of(out) == "4111 1111 1111 1111 so ", "two texts, neither of which is refused"
    (last,) = [json.loads(one[6:]) for one in out[-1].split(b"\n\n") if b"content_filter" in one]
    assert [choice["index"] for choice in last["choices"]] == [1], "the other had ended"


async def test_the_end_of_a_choice_releases_its_text_before_the_stream_ends() -> None:
    world = World()
    assert await world.stream.feed(piece("Bye")) == b""
    assert text_of([await world.stream.feed(piece(None, finish="stop"))]) == "Bye"


async def test_what_is_complete_only_at_the_end_is_refused_there() -> None:
    world = World()
    assert text_of(await world.run([piece("078-05-"), piece("1120"), DONE])) == ""
    assert world.stream.rule == "us_ssn"


async def test_expressions_hold_a_window_back() -> None:
    world = World(GuardSpec(expressions={"own": "b{5}"}, window_chars=10))
    out = await world.run([piece("a" * 8), piece("a" * 8), piece("bbb"), piece("bb "), DONE])
    assert text_of(out) == "a" * 8
    assert world.stream.rule == "own"


async def test_a_function_gets_windows_with_what_was_before_them() -> None:
    world = World(GuardSpec(function="judge", window_chars=6))
    words = ["one ", "two ", "three ", "four ", "ru", "de "]
    out = await world.run([*map(piece, words), DONE])
    assert world.function.texts[0] == "one two "
    assert world.function.texts[1] == "e two three ", "window_chars before it, too"
    assert world.stream.rule == "rude"
    assert text_of(out) == "one two three four ru", "windows that were allowed as they were"


async def test_limits_of_an_answer_refuse_it() -> None:
    world = World()
    await world.stream.feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))
    assert world.stream.rule == "too-long"
    world = World()
    for index in range(1100):
        await world.stream.feed(piece("x", index=index))
    assert world.stream.rule == "too-long"


async def test_a_chunk_with_many_costly_pieces_leaves_turns_to_others() -> None:
    """Each piece makes the patterns look at thousands of digits again, in which nothing matches."""
    world = World(GuardSpec(patterns=("credit_card",), window_chars=3000))
    await world.stream.feed(piece("111 " * 900))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    turns = 0
    assert await world.stream.feed(piece("111 ") * 40) is not None
    task.cancel()
    assert turns >= 5, "some milliseconds of the event loop at a time"
    assert not world.stream.rule


async def test_a_tenants_checks_wait_beyond_their_share_of_a_second() -> None:
    now, used_s = 0.99, 0.0
    time_of_loop = LoopTime(clock=lambda: now, processor=lambda: used_s)

    async def check(tenant: str) -> None:
        nonlocal used_s
        await time_of_loop.turn(tenant)
        with time_of_loop.used(tenant, b"guard"):
            used_s += SHARE_S

    await check("t-1")
    now = 1.9
    waits = asyncio.create_task(check("t-1"))
    await check("t-2")
    await asyncio.sleep(0.02)
    assert not waits.done()
    now = 1.99
    await waits


def test_a_guard_whose_check_took_long_is_costly_for_a_minute() -> None:
    now, used_s = 0.0, 0.0
    time_of_loop = LoopTime(clock=lambda: now, processor=lambda: used_s)
    with time_of_loop.used("t-1", b"small"):
        used_s += COSTLY_S / 2
    with time_of_loop.used("t-1", b"guard"):
        used_s += COSTLY_S
    assert [time_of_loop.is_costly(one) for one in (b"small", b"guard")] == [False, True]
    now = COSTLY_FOR_S
    assert not time_of_loop.is_costly(b"guard")


async def test_events_without_text_leave_turns_to_others_too() -> None:
    world, turns = World(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    turns = 0
    await world.stream.feed(b"\n" * 64_000)
    task.cancel()
    assert turns >= 100


async def test_what_was_dropped_is_counted() -> None:
    world = World()
    await world.run([piece(f"{word} ") for word in CARD.split()])
    assert world.stream.rule == "credit_card"
    assert world.tokens.tokens_out == 4


async def test_the_patterns_add_less_than_15_ms_to_the_first_token() -> None:
    """Processor time from the first piece until text is passed on, of all patterns, a hundred words
    and an expression, with the check's own making."""
    spec = GuardSpec(
        patterns=GUARD_PATTERNS, words=tuple(f"forbidden word {n}" for n in range(100))
    )
    World(spec)  # a revision's patterns are compiled once
    spent, per_piece = [], []
    for _ in range(20):
        began = time.process_time()
        world = World(spec)
        await world.stream.feed(piece(""))
        out = await world.stream.feed(piece("Hello"))
        out += await world.stream.feed(piece(", how"))
        spent.append((time.process_time() - began) * 1000)
        assert text_of([out]).startswith("Hello")
        began = time.process_time()
        for number in range(20):
            await world.stream.feed(piece(f" word{number}"))
        per_piece.append((time.process_time() - began) * 1000 / 20)
    middle, most = sorted(spent)[10], sorted(per_piece)[10]
    print(f"added to the first token: {middle:.3f} ms of CPU; to each piece: {most:.3f} ms")
    assert middle < ADDED_MS

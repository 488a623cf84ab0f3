"""Prompts that begin alike meet; nobody drowns; who comes or goes moves its own share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from activator.llm.prefix_affinity import BLOCK_CHARS, by_key, key_of, of_two
from tests.activator.llm.samples import Spot

SYSTEM = "You answer questions about gardens. " * 20


def chat(*turns: str, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "messages": messages
        + [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)],
        **more,
    }


def some(count: int, *, capacity: int = 8) -> list[Spot]:
    return [Spot(id=f"i-{n:012d}", capacity=capacity) for n in range(count)]


# -- the key ---------------------------------------------------------------------------------------
def test_all_turns_of_a_chat_have_one_key() -> None:
    first = key_of(chat("When do I sow peas?"))

    assert first is not None
    assert key_of(chat("When do I sow peas?", "In March.", "And beans?")) == first
    assert key_of(chat("When do I sow peas?", "In March.", "And beans?", temperature=0.3)) == first
    assert key_of(chat("When do I sow beans?")) != first


def test_a_system_prompt_longer_than_what_is_looked_at_is_what_its_chats_have_in_common() -> None:
    long = SYSTEM * 10

    assert key_of(chat("peas?", system=long)) == key_of(chat("beans?", system=long)) is not None


def test_parts_of_a_message_are_read_as_text() -> None:
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000_000}},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}

    assert key_of(body) is not None
    assert key_of(body) != key_of({"messages": [{"role": "user", "content": parts[:1]}]})


def test_an_adapter_makes_another_beginning_of_the_same_words() -> None:
    assert key_of(chat("peas?"), "gardener") != key_of(chat("peas?"))


def test_a_prompt_is_cut_to_whole_blocks_and_keeps_its_key_while_it_grows() -> None:
    text = "".join(chr(97 + n % 26) * 3 for n in range(2000))
    keys = [
        key_of({"prompt": text[:length]})
        for length in (100, BLOCK_CHARS, 2 * BLOCK_CHARS, 3 * BLOCK_CHARS + 7, 4 * BLOCK_CHARS)
    ]

    assert keys[0] is None, "less than a block is not worth a detour"
    assert len(set(keys[1:])) == 3
    assert keys[2] == keys[3]
    assert key_of({"prompt": text}) == key_of({"prompt": text[: 8 * BLOCK_CHARS]}), (
        "more than eight blocks are not looked at"
    )


def test_token_ids_and_inputs_of_embeddings_have_keys_too() -> None:
    ids = list(range(5000))

    assert key_of({"prompt": ids}) == key_of({"prompt": ids[:4000]}) is not None
    assert key_of({"input": ["x" * 600, "y"]}) is not None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": 3},
        {"messages": ["x"]},
        {"prompt": None},
        {"prompt": {"a": 1.5}},
        {"messages": [None]},
        {"prompt": ""},
    ],
)
def test_what_is_no_proper_prompt_has_no_key(body: dict[str, Any]) -> None:
    assert key_of(body) is None


def test_words_that_are_no_text_are_no_reason_to_fail() -> None:
    assert key_of({"messages": [{"role": 3, "content": "\ud800"}]}) is not None
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    assert key_of({"prompt": deep}) is None


# -- the instance ----------------------------------------------------------------------------------
def test_a_key_keeps_its_instance_while_the_load_is_even() -> None:
    instances = some(4)

    chosen = by_key(77, instances, 0.0)

    assert chosen is not None
    for instance in instances:
        instance.in_flight = 2
    assert by_key(77, instances, 0.0) is chosen
    assert by_key(77, instances[::-1], 0.0) is chosen, "in whatever order they stand"


def test_a_beginning_that_everybody_shares_spills_over_at_the_bound() -> None:
    instances = some(4, capacity=16)

    for _ in range(40):
        chosen = by_key(77, instances, 0.0)
        assert chosen is not None
        chosen.in_flight += 1

    assert max(i.in_flight for i in instances) <= 13, "a quarter above the average of ten"
    assert all(i.in_flight for i in instances)


def test_where_little_runs_chats_stay_where_they_are_known() -> None:
    instances = some(4, capacity=16)

    for _ in range(4):
        chosen = by_key(77, instances, 0.0)
        assert chosen is not None
        chosen.in_flight += 1

    assert sorted(i.in_flight for i in instances) == [0, 0, 0, 4], (
        "a quarter of its slots is no load"
    )


def test_without_a_bound_one_instance_would_have_taken_all_that_it_can() -> None:
    instances = some(4, capacity=16)

    for _ in range(16):
        chosen = by_key(77, instances, 0.0, load=1e9)
        assert chosen is not None
        chosen.in_flight += 1

    assert sorted(i.in_flight for i in instances) == [0, 0, 0, 16]


def test_an_instance_that_takes_fewer_calls_is_bounded_lower() -> None:
    instances = [Spot(id="i-big", capacity=12), Spot(id="i-small", capacity=4)]

    for n in range(16):
        chosen = by_key(n % 2, instances, 0.0, load=1.0)
        assert chosen is not None
        chosen.in_flight += 1

    assert [i.in_flight for i in instances] == [12, 4]


def test_keys_are_spread_evenly() -> None:
    instances, chance = some(5), random.Random(1)

    counts = Counter(
        one.id
        for _ in range(20_000)
        if (one := by_key(chance.getrandbits(64), instances, 0.0)) is not None
    )

    assert max(counts.values()) < 1.05 * 4000
    assert min(counts.values()) > 0.95 * 4000


@pytest.mark.parametrize("count", [2, 5, 16])
def test_an_instance_that_comes_or_goes_moves_its_own_share_of_the_keys_only(count: int) -> None:
    instances, chance = some(count), random.Random(2)
    keys = [chance.getrandbits(64) for _ in range(5000)]
    before = {key: by_key(key, instances, 0.0) for key in keys}

    gone = instances[count // 2]
    after = {key: by_key(key, [i for i in instances if i is not gone], 0.0) for key in keys}

    moved = [key for key in keys if before[key] is not after[key]]
    assert all(before[key] is gone for key in moved), "nobody else's keys move"
    assert len(moved) <= len(keys) * (1 / count + 0.03)


def test_a_full_or_blocked_instance_is_passed_over_and_none_is_none() -> None:
    instances = some(3, capacity=1)
    first = by_key(5, instances, 0.0)
    assert first is not None
    first.is_blocked = True

    second = by_key(5, instances, 0.0)

    assert second is not None
    assert second is not first
    for instance in instances:
        instance.in_flight = 1
    assert by_key(5, instances, 0.0) is None
    assert of_two(instances, 0.0, random.Random(1)) is None


def test_without_a_key_the_emptier_of_two_is_taken() -> None:
    instances, chance = some(8, capacity=32), random.Random(3)

    for _ in range(128):
        chosen = of_two(instances, 0.0, chance)
        assert chosen is not None
        chosen.in_flight += 1

    assert max(i.in_flight for i in instances) - min(i.in_flight for i in instances) <= 4


def test_empty_lists_without_end_are_looked_at_for_a_moment_only() -> None:
    visits = 0

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal visits
            visits += 1
            return super().__iter__()

    content = [[Counted() for _ in range(2_000)] for _ in range(200)]

    assert key_of({"messages": [{"role": "user", "content": content}]}) == key_of(
        {"messages": [{"role": "user", "content": []}]}
    )
    assert 0 < visits < 20_000

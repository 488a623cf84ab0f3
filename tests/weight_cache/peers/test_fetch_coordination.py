"""The owner's notes, and waiting for what is about to be here."""

from __future__ import annotations

import asyncio

from weight_cache.peers.fetch_coordination import FetchAssignments, InFlightChunks

NODES = {"a", "b", "c"}


def test_who_asks_first_fetches_and_the_others_are_sent_there() -> None:
    notes = FetchAssignments()
    assert [notes.fetcher("k", asker=asker, without=(), nodes=NODES) for asker in "abca"] == [
        "a",
        "a",
        "a",
        "a",
    ]


def test_who_turns_out_not_to_have_it_is_replaced() -> None:
    notes = FetchAssignments()
    notes.fetcher("k", asker="a", without=(), nodes=NODES)
    assert notes.fetcher("k", asker="b", without=["a"], nodes=NODES) == "b"
    assert notes.fetcher("k", asker="c", without=(), nodes=NODES) == "b"


def test_who_is_gone_is_replaced() -> None:
    notes = FetchAssignments()
    notes.fetcher("k", asker="a", without=(), nodes=NODES)
    assert notes.fetcher("k", asker="b", without=(), nodes={"b", "c"}) == "b"


def test_notes_are_bounded() -> None:
    notes = FetchAssignments()
    for number in range(200_010):
        notes.fetcher(str(number), asker="a", without=(), nodes=NODES)
    assert repr(notes) == "<FetchAssignments 200000 chunks>"


async def test_waiting_ends_when_it_is_here_or_given_up() -> None:
    under_way = InFlightChunks()
    with under_way.coming("k"):
        waiting = asyncio.create_task(under_way.wait("k", timeout_s=60))
        await asyncio.sleep(0)
        assert under_way.is_coming("k")
        assert not waiting.done()
    await waiting
    assert repr(under_way) == "<InFlightChunks 0 pieces>"


async def test_waiting_ends_with_its_time() -> None:
    under_way = InFlightChunks()
    with under_way.coming("k"):
        await under_way.wait("k", timeout_s=0.01)
        assert under_way.is_coming("k")


async def test_what_is_not_on_its_way_is_not_waited_for() -> None:
    await InFlightChunks().wait("k", timeout_s=60)

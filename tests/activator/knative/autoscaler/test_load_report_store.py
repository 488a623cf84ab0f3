"""Boards: one contract for the one in the process and the one in Redis; and who speaks on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
import redis.asyncio

from activator.knative.autoscaler.load_report import Load, StatementInvalid, from_text, to_text
from activator.knative.autoscaler.load_report_store import (
    BoardUnreachable,
    InMemoryHub,
    LoadReportStore,
    ProcessBoard,
)
from activator.knative.autoscaler.load_reporter import LoadReporter, loads_of
from activator.knative.autoscaler.redis_load_report_store import RedisBoard

SAID = {
    "f-1@v1": Load(
        concurrency=1.5,
        in_flight=1,
        waiting=2,
        asked=1,
        held={"uid": 1},
        promoted={"i-1": 0},
        promised=1,
        oldest_wait_s=0.25,
        start_s=2.0,
    ),
    "f-2@v1": Load(),
}
Make = Callable[[str], LoadReportStore]


@pytest.fixture(params=["process", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[LoadReportStore] = []
    wall = InMemoryHub()
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""

    def board(member: str) -> LoadReportStore:
        made.append(
            RedisBoard(url, platform="p", member=member)
            if url
            else ProcessBoard(wall, member=member)
        )
        return made[-1]

    yield board
    for one in made:
        await one.aclose()


async def heard(board: LoadReportStore, count: int, say: Callable[[], object]) -> list[str]:
    """The next pokes; `say` is called until they come, because who does not listen yet hears
    nothing."""
    found: list[str] = []

    async def listen() -> None:
        async with aclosing(board.pokes()) as pokes:
            async for key in pokes:
                found.append(key)
                if len(found) >= count:
                    return

    async with asyncio.timeout(20):
        listening = asyncio.create_task(listen())
        while not listening.done():
            result = say()
            if asyncio.iscoroutine(result):
                await result
            await asyncio.sleep(0.01)
        await listening
    return found


async def test_everybody_reads_the_last_statement_of_everybody(make: Make) -> None:
    one, other = make("a-0"), make("a-1")
    await one.post({"f-1@v1": Load(asked=3)})
    await one.post(SAID)
    await other.post({})
    found = await other.read()
    assert {member: posted.statement for member, posted in found.items()} == {
        "a-0": SAID,
        "a-1": {},
    }
    assert all(0 <= posted.age_s < 60 for posted in found.values())


async def test_who_leaves_says_nothing(make: Make) -> None:
    one, other = make("a-0"), make("a-1")
    await one.post(SAID)
    await one.delete()
    await one.delete()
    assert await other.read() == {}


async def test_pokes_come_to_who_listens_wherever_it_is(make: Make) -> None:
    one, other = make("a-0"), make("a-1")
    found = await heard(other, 2, lambda: one.post(SAID, ("f-1@v1", "f-2@v1")))
    assert found[:2] == ["f-1@v1", "f-2@v1"]


async def test_what_another_version_says_is_passed_over(redis_url: str) -> None:
    board = RedisBoard(redis_url, platform="p", member="a-0")
    client = redis.asyncio.Redis.from_url(redis_url)
    await board.post(SAID)
    for member, text in {
        "a-1": '5 {"f": {"colour": 1}}',
        "a-2": "nonsense",
        "a-3": "5 [1]",
    }.items():
        await client.hset("pilotlight:{p}:stated", member, text)
    assert list(await board.read()) == ["a-0"]
    await client.aclose()
    await board.aclose()


async def test_a_redis_that_is_away_is_said_by_its_address_and_nothing_else() -> None:
    board = RedisBoard("redis://user:secret@127.0.0.1:1/0", platform="p", member="a-0")
    for verb in (board.post({}), board.read()):
        with pytest.raises(
            BoardUnreachable, match=r"Redis at 127\.0\.0\.1:1 does not answer"
        ) as caught:
            await verb
        assert "secret" not in str(caught.value)
    await board.delete()
    await board.aclose()


def test_a_statement_is_the_same_after_it_was_written_down() -> None:
    assert from_text(to_text(SAID)) == SAID
    with pytest.raises(StatementInvalid):
        from_text('{"f": 3}')


# -- who speaks ------------------------------------------------------------------------------------
async def test_what_is_asked_for_is_said_at_once_and_withdrawn_with_the_next_word() -> None:
    wall = InMemoryHub()
    board = ProcessBoard(wall, member="a-0")
    speaker = LoadReporter(board, loads=lambda: {"f-2@v1": Load(held={"p": 1})})
    await speaker.request("f-1@v1", 2)
    assert (await board.read())["a-0"].statement == {
        "f-1@v1": Load(asked=2),
        "f-2@v1": Load(held={"p": 1}),
    }
    await speaker.request("f-2@v1", 1)
    assert (await board.read())["a-0"].statement["f-2@v1"] == Load(held={"p": 1}, asked=1)
    await speaker.withdraw("f-1@v1")
    await speaker.withdraw("f-1@v1")
    await speaker.report()
    assert "f-1@v1" not in (await board.read())["a-0"].statement
    await speaker.aclose()
    assert await board.read() == {}


async def test_asking_never_fails_and_what_was_not_heard_is_said_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Deaf(ProcessBoard):
        is_deaf = True

        async def post(self, statement, pokes=()):  # type: ignore[no-untyped-def]
            if self.is_deaf:
                raise BoardUnreachable("Redis at x does not answer")
            await super().post(statement, pokes)

    board = Deaf(member="a-0")
    speaker = LoadReporter(board, loads=dict)
    await speaker.request("f-1@v1", 2)
    await speaker.report()
    assert caplog.text.count("not delivered") == 1
    board.is_deaf = False
    await speaker.report()
    assert (await board.read())["a-0"].statement["f-1@v1"].asked == 2


def test_pods_of_the_revisions_own_and_instances_in_promoted_ones_are_reported_apart() -> None:
    held = {
        "own": (("i-1",), "f@v1"),
        "warm": (("i-2", "i-3"), "f@v1"),
        "template": ((), "f@v1"),  # it is kept for its Template, without an instance
    }
    loads = loads_of((), {}, held, 0.0, promoted={"warm", "template"}, promised=lambda _: 2)
    assert loads == {"f@v1": Load(held={"own": 0}, promoted={"i-2": 0, "i-3": 0}, promised=2)}
    said = to_text({"f@v1": Load(held={"own": 1})}).replace(',"promoted":{},"promised":0', "")
    assert from_text(said) == {"f@v1": Load(held={"own": 1})}, "of the version before"

"""Following the controller, and doing without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.routing.config_feed import ConfigCache, ConfigWatcher
from activator.routing.route_table import RouteTable
from pilotlight import errors
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import FeedChange
from tests.activator.routing.test_route_table import address
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.routes import change, empty_table, route_of, spec_of
from tests.fakes.waiting import until


class FakeController:
    """Answers polls from a list of changes; holds a poll open until there is news."""

    def __init__(self) -> None:
        self.changes: list[FeedChange] = []
        self.news = asyncio.Event()

    def publish(self, item: FeedChange) -> None:
        self.changes.append(item)
        self.news.set()

    async def answer(self, request: WorkerRequest) -> WorkerAnswer:
        after = int(request.path.partition("after=")[2].partition("&")[0])
        fresh = [c for c in self.changes if c.seq > after]
        if not fresh and "wait_s=0" not in request.path:
            self.news.clear()
            await self.news.wait()
            fresh = [c for c in self.changes if c.seq > after]
        seq = self.changes[-1].seq if self.changes else 0
        rows = [{"seq": c.seq, "kind": c.kind, "key": c.key, "value": c.value} for c in fresh]
        return WorkerAnswer(
            body=json.dumps({"seq": seq, "reset": after == 0, "changes": rows}).encode()
        )


@pytest.fixture(name="controller")
async def _controller(short_tmp: Path) -> AsyncIterator[tuple[FakeController, FakeWorker]]:
    fake = FakeController()
    server = await FakeWorker(short_tmp / "c.sock", fake.answer).start()
    yield fake, server
    await server.die()


@contextlib.asynccontextmanager
async def following(table: RouteTable, directory: Path) -> AsyncIterator[ConfigWatcher]:
    follower = ConfigWatcher(
        table=table,
        controller=Endpoint.at(directory / "c.sock"),
        token="t",
        log_path=directory / "routes.ndjson",
    )
    follower.load()
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await follower.aclose()


async def test_changes_reach_the_table_as_they_are_made(
    controller: tuple[FakeController, FakeWorker], short_tmp: Path
) -> None:
    fake, server = controller
    fake.publish(change(1, route_of(spec_of())))
    table = empty_table()
    async with following(table, short_tmp) as follower:
        await follower.first_answer.wait()
        assert table.target(address()).revision == "v1-abcdef"
        fake.publish(change(2, route_of(spec_of(), revision="v2-fedcba")))
        await until(lambda: table.version == 2)

    assert table.target(address()).revision == "v2-fedcba"
    assert server.requests[0].headers["pilotlight-platform-token"] == "t"


async def test_who_catches_up_finds_what_was_published_before(
    controller: tuple[FakeController, FakeWorker], short_tmp: Path
) -> None:
    fake, _ = controller
    fake.publish(change(1, route_of(spec_of())))
    table = empty_table()
    async with following(table, short_tmp) as follower:
        await follower.first_answer.wait()
        for number in range(2, 12):
            fake.publish(change(number, route_of(spec_of(), revision=f"v{number}-fedcba")))
            await follower.catch_up()
            assert table.target(address()).revision == f"v{number}-fedcba"


async def test_without_a_controller_nobody_waits_to_catch_up(short_tmp: Path) -> None:
    follower = ConfigWatcher(
        table=empty_table(),
        controller=Endpoint.at(short_tmp / "none.sock"),
        token="t",
        log_path=short_tmp / "routes.ndjson",
    )
    await follower.catch_up()
    await follower.aclose()


async def test_the_last_routes_stay_in_force_while_the_controller_is_down_and_after_a_restart(
    controller: tuple[FakeController, FakeWorker], short_tmp: Path
) -> None:
    fake, server = controller
    fake.publish(change(1, route_of(spec_of())))
    async with following(empty_table(), short_tmp) as follower:
        await follower.first_answer.wait()
    await server.die()

    table = empty_table()
    async with following(table, short_tmp) as follower:
        assert table.target(address()).revision == "v1-abcdef"
        assert "disconnected version 1" in repr(follower)


def test_a_torn_last_line_on_disk_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "routes.ndjson"
    log = ConfigCache(path)
    list(log.load())
    log.append([change(1, route_of(spec_of("a"))), change(2, route_of(spec_of("b")))])
    log.close()
    path.write_bytes(path.read_bytes()[:-20])

    with contextlib.closing(ConfigCache(path)) as again:
        assert [c.seq for c in again.load()] == [1]


def test_the_log_on_disk_does_not_grow_with_the_number_of_changes(tmp_path: Path) -> None:
    log = ConfigCache(tmp_path / "routes.ndjson")
    list(log.load())
    for seq in range(3000):
        log.append([change(seq, route_of(spec_of()))])
    log.close()

    assert len((tmp_path / "routes.ndjson").read_bytes().splitlines()) < 1200
    with contextlib.closing(ConfigCache(tmp_path / "routes.ndjson")) as again:
        assert [c.seq for c in list(again.load())][-1] == 2999


def test_a_removal_on_disk_is_a_removal_after_a_restart(tmp_path: Path) -> None:
    log = ConfigCache(tmp_path / "routes.ndjson")
    list(log.load())
    log.append(
        [
            change(1, route_of(spec_of())),
            FeedChange(seq=2, kind="function", key=change(1, route_of(spec_of())).key, value=None),
        ]
    )
    log.close()
    table = empty_table()
    with contextlib.closing(ConfigCache(tmp_path / "routes.ndjson")) as again:
        for item in again.load():
            table.apply(item)

    with pytest.raises(errors.NotFound):
        table.target(address())


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_routes_on_disk_from_before_there_were_seals_are_asked_for_again(
    tmp_path: Path, is_sealed: bool
) -> None:
    item = change(7, route_of(spec_of()))
    for document in item.value["revisions"].values():
        document["launch"]["labels"] = {"grant": "0" * 64} if is_sealed else {}
    log = ConfigCache(tmp_path / "routes.ndjson")
    list(log.load())
    log.append([item])
    log.close()
    table = empty_table()
    follower = ConfigWatcher(
        table=table,
        controller=Endpoint.at(tmp_path / "c.sock"),
        token="t",
        log_path=tmp_path / "routes.ndjson",
        needs_seals=True,
    )
    assert (follower.load(), table.version) == ((1, 7) if is_sealed else (0, 0))
    await follower.aclose()
    assert bool((tmp_path / "routes.ndjson").read_bytes()) is is_sealed

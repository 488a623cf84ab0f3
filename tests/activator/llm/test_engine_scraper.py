"""Engines are asked what they do: those with calls often, idle ones seldom, and nobody else is held
up by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.llm.engine_scraper import IDLE_EVERY_S, MAX_BYTES, EngineScraper, read
from activator.llm.engine_state import EngineState
from activator.routing.route_table import CallTarget
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import PATIENCE_S
from tests.activator.llm.worlds import World, started
from tests.fakes.engine.engine import EngineFake
from tests.fakes.engine.metrics import exposition
from tests.fakes.fake_worker import Behaviour, FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.routes import spec_of

SCALING = Scaling(max_instances=4)


@pytest.fixture(name="world")
async def _world(short_tmp: Path) -> AsyncIterator[World]:
    async with World.running(short_tmp) as world:
        yield world


async def test_an_engine_with_calls_is_asked_each_time_and_an_idle_one_seldom(world: World) -> None:
    throttler = world.engine(scaling=SCALING)
    busy, _ = await started(throttler, 2)
    looks: list[CallTarget] = []
    scraper = EngineScraper(
        world.scaler.throttlers,
        deadline_s=PATIENCE_S,
        seen=lambda target, _: looks.append(target),
        clock=world.clock,
    )
    await scraper.scrape()
    assert len(looks) == 2, "what has just come is looked at once"

    throttler.set_desired_instances(1)
    reservation = throttler.reserve_nowait()
    assert reservation is not None
    assert reservation.instance is busy
    for _ in range(3):
        world.clock.advance(2.0)
        await scraper.scrape()
    assert len(looks) == 2 + 3

    reservation.release()
    world.clock.advance(2.0)
    await scraper.scrape()
    assert len(looks) == 2 + 3 + 1, "once more when its last call has ended"
    world.clock.advance(2.0)
    await scraper.scrape()
    assert len(looks) == 2 + 3 + 1
    world.clock.advance(IDLE_EVERY_S)
    await scraper.scrape()
    assert len(looks) == 2 + 3 + 1 + 2


async def test_a_look_is_no_call_and_what_it_saw_is_told(world: World) -> None:
    throttler = world.engine(scaling=SCALING)
    (instance,) = await started(throttler, 1)
    before = (instance.calls, instance.idle_since, throttler.load.last_call_at)
    told: list[tuple[CallTarget, EngineState]] = []
    scraper = EngineScraper(
        world.scaler.throttlers,
        deadline_s=PATIENCE_S,
        seen=lambda target, view: told.append((target, view)),
        clock=world.clock,
    )
    world.clock.advance(5.0)

    await scraper.scrape()

    assert (instance.calls, instance.idle_since, throttler.load.last_call_at) == before
    assert instance.in_flight == 0
    assert list(scraper.views()) == [instance.id]
    assert told == [(throttler.target, scraper.views()[instance.id])]
    assert scraper.known()[instance.id][0] is throttler.target


async def test_functions_that_are_no_language_models_are_never_asked(world: World) -> None:
    (instance,) = await started(world.deploy(spec_of(scaling=SCALING)), 1)

    await EngineScraper(world.scaler.throttlers, deadline_s=PATIENCE_S, clock=world.clock).scrape()

    assert world.fleet.workers[instance.id].requests == []


async def test_who_ended_while_it_was_asked_is_forgotten(world: World) -> None:
    throttler = world.engine(scaling=SCALING)
    (instance,) = await started(throttler, 1)
    scraper = EngineScraper(world.scaler.throttlers, deadline_s=PATIENCE_S, clock=world.clock)

    looking = asyncio.create_task(scraper.scrape())
    await asyncio.sleep(0)
    throttler.instance_exited(instance.id, "crashed")
    await looking

    assert scraper.views() == {}


async def test_an_engine_that_does_not_answer_is_not_known_and_keeps_its_slots(
    world: World,
) -> None:
    throttler = world.engine(scaling=SCALING)
    (instance,) = await started(throttler, 1)
    await world.fleet.engines[instance.id].die()
    scraper = EngineScraper(world.scaler.throttlers, deadline_s=PATIENCE_S, clock=world.clock)

    for _ in range(5):
        await scraper.scrape()
        world.clock.advance(IDLE_EVERY_S)

    assert scraper.views() == {}
    assert instance.capacity == 8


async def answering(directory: Path, behaviour: Behaviour) -> FakeWorker:
    return await FakeWorker(directory / "w.sock", behaviour).start()


async def test_an_engine_that_hangs_says_nothing(short_tmp: Path) -> None:
    async def hang(_: WorkerRequest) -> WorkerAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    worker = await answering(short_tmp, hang)
    assert await read(str(worker.path), deadline_s=0.05) is None
    await worker.aclose()


async def test_nobody_there_says_nothing(short_tmp: Path) -> None:
    assert await read(str(short_tmp / "nobody.sock")) is None


@pytest.mark.parametrize("count", [3, 1 + MAX_BYTES // 65536])
async def test_an_answer_in_pieces_is_read_whole_and_one_without_end_is_not(
    short_tmp: Path, count: int
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield exposition(EngineFake()).encode()
        for _ in range(count):
            yield b"#" * 65535 + b"\n"

    async def stream(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=pieces(), content_type="text/plain")

    worker = await answering(short_tmp, stream)
    found = await read(str(worker.path), deadline_s=30.0)
    assert (found is not None) == (count == 3)
    await worker.aclose()

"""A worker's way through real CRIU: stand still, be dumped, come back in another slot; and what is left behind when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.criu.runs import Criu
from snapshotter.criu.self_test import SelfTest
from tests.fakes.agent_home import AgentHome
from tests.fakes.slot_workshop import Workshop, workshop

pytestmark = pytest.mark.root


@pytest.fixture
async def shop(short_tmp: Path, criu: Criu, criu_proof: SelfTest) -> AsyncIterator[Workshop]:
    async with workshop(AgentHome(short_tmp), criu, criu_proof.kdat) as shop:
        yield shop


async def test_a_fork_of_a_template_comes_back_in_another_slot_and_serves(shop: Workshop) -> None:
    template = await shop.boot(boot=["remember:warm"])
    sibling = await shop.start(template)
    image = await shop.dump(template)

    place = await shop.restore(image)
    print(place.ms)
    running = await shop.start(place, in_place=True, env={"TOKEN": "t"})

    assert place.slot.worker == "serving"
    assert await shop.ask(place, running, "/memory") == ["warm"]
    assert await shop.ask(place, running, "/env/TOKEN") == "t"
    assert await shop.ask(place, running, "/hostname") == place.slot.id
    assert await shop.ask(template, sibling, "/memory") == ["warm"]

"""Following the feed: waiting, being woken, being let go."""

from __future__ import annotations

import asyncio

from snapshotter.agent.launch_signature import KEY_LABEL, LaunchSigner
from snapshotter.types import LaunchSpec
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec


async def _waits(controller: Controller) -> None:
    """Return once a follower waits for the bell."""
    registry = controller.context.metrics.registry
    while not registry.get_sample_value("pilotlight_controller_feed_followers"):
        await asyncio.sleep(0.001)


async def test_a_follower_is_woken_by_the_commit_not_by_a_clock(controller: Controller) -> None:
    seq = int(str((await controller.feed())["seq"]))
    waiting = asyncio.create_task(controller.feed(seq, wait_s=30.0))
    await _waits(controller)  # a follower that has not read yet would find the change by reading
    assert not waiting.done()
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    page = await asyncio.wait_for(waiting, 20)
    assert [change["key"].rpartition("/")[2] for change in page["changes"]] == ["hello"]  # type: ignore[attr-defined]


async def test_nothing_new_is_an_empty_page_after_the_wait_and_no_change_at_all_stays_silent(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    seq = int(str((await controller.feed())["seq"]))
    waiting = asyncio.create_task(controller.feed(seq, wait_s=0.05))
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    assert await waiting == {"seq": seq, "reset": False, "more": False, "changes": []}


async def test_closing_releases_every_follower(controller: Controller) -> None:
    seq = int(str((await controller.feed())["seq"]))
    waiting = asyncio.create_task(controller.feed(seq, wait_s=30.0))
    await _waits(controller)
    controller.context.notifier.close()
    assert (await asyncio.wait_for(waiting, 20))["changes"] == []


async def test_launch_documents_carry_the_seal_that_the_node_agent_asks_for(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    page = await controller.feed()
    value = next(change["value"] for change in page["changes"] if change["kind"] == "function")  # type: ignore[attr-defined]
    launches = [
        LaunchSpec.from_json(document["launch"]) for document in value["revisions"].values()
    ]
    grants = LaunchSigner(controller.context.key.derived(KEY_LABEL))
    assert launches
    assert all(grants.verify(launch) for launch in launches)

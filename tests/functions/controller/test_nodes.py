"""What agents report of their nodes, and who may see it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from cryptography.fernet import Fernet

from pilotlight.controller.kubernetes import node_reports
from pilotlight.controller.kubernetes.node_reports import FRESH_S, NodeReports
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import FEED_PATH
from snapshotter.node_reports import NODES_PATH, NodeReport
from tests.fakes.node_reports import node_report
from tests.functions.controller.conftest import Controller


async def post(controller: Controller, body: object, *, token: str | None = None) -> int:
    headers = {HEADER_PLATFORM_TOKEN: token or controller.context.key.token}
    return (await controller.client(None).post(NODES_PATH, json=body, headers=headers)).status_code


def test_a_report_survives_the_wire() -> None:
    report = node_report(weights=["a" * 64], revisions=["f-1@v1"])

    assert NodeReport.from_json(report.to_json()) == report


async def test_the_operator_sees_the_nodes_as_they_last_reported(controller: Controller) -> None:
    assert await post(controller, node_report(weights=["a" * 64]).to_json()) == 204
    assert await post(controller, node_report(weights=["a" * 64, "b" * 64]).to_json()) == 204
    controller.clock.now += FRESH_S + 1
    assert await post(controller, node_report("node-0").to_json()) == 204

    (zero, one) = (await controller.http.get("/v1/nodes")).json()["nodes"]

    assert (zero["node"], zero["is_fresh"], one["node"], one["is_fresh"]) == (
        "node-0",
        True,
        "node-1",
        False,
    )
    assert one["gpu_use"] == [
        {
            "product": "NVIDIA H100 80GB HBM3",
            "uuid": one["gpu_use"][0]["uuid"],
            "total_bytes": one["gpu_use"][0]["total_bytes"],
            "used_bytes": None,
            "sm_utilisation": None,
            "tenant": "",
            "function": "",
        }
    ], "an agent without NVML tells no figures"
    assert (one["weights"], one["gpus"], one["gpus_free"], one["pods"]) == (
        2,
        ["NVIDIA H100 80GB HBM3"],
        1,
        3,
    )


async def test_the_operator_sees_how_busy_a_gpu_is_and_whose_it_is(controller: Controller) -> None:
    report = node_report()
    (gpu,) = report.gpus
    holder = {"tenant": "t-1", "environment": "main", "app": "chat", "function": "Llama"}
    busy = replace(gpu, used_bytes=5, sm_utilisation=0.25, holder=holder)
    assert await post(controller, replace(report, gpus=(busy,)).to_json()) == 204
    (node,) = (await controller.http.get("/v1/nodes")).json()["nodes"]
    (use,) = node["gpu_use"]
    assert (use["used_bytes"], use["sm_utilisation"]) == (5, 0.25)
    assert (use["tenant"], use["function"]) == ("t-1", "chat/Llama")


async def test_nobody_but_our_own_processes_reports_and_tenants_see_no_nodes(
    controller: Controller,
) -> None:
    assert await post(controller, node_report().to_json(), token="wrong") == 403
    async with controller.client(await controller.other_tenant()) as other:
        assert (await other.get("/v1/nodes")).status_code == 403


async def test_agents_with_a_key_of_their_own_report_with_it_and_can_do_nothing_else(
    controller: Controller,
) -> None:
    own = PlatformKey(Fernet.generate_key())
    assert await post(controller, node_report().to_json(), token=own.node_token) == 403
    knowing = replace(controller, context=replace(controller.context, node_key=own))
    assert await post(knowing, node_report().to_json(), token=own.node_token) == 204
    assert await post(knowing, node_report().to_json()) == 204
    async with knowing.client(None) as http:
        assert (
            await http.get(FEED_PATH, headers={HEADER_PLATFORM_TOKEN: own.node_token})
        ).status_code == 403


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"node": "n", "version": "1", "colour": "red"},
        {"node": "../x", "version": "1"},
        {"node": 5, "version": ""},
    ],
)
async def test_what_is_no_report_is_refused(controller: Controller, body: object) -> None:
    assert await post(controller, body) == 400
    assert controller.context.nodes.all() == []


async def test_whoever_waits_hears_of_what_became_hot_and_not_of_every_report() -> None:
    known = NodeReports()
    waiting = asyncio.create_task(known.wait_changed())
    known.take(node_report(), now=0.0)
    await waiting
    known.take(node_report(), now=10.0)

    again = asyncio.create_task(known.wait_changed())
    await asyncio.sleep(0)
    assert not again.done()
    known.take(node_report(weights=["a" * 64]), now=20.0)
    await again
    assert list(known.fresh(now=20.0 + FRESH_S)) == ["node-1"]
    assert known.fresh(now=21.0 + FRESH_S) == {}


def test_nodes_that_are_gone_for_good_are_forgotten_and_there_is_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_reports, "MAX_NODES", 2)
    known = NodeReports()
    for at, name in enumerate(["a", "b", "c"]):
        known.take(node_report(name), now=float(at))
    assert [k.report.node for k in known.all()] == ["b", "c"]

    known.take(node_report("d"), now=node_reports.FORGET_S + 2.5)

    assert [k.report.node for k in known.all()] == ["d"]

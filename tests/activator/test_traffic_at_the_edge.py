"""Traffic over real HTTP: tags in every place that they may be named, arms on answers and records,
several revisions that stay warm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import unix_serve

from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.traffic import Arm, ExperimentTraffic
from tests.activator.conftest import KEY, Edge
from tests.activator.gateway.test_fast_path import begun, in_flight
from tests.activator.gateway.test_http_proxy import HEADERS, Chat, tell
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.fake_worker import Script, WorkerRequest
from tests.fakes.routes import TENANT, spec_of, split_route

V1, V2 = "v1-aaaaaa", "v2-bbbbbb"
ARMS = (Arm(name="a", revision=V1, share=50), Arm(name="b", revision=V2, share=50))
HALVES = ExperimentTraffic(id="x-1", salt="s-1", unit="header:x-user", percent=100, arms=ARMS)


def hello(**more: Any) -> FunctionRoute:
    return split_route(spec_of(), {V1: 100}, named=(V2,), tags={"next": V2}, **more)


def requests(edge: Edge) -> list[WorkerRequest]:
    return [request for worker in edge.fleet.workers.values() for request in worker.requests]


async def revision(edge: Edge, path: str = "shop/hello:invoke", **more: Any) -> str:
    answer = await edge.call(path, json={"x": 1}, **more)
    assert answer.status_code == 200, answer.text
    return answer.headers["pilotlight-revision"]


async def test_a_tag_is_asked_for_in_the_path_a_header_or_the_query(edge: Edge) -> None:
    edge.add(hello())
    for _ in range(2):  # cold, then warm
        assert await revision(edge) == V1
        assert await revision(edge, "shop/hello@next:invoke") == V2
        assert await revision(edge, f"shop/hello@{V1}:invoke") == V1
        assert await revision(edge, headers={"pilotlight-tag": "next"}) == V2
        assert await revision(edge, "shop/hello:invoke?tag=next") == V2
        assert (
            await revision(
                edge, "shop/hello@next:invoke?tag=nowhere", headers={"pilotlight-tag": "nowhere"}
            )
            == V2
        )


async def test_a_tag_that_is_not_there_is_not_found_and_another_tenants_is_forbidden(
    edge: Edge,
) -> None:
    edge.add(hello())
    for _ in range(2):
        for path in ("shop/hello@nowhere:invoke", "shop/hello:invoke?tag=nowhere"):
            answer = await edge.call(path, json={"x": 1})
            assert (
                answer.status_code,
                "its tags are next" in str(problem_of(answer)["detail"]),
            ) == (404, True)
    edge.add_tenant("owner")
    edge.add_tenant("acme", tenant="t-2")
    edge.add_key("pl_theirs", tenant="t-2")
    edge.add(split_route(spec_of(access=("acme",)), {V1: 100}, named=(V2,), tags={"next": V2}))
    url = f"{edge.url}/t/owner/v1/functions/shop/hello"
    theirs = {"authorization": "Bearer pl_theirs"}
    assert (await edge.client.post(f"{url}:invoke", json={"x": 1}, headers=theirs)).headers[
        "pilotlight-revision"
    ] == V1
    for asked in (f"{url}@next:invoke", f"{url}@{V2}:invoke", f"{url}:invoke?tag=next"):
        assert (await edge.client.post(asked, json={"x": 1}, headers=theirs)).status_code == 403


async def test_a_pinned_tenant_gets_its_revision_whatever_the_weights(edge: Edge) -> None:
    edge.add_tenant("owner")
    edge.add(hello(pins={"owner": V2}))
    assert [await revision(edge) for _ in range(3)] == [V2, V2, V2]


async def test_calls_of_several_revisions_stay_warm_and_make_no_task(
    edge: Edge, script: Script
) -> None:
    edge.add(split_route(spec_of(), {V1: 50, V2: 50}, sticky="header:x-user"))
    by_user = {f"u-{n}": await revision(edge, headers={"x-user": f"u-{n}"}) for n in range(12)}
    assert set(by_user.values()) == {V1, V2}
    script.now = forever
    tasks = [
        asyncio.create_task(edge.call(json={"x": 1}, headers={"x-user": user}))
        for user in list(by_user)[:1]
    ]
    await until(begun(edge, 13))
    names = [t.get_coro().__qualname__ for t in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert not any("run_asgi" in name for name in names)
    for task in tasks:
        task.cancel()
    await until(lambda: in_flight(edge) == 0)


async def test_the_arm_is_on_the_answer_the_workers_request_and_the_record(edge: Edge) -> None:
    edge.add(hello(experiment=HALVES))
    answers = [
        await edge.call(json={"x": 1}, headers={"x-user": user})
        for user in ("ada", "bob", "eve", "ada")
        for _ in range(2)
    ]
    arms = [answer.headers["pilotlight-arm"] for answer in answers]
    assert arms[0] == arms[1] == arms[6] == arms[7]
    served = {"a": V1, "b": V2}
    assert [served[arm] for arm in arms] == [
        answer.headers["pilotlight-revision"] for answer in answers
    ]
    assert sorted(request.headers["pilotlight-arm"] for request in requests(edge)) == sorted(arms)
    records = await edge.settle()
    by_call = {record.call: record for record in records.values()}
    for answer in answers:
        record = by_call[answer.headers["x-request-id"]]
        assert (record.experiment, record.arm, record.revision) == (
            "x-1",
            answer.headers["pilotlight-arm"],
            answer.headers["pilotlight-revision"],
        )
    assert len({record.unit for record in by_call.values()}) == 3


async def test_many_units_cost_each_way_nothing(edge: Edge) -> None:
    edge.add(hello(experiment=HALVES))
    arms = {
        f"u-{n}": (await edge.call(json={"x": 1}, headers={"x-user": f"u-{n}"})).headers[
            "pilotlight-arm"
        ]
        for n in range(40)
    }
    for user, arm in arms.items():  # warm by now
        assert (await edge.call(json={"x": 1}, headers={"x-user": user})).headers[
            "pilotlight-arm"
        ] == arm
    assert len({record.unit for record in (await edge.settle()).values()}) == 40
    authorization = f"Bearer {KEY}".encode()
    routes = [
        edge.gateway.find_warm(
            b"/v1/functions/shop/hello:invoke",
            {b"authorization": authorization, b"x-user": user.encode()},
        )
        for user in arms
    ]
    assert len({id(warm.route.response_template) for warm in routes if warm is not None}) == 2


async def test_a_call_outside_of_experiments_says_nothing_of_arms(edge: Edge) -> None:
    edge.add(hello())
    answer = await edge.call(json={"x": 1}, headers={"pilotlight-arm": "mine"})
    assert "pilotlight-arm" not in answer.headers
    assert all("pilotlight-arm" not in request.headers for request in requests(edge))
    (record,) = (await edge.settle()).values()
    assert (record.experiment, record.arm, record.unit) == ("", "", "")


async def test_a_submitted_call_goes_to_the_tag_that_it_names(edge: Edge) -> None:
    edge.add(hello())
    receipt = await edge.call("shop/hello@next:submit", json={"x": 1})
    assert receipt.status_code == 202
    await until(lambda: len(requests(edge)) == 1)
    await until(lambda: in_flight(edge) == 0)
    assert {record.revision for record in (await edge.settle()).values()} == {V2}


async def test_a_new_split_is_followed_by_the_next_request(edge: Edge) -> None:
    edge.add(hello())
    assert await revision(edge) == V1
    edge.add(split_route(spec_of(), {V2: 100}, named=(V1,), tags={"old": V1}))
    assert await revision(edge) == V2
    edge.tell(
        "function",
        f"{TENANT}/main/shop/hello",
        {**hello().to_json(), "document": {"weights": {V1: 100}, "segments": []}, "id": 5},
    )
    assert await revision(edge, "shop/hello@old:invoke") == V1


class TestRaw:
    """Raw HTTP: the path and the header; its query belongs to the function."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> object:
        return tell

    @pytest.fixture(name="site")
    def _site(self, edge: Edge) -> str:
        spec = spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))
        edge.add(split_route(spec, {V1: 100}, named=(V2,), tags={"next": V2}))
        return f"{edge.url}/fn/shop/site"

    async def test_a_tag_has_an_address_of_its_own_and_links_stay_there(
        self, edge: Edge, site: str
    ) -> None:
        plain = await edge.client.get(f"{site}/a/b?tag=next", headers=HEADERS)
        assert (plain.headers["pilotlight-revision"], plain.text.splitlines()[0]) == (
            V1,
            "GET /asgi/a/b?tag=next",
        )
        tagged = await edge.client.get(f"{site}@next/a/b?q=1", headers=HEADERS)
        assert (tagged.headers["pilotlight-revision"], tagged.text.splitlines()[0]) == (
            V2,
            "GET /asgi/a/b?q=1",
        )
        assert "pilotlight-root-path: /fn/shop/site@next" in tagged.text
        by_header = await edge.client.get(site, headers={**HEADERS, "pilotlight-tag": "next"})
        assert by_header.headers["pilotlight-revision"] == V2
        assert (await edge.client.get(f"{site}@nowhere/", headers=HEADERS)).status_code == 404

    async def test_a_websocket_goes_to_the_tag_in_its_path(self, edge: Edge, site: str) -> None:
        await edge.client.get(f"{site}@next/", headers=HEADERS)  # brings its instance up
        (socket,) = {Path(info.socket) for info in edge.fleet.infos.values()}
        socket.unlink()
        chat = Chat()
        address = f"{site.replace('http', 'ws', 1)}@next/chat"
        async with (
            unix_serve(chat, str(socket)),
            connect(address, additional_headers=HEADERS) as talk,
        ):
            await talk.send("hello")
            assert await talk.recv() == "hello"
        await until(lambda: in_flight(edge) == 0)
        assert {record.revision for record in (await edge.settle()).values()} == {V2}


@pytest.mark.parametrize("verb", ["invoke", "submit", "warmup"])
async def test_paths_that_name_no_revision_are_not_remembered(edge: Edge, verb: str) -> None:
    edge.add(hello())
    for n in range(5):
        assert (await edge.call(f"shop/hello@nothing-{n}:{verb}", json={"x": 1})).status_code == 404
    long = await edge.call(f"shop/hello@{'t' * 3000}:{verb}", json={"x": 1})

    assert (long.status_code, repr(edge.functions.routes)) == (
        404,
        "<RouteCache 0 routes, 0 heads>",
    )
    assert len(long.content) < 1000
    assert "at most 63 characters" in long.json()["detail"]


@pytest.mark.parametrize(
    "weights", [{V1: 100}, {V1: 50, V2: 50}], ids=["one revision", "two revisions"]
)
@pytest.mark.parametrize("verb", ["invoke", "submit", "warmup"])
async def test_paths_that_name_no_method_are_not_remembered(
    edge: Edge, verb: str, weights: dict[str, int]
) -> None:
    edge.add(split_route(spec_of(), weights))
    answers = [
        await edge.call(f"shop/hello.{method}:{verb}", content=b"{")
        for method in ("nothing", "m" * 3000)
    ]

    assert repr(edge.functions.routes) == "<RouteCache 0 routes, 0 heads>"
    if verb != "warmup":  # which is the function's, and looks at no method
        assert [answer.status_code for answer in answers] == [404, 404]
        assert len(answers[1].content) < 1000


@pytest.mark.parametrize(
    "more", [{"headers": {"pilotlight-tag": "t" * 3000}}, {"params": {"tag": "t" * 3000}}]
)
async def test_a_tag_longer_than_a_name_is_refused_wherever_it_stands(
    edge: Edge, more: dict[str, Any]
) -> None:
    edge.add(hello())
    answer = await edge.call(json={"x": 1}, **more)

    assert answer.status_code == 404
    assert len(answer.content) < 1000

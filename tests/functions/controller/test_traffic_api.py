"""`/v1/functions/{app}/{function}/traffic`: what can be said of it, by whom, and two operators at
once."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import feed, tables
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.slo import observations
from pilotlight.spec.observations import SHADOW_ARM, Observation, latency_bucket
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec
from tests.functions.controller.test_traffic import deployed, published

PATH = "/v1/functions/search/hello/traffic"


async def change(controller: Controller, status: int = 200, **body: Any) -> httpx.Response:
    answer = await controller.http.patch(PATH, json=body)
    assert answer.status_code == status, answer.text
    return answer


async def test_traffic_is_read_with_its_generation_as_the_etag(controller: Controller) -> None:
    _, second = await deployed(controller)
    answer = await controller.http.get(PATH)
    body = answer.json()
    assert (body["app"], body["function"], body["weights"], body["aliases"]) == (
        "search",
        "hello",
        {second: 100},
        {"stable": second},
    )
    assert answer.headers["etag"] == f'"{body["generation"]}"'
    assert (body["sticky"], body["max_candidate"], body["shadow"], body["experiment"]) == (
        "request",
        100,
        None,
        None,
    )


async def test_a_put_says_all_of_it_and_a_patch_a_part(controller: Controller) -> None:
    copied, first, second = await deployed(controller, 3)
    put = {
        "weights": {first: 10, "stable": 90},
        "tags": {"old": first},
        "sticky": "key",
        "pins": {"default": first},
    }
    assert (await controller.http.put(PATH, json=put)).status_code == 200
    await change(
        controller,
        tags={"next": second, "old": None},
        shadow={"revision": "v1", "percent": 5},
        max_candidate=20,
    )
    body = (await controller.http.get(PATH)).json()
    assert (body["weights"], body["tags"], body["sticky"], body["pins"]) == (
        {first: 10, second: 90},
        {"next": second},
        "key",
        {"default": first},
    )
    assert body["shadow"] == {"revision": copied, "percent": 5.0, "max_compute": 0.15}
    await change(controller, shadow=None, pins={"default": None})
    route = (await published(controller)).document
    assert (route["shadow"], route["pins"], route["max_candidate"]) == (None, {}, 20)
    assert (await controller.http.put(PATH, json={"weights": {second: 100}})).json()["tags"] == {}


async def test_what_activators_are_told_of_a_function_has_a_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await deployed(controller)
    await change(controller, tags={"old": first})
    with controller.context.store.read() as sql:
        size = feed.size_bytes(sql, feed.FUNCTION, f"{await controller.tenant()}/main/search/hello")
    monkeypatch.setattr(feed_publisher, "MAX_ROUTE_BYTES", size)
    await change(controller, weights={first: 50, second: 50})  # a few bytes
    await change(controller, weights={second: 100})
    refusal = await controller.http.patch(
        PATH, json={"tags": {f"a-long-name-{n}": first for n in range(60)}}
    )
    assert "Remove tags" in refused(refusal, 413)
    assert (await controller.http.get(PATH)).json()["tags"] == {"old": first}
    grown = spec(
        methods=[
            {
                "name": "",
                "parameters": ["x"],
                "schema": {"type": "object", "description": "x" * 5_000},
            }
        ]
    )
    assert "Remove tags" in refused(
        await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [grown], "allow_breaking": True}
        ),
        413,
    )
    monkeypatch.setattr(feed_publisher, "MAX_ROUTE_BYTES", 100)
    await change(controller, tags={"old": None})  # what is smaller than before is taken
    assert (await controller.http.post("/v1/apps/search:stop")).status_code < 300
    assert dict((await published(controller)).traffic) == {second: 100}


async def test_two_names_of_one_revision_add_up(controller: Controller) -> None:
    first, second = await deployed(controller)
    await change(controller, weights={second: 50, "stable": 40, first: 10})
    assert dict((await published(controller)).traffic) == {first: 10, second: 90}


async def test_who_did_not_see_the_newest_is_told(controller: Controller) -> None:
    first, _ = await deployed(controller)
    seen = (await controller.http.get(PATH)).headers["etag"]
    for headers, body in (({"if-match": seen}, {}), ({}, {"generation": int(seen.strip('"'))})):
        await change(controller, sticky="key" if headers else "tenant")
        answer = await controller.http.patch(
            PATH, json={"weights": {first: 100}, **body}, headers=headers
        )
        assert "has changed" in refused(answer, 409)
    newest = (await controller.http.get(PATH)).headers["etag"]
    assert (
        await controller.http.patch(
            PATH, json={"weights": {first: 100}}, headers={"if-match": newest}
        )
    ).status_code == 200
    for wrong in ("abc", '"-1"', '""'):
        assert "If-Match" in refused(
            await controller.http.patch(PATH, json={}, headers={"if-match": wrong}), 400
        )


@pytest.mark.parametrize(
    "body, status, says",
    [
        ({"weights": {"stable": 90}}, 400, "add up to 90"),
        ({"weights": {"stable": 101}}, 400, "1 to 100"),
        ({"weights": {"nobody": 100}}, 404, "has no revision"),
        ({"tags": {"next": "nobody"}}, 404, "has no revision"),
        ({"tags": {"No Name": "stable"}}, 400, "is not valid"),
        ({"pins": {"nobody": "stable"}}, 400, "there is no tenant"),
        ({"sticky": "cookie"}, 400, "sticky"),
        ({"sticky": None}, 400, "cannot be null"),
        ({"segments": []}, 400, "segments"),
        ({"shadow": {"revision": "stable", "percent": 200}}, 400, "percent"),
        ({"shadow": {"revision": "stable"}}, 400, "cannot be a shadow"),
        ({"max_candidate": 200}, 400, "max_candidate"),
    ],
)
async def test_what_cannot_be_is_refused(
    controller: Controller, body: dict[str, Any], status: int, says: str
) -> None:
    await deployed(controller, 1)
    assert says in refused(await controller.http.patch(PATH, json=body), status)


async def test_the_blast_radius_holds_for_hands_too(controller: Controller) -> None:
    first, second = await deployed(controller)
    await change(controller, max_candidate=10)
    assert "max_candidate allows 10 %" in refused(
        await controller.http.patch(PATH, json={"weights": {first: 30, second: 70}}), 400
    )
    await change(controller, weights={first: 100})


async def test_another_tenants_function_and_one_out_of_reach_are_not_there(
    controller: Controller,
) -> None:
    await deployed(controller, 1)
    assert refused(await controller.client(await controller.other_tenant()).get(PATH), 404)
    bound = controller.client(await controller.new_key(scope="deploy", app="other"))
    assert refused(await bound.patch(PATH, json={"sticky": "key"}), 403)
    invoker = controller.client(await controller.new_key(scope="invoke"))
    assert refused(await invoker.get(PATH), 403)
    assert refused(await controller.http.get("/v1/functions/search/nobody/traffic"), 404)


async def test_a_key_that_is_bound_to_the_function_changes_its_traffic(
    controller: Controller,
) -> None:
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(), spec("other")]}
    )
    assert answer.status_code == 200
    bound = controller.client(
        await controller.new_key(scope="deploy", app="search", function="hello")
    )
    assert (await bound.patch(PATH, json={"sticky": "key"})).status_code == 200
    assert refused(
        await bound.patch("/v1/functions/search/other/traffic", json={"sticky": "key"}), 403
    )


@pytest.mark.parametrize("name", ["stable", "candidate"])
async def test_no_tag_stands_before_what_the_platform_calls_so(
    controller: Controller, name: str
) -> None:
    first, second = await deployed(controller)
    assert "reserved by the platform" in refused(
        await change(controller, 400, tags={name: first}), 400
    )
    body = {"functions": [spec(description="next")], "no_traffic": True, "tag": name}
    refused(await controller.http.post("/v1/apps/search/deploy", json=body), 400)
    assert (await controller.http.get(PATH)).json()["aliases"] == {"stable": second}


async def test_what_became_of_a_shadows_copies_is_shown_with_it(controller: Controller) -> None:
    copied, _ = await deployed(controller)
    without = (await controller.http.get(PATH)).json()
    await change(controller, tags={"copied": copied}, shadow={"revision": copied, "percent": 50})
    empty = (await controller.http.get(PATH)).json()["shadow_result"]
    with controller.context.store.read() as sql:
        function_id = sql.execute(sa.select(tables.functions.c.id)).scalar_one()
    seen = Observation(
        tenant="t",
        function_id=function_id,
        revision=copied,
        arm=SHADOW_ARM,
        minute=int(controller.clock.now // 60) - 1,
        answered=9,
        failed=1,
        compared=8,
        matched=7,
        skipped=3,
        latency={"warm": {latency_bucket(40): 9}},
    )
    with controller.context.store.write() as write:
        observations.ingest_observations(
            write, {"activator": "a", "life": "l", "sequence": 1, "observations": [seen.to_json()]}
        )

    result = (await controller.http.get(PATH)).json()["shadow_result"]

    assert without["shadow_result"] is None
    assert (empty["answered"], empty["p50_ms"]) == (0, None)
    assert {
        name: result[name] for name in ("answered", "failed", "compared", "matched", "skipped")
    } == {
        "answered": 9,
        "failed": 1,
        "compared": 8,
        "matched": 7,
        "skipped": 3,
    }
    assert result["p50_ms"] == pytest.approx(40, rel=0.1)

"""Traces come in from activators, the newest of each tenant stay, and nobody sees another's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pilotlight.controller.analytics import traces
from pilotlight.controller.database.store import Store
from pilotlight.errors import InvalidInput
from pilotlight.protocol import TRACES_PATH
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def trace(
    number: int = 1, *, tenant: str = "t-1", at: float = 1000.0, id: str = "", **more: Any
) -> dict[str, Any]:
    identity = id or f"{number:032x}"
    span = {
        "id": f"{number:016x}",
        "parent": "",
        "name": "POST",
        "kind": "server",
        "begin_ms": 0.0,
        "ms": 12.5,
        "error": "",
        "attributes": {"pilotlight.arm": more.pop("arm", "")},
    }
    fields = {
        "environment": "main",
        "app": "search",
        "function": "embed",
        "revision": "v1-a",
        "start_kind": "COLD",
        "kept_for": "cold",
        "status": 200,
        "duration_ms": 12.5,
    }
    return {
        "id": identity,
        "call": f"req-{number:032x}",
        "tenant": tenant,
        "at": at,
        "spans": [span],
        **fields,
        **more,
    }


def kept(store: Store, tenant: str = "t-1", **wanted: Any) -> list[str]:
    with store.read() as sql:
        return [
            row["call"][-2:]
            for row in traces.listing(sql, traces.TraceQuery(tenant=tenant, **wanted), limit=100)
        ]


def put(store: Store, *given: dict[str, Any], keep: int = 100) -> int:
    with store.write() as write:
        return traces.put(write, given, keep=keep)


def test_only_the_newest_of_each_tenant_stay(store: Store) -> None:
    put(store, *(trace(n, at=n) for n in range(1, 6)), trace(9, tenant="t-2", at=0.5), keep=3)
    assert kept(store) == ["05", "04", "03"]
    assert kept(store, "t-2") == ["09"]


def test_a_trace_that_comes_twice_is_there_once_and_the_last_word_counts(store: Store) -> None:
    put(store, trace(1), trace(1, status=502))
    assert kept(store) == ["01"]
    assert kept(store, failed=True) == ["01"]


def test_none_are_kept_where_the_bound_is_none(store: Store) -> None:
    assert put(store, trace(1), keep=0) == 0
    assert kept(store) == []


def test_filters_narrow_the_list(store: Store) -> None:
    put(
        store,
        trace(1, at=1),
        trace(2, at=2, kept_for="error", status=500, function="rank"),
        trace(3, at=3, arm="b", duration_ms=900.0),
    )
    assert kept(store, function="embed") == ["03", "01"]
    assert kept(store, kept_for="error") == kept(store, failed=True) == ["02"]
    assert kept(store, arm="b") == kept(store, min_ms=100.0) == ["03"]
    assert kept(store, since=2, until=3) == ["02"]
    assert kept(store, before=3, before_call="req-" + "f" * 32) == ["03", "02", "01"]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"spans": []},
        {"at": "soon"},
        {"at": math.nan},
        {"status": None},
        {"status": math.inf},
        {"spans": [{"attributes": []}]},
    ],
)
def test_what_is_no_trace_is_refused_whole(store: Store, broken: dict[str, Any]) -> None:
    given = {**trace(2), **broken} if broken else {}
    with pytest.raises(InvalidInput, match="traces"):
        put(store, trace(1), given)
    assert kept(store) == []


def test_a_clock_that_was_ahead_does_not_keep_out_what_comes_later(
    store: Store, clock: ManualClock
) -> None:
    for n in range(1, 4):
        put(store, trace(n, at=clock.now + 86_400 + n), keep=3)
    clock.now += 60
    put(store, trace(4, at=clock.now - 1), keep=3)
    assert kept(store)[0] == "04"


async def test_a_trace_is_found_by_its_id_and_by_the_calls_in_it(controller: Controller) -> None:
    mine = await controller.tenant()
    both = [trace(n, tenant=mine, id=TRACE_ID, at=1000.0 + n / 10) for n in (1, 2)]
    assert (
        await controller.internal(TRACES_PATH, {"activator": "a-0", "traces": both})
    ).json() == {"accepted": 2}
    by_id = (await controller.http.get(f"/v1/traces/{TRACE_ID}")).json()
    by_call = (await controller.http.get(f"/v1/traces/{both[1]['call']}")).json()
    assert by_id == by_call
    assert [span["begin_ms"] for span in by_id["spans"]] == [0.0, 100.0]
    assert [call["call"] for call in by_id["calls"]] == [both[0]["call"], both[1]["call"]]
    assert by_id["duration_ms"] == 112.5


async def test_pages_follow_each_other(controller: Controller) -> None:
    mine = await controller.tenant()
    await controller.internal(
        TRACES_PATH,
        {"activator": "a-0", "traces": [trace(n, tenant=mine, at=5.0) for n in range(1, 6)]},
    )
    first = (await controller.http.get("/v1/traces", params={"limit": 3})).json()
    second = (
        await controller.http.get("/v1/traces", params={"limit": 3, "cursor": first["cursor"]})
    ).json()
    assert [row["call"][-1] for row in first["traces"] + second["traces"]] == [
        "5",
        "4",
        "3",
        "2",
        "1",
    ]
    assert second["cursor"] is None


async def test_another_tenants_trace_does_not_exist(controller: Controller) -> None:
    await controller.internal(
        TRACES_PATH,
        {"activator": "a-0", "traces": [trace(1, tenant=await controller.tenant(), id=TRACE_ID)]},
    )
    async with controller.client(await controller.other_tenant()) as stranger:
        assert (await stranger.get(f"/v1/traces/{TRACE_ID}")).status_code == 404
        assert (await stranger.get("/v1/traces")).json()["traces"] == []


async def test_a_key_of_one_function_sees_its_traces_only(controller: Controller) -> None:
    mine = await controller.tenant()
    given = [trace(1, tenant=mine), trace(2, tenant=mine, function="rank")]
    await controller.internal(TRACES_PATH, {"activator": "a-0", "traces": given})
    key = await controller.new_key(
        name="narrow", scope="invoke", environment="main", app="search", function="rank"
    )
    async with controller.client(key) as narrow:
        assert [row["function"] for row in (await narrow.get("/v1/traces")).json()["traces"]] == [
            "rank"
        ]
        assert (await narrow.get(f"/v1/traces/{given[0]['call']}")).status_code == 404
        assert (
            await narrow.get("/v1/traces", params={"function": "search/embed"})
        ).status_code == 403
        assert (await narrow.get(f"/v1/traces/{given[1]['call']}")).status_code == 200


async def test_only_the_platforms_own_processes_bring_traces(controller: Controller) -> None:
    answer = await controller.http.post(TRACES_PATH, json={"activator": "a-0", "traces": []})
    assert answer.status_code == 403

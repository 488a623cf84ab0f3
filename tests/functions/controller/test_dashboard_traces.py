"""The dashboard's traces: narrowed, paged, drawn, and nobody else's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pilotlight.protocol import TRACES_PATH
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import usage
from tests.functions.controller.test_dashboard import sign_in
from tests.functions.controller.test_traces import trace


@pytest.fixture(name="session")
async def _session(controller: Controller) -> dict[str, str]:
    return await sign_in(controller, controller.key)


async def page(controller: Controller, session: dict[str, str], path: str, **params: Any) -> str:
    answer = await controller.client(None).get(path, headers=session, params=params)
    assert answer.status_code == 200, answer.text
    return answer.text


async def keep(controller: Controller, *given: dict[str, Any]) -> None:
    assert (
        await controller.internal(TRACES_PATH, {"activator": "a-0", "traces": list(given)})
    ).status_code == 200


def shown(text: str) -> list[str]:
    """Last digits of the calls in the list."""
    return re.findall(r'href="/dashboard/traces/req-[0-9a-f]*([0-9a-f]{2})\?', text)


async def test_a_list_is_narrowed_and_paged(
    controller: Controller, session: dict[str, str]
) -> None:
    mine = await controller.tenant()
    await keep(
        controller,
        *(trace(n, tenant=mine, at=float(n)) for n in range(1, 61)),
        trace(
            0xF0,
            tenant=mine,
            at=99.0,
            function="rank",
            kept_for="error",
            status=502,
            duration_ms=5000.0,
        ),
    )
    newest = await page(controller, session, "/dashboard/traces")
    assert (len(shown(newest)), shown(newest)[0]) == (50, "f0")
    older = re.search(r'rel="next" href="[^"]*before=([^"&]+)', newest)
    assert older is not None
    rest = await page(controller, session, "/dashboard/traces", before=older[1].replace("%7E", "~"))
    assert (len(shown(rest)), shown(rest)[-1]) == (11, "01")
    for narrowed in ({"function": "search/rank"}, {"kept_for": "error"}, {"slower": "1000"}):
        assert shown(await page(controller, session, "/dashboard/traces", **narrowed)) == ["f0"]
    assert "No matching traces" in await page(controller, session, "/dashboard/traces", arm="none")


async def test_one_is_drawn_without_styles_of_its_own_and_its_texts_are_escaped(
    controller: Controller, session: dict[str, str]
) -> None:
    one = trace(1, tenant=await controller.tenant())
    deep = [
        {
            **one["spans"][0],
            "id": f"{n:016x}",
            "parent": f"{n - 1:016x}",
            "name": "<b>x</b>",
            "attributes": {"a<b": "<script>"},
        }
        for n in range(2, 30)
    ]
    await keep(controller, {**one, "spans": [*one["spans"], *deep]})
    text = await page(controller, session, f"/dashboard/traces/{one['call']}")
    assert text.count('class="fall"') == 29
    assert "deep-8" in text
    assert "deep-9" not in text
    assert "<script>" not in re.sub(r"<script[^>]+nonce", "", text)
    assert "style=" not in text
    assert "&lt;b&gt;x&lt;/b&gt;" in text


async def test_a_shadow_links_to_what_it_is_a_copy_of(
    controller: Controller, session: dict[str, str]
) -> None:
    one = trace(1, tenant=await controller.tenant(), kept_for="shadow")
    one["spans"][0]["links"] = ["4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"]
    await keep(controller, one)
    assert "/dashboard/traces/4bf92f3577b34da6a3ce929d0e0e4736?" in await page(
        controller, session, f"/dashboard/traces/{one['id']}"
    )


async def test_a_call_links_to_its_trace_where_there_is_one(
    controller: Controller, session: dict[str, str]
) -> None:
    mine = await controller.tenant()
    traced, bare = f"req-{1:032x}", f"req-{2:032x}"
    records = [
        usage(f"{call}/1", tenant=mine, started_at=controller.clock.now).to_json()
        for call in (traced, bare)
    ]
    await controller.internal("/internal/usage", {"activator": "a", "records": records})
    await keep(controller, trace(1, tenant=mine))
    assert f"/dashboard/traces/{traced}?" in await page(
        controller, session, f"/dashboard/calls/{traced}"
    )
    assert "/dashboard/traces/req" not in await page(
        controller, session, f"/dashboard/calls/{bare}"
    )


async def test_another_tenants_trace_does_not_exist(controller: Controller) -> None:
    one = trace(1, tenant=await controller.tenant())
    await keep(controller, one)
    stranger = await sign_in(controller, await controller.other_tenant())
    answer = await controller.client(None).get(f"/dashboard/traces/{one['call']}", headers=stranger)
    assert answer.status_code == 404
    assert "No traces yet" in await page(controller, stranger, "/dashboard/traces")


async def test_a_key_that_reads_bills_sees_no_traces(controller: Controller) -> None:
    session = await sign_in(controller, await controller.new_key(scope="read-billing"))
    assert (
        await controller.client(None).get("/dashboard/traces", headers=session)
    ).status_code == 403
    assert "/dashboard/traces" not in await page(controller, session, "/dashboard")

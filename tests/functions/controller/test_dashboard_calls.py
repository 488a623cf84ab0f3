"""The dashboard's pages of calls: filters, why a call failed, and calls from the form."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from pilotlight.controller.analytics import recent_calls
from pilotlight.controller.dashboard import call_details
from pilotlight.controller.dashboard.call_details import CallError
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.protocol import ARGUMENTS_PREFIX, CONTENT_PROBLEM, CallRecord
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec, usage
from tests.functions.controller.test_dashboard import sign_in


async def deployed(controller: Controller) -> str:
    """The id of `search/embed`."""
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    return str((await controller.http.get("/v1/apps/search")).json()["functions"][0]["id"])


async def take(controller: Controller, *records: dict[str, Any]) -> None:
    """Add usage records of `search/embed` to the ledger."""
    common = {"tenant": await controller.tenant(), "function_id": await deployed(controller)}
    rows = [
        usage(f"{record.pop('call')}/1", **common, **record).to_json()
        for record in map(dict, records)
    ]
    answer = await controller.internal("/internal/usage", {"activator": "a", "records": rows})
    assert answer.status_code == 200, answer.text


async def test_calls_are_filtered_by_what_the_url_says(controller: Controller) -> None:
    now = controller.clock.now
    await take(
        controller,
        {"call": "req-good", "started_at": now - 10},
        {"call": "req-raised", "started_at": now - 20, "status": 500, "outcome": "error"},
        {"call": "req-left", "started_at": now - 30, "status": 499, "outcome": "cancelled"},
        {"call": "req-cold", "started_at": now - 7200, "start_kind": "COLD"},
        {"call": "req-lost", "started_at": now - 40, "status": 502, "outcome": "lost"},
        {"call": "req-busy", "started_at": now - 50, "status": 503, "outcome": "busy"},
        {"call": "req-unsent", "started_at": now - 60, "status": 502, "outcome": "unsent"},
    )
    session = await sign_in(controller, controller.key)

    async def shown(**params: str) -> set[str]:
        page = await controller.client(None).get("/dashboard/calls", params=params, headers=session)
        assert page.status_code == 200, page.text
        return {
            name
            for name in ("good", "raised", "left", "cold", "lost", "busy", "unsent")
            if f"/dashboard/calls/req-{name}?" in page.text
        }

    assert await shown() == {"good", "raised", "left", "cold", "lost", "busy", "unsent"}
    assert await shown(state="ok") == {"good", "cold"}
    assert await shown(state="failed") == {"raised", "lost"}
    assert await shown(state="lost") == {"lost"}
    assert await shown(state="not_run") == {"busy", "unsent"}
    assert await shown(status="5xx") == {"raised", "lost", "busy", "unsent"}
    assert await shown(status="499") == {"left"}
    assert await shown(status="9" * 30) == set()
    assert await shown(start_kind="COLD", function="search/embed") == {"cold"}
    assert await shown(since="2027-01-15T07:00") == {
        "good",
        "raised",
        "left",
        "lost",
        "busy",
        "unsent",
    }
    assert await shown(until="2027-01-15T07:00") == {"cold"}
    client = controller.client(None)
    for params, status in (({"since": "<b>"}, 400), ({"function": "a/b"}, 404)):
        answer = await client.get("/dashboard/calls", params=params, headers=session)
        assert answer.status_code == status


async def test_attempts_in_which_nothing_ran_are_no_failures(controller: Controller) -> None:
    now = controller.clock.now
    await take(
        controller,
        {"call": "req-raised", "started_at": now - 20, "status": 500, "outcome": "error"},
        {"call": "req-busy", "started_at": now - 50, "status": 503, "outcome": "busy"},
        {"call": "req-unsent", "started_at": now - 60, "status": 502, "outcome": "unsent"},
    )
    lines = (await controller.http.get("/v1/billing/report")).json()["rows"]
    (line,) = [one for one in lines if one["kind"] == "CALL"]
    assert (line["records"], line["errors"]) == (3, 1)
    session, client = await sign_in(controller, controller.key), controller.client(None)
    page = await client.get("/dashboard/calls", headers=session)
    assert page.text.count('class="status bad"') == 1
    one = await client.get("/dashboard/calls/req-busy", headers=session)
    assert 'id="error"' not in one.text


async def test_a_filter_looks_at_a_bounded_number_of_calls_and_the_next_page_goes_on(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_calls, "MAX_SCANNED", 3)
    now, tenant = controller.clock.now, await controller.tenant()
    records = [{"call": f"req-{n}", "started_at": now - n} for n in range(1, 6)]
    await take(controller, *records, {"call": "req-bad", "started_at": now - 6, "status": 500})
    wanted, found = recent_calls.CallFilter(status="5xx"), []
    with controller.context.store.read() as sql:
        where: dict[str, Any] = {"tenant": tenant, "environment": "main", "now": now, "limit": 2}
        page = recent_calls.read(sql, **where, wanted=wanted)
        assert (page.calls, page.is_cut) == ([], True)
        page = recent_calls.read(sql, **where, wanted=wanted, before=page.older)
        found = [one.call for one in page.calls]
    assert (found, page.older, page.is_cut) == (["req-bad"], "", False)


async def test_a_failed_call_tells_why_from_its_own_log(controller: Controller) -> None:
    await take(
        controller,
        {
            "call": "req-bad",
            "status": 500,
            "outcome": "error",
            "start_kind": "COLD",
            "bytes_in": 31,
        },
    )
    controller.agent.lines = [
        {"time": 1.0, "instance": "i-1", "stream": "stderr", "call": "req-bad", "text": text}
        for text in (
            "loading <b>",
            "Traceback (most recent call last):",
            '  File "app.py", line 3, in embed',
            "ValueError: no <i>model</i>",
            f"{ARGUMENTS_PREFIX}text: str of 22",
        )
    ]
    session = await sign_in(controller, controller.key)
    page = await controller.client(None).get("/dashboard/calls/req-bad", headers=session)
    for said in (
        '<p class="pad wrap bad">ValueError: no &lt;i&gt;model&lt;/i&gt;</p>',
        "line 3, in embed",
        "text: str of 22",
        "queue;dur=1, start;dur=2, exec;dur=3",
        "loading &lt;b&gt;",
        "COLD",
        "31 B",
        "$0.00000005",
    ):
        assert said in page.text, said
    (asked,) = [args for name, args in controller.agent.asked if name == "logs"]
    assert (asked["call_id"], asked["labels"]["tenant"]) == ("req-bad", await controller.tenant())
    # a key that reads bills sees the price, and neither lines nor errors from them
    billing = await sign_in(controller, await controller.new_key(scope="read-billing"))
    page = await controller.client(None).get("/dashboard/calls/req-bad", headers=billing)
    assert (page.status_code, "line 3, in embed" in page.text) == (200, False)
    assert len([name for name, _ in controller.agent.asked if name == "logs"]) == 1


def test_an_error_without_a_frame_in_user_code_is_the_line_above_its_arguments() -> None:
    lines = [
        {"text": text} for text in ("done 3", "ValueError: not -4", f"{ARGUMENTS_PREFIX}x: int")
    ]
    assert call_details.error_of(None, lines) == CallError(
        message="ValueError: not -4", traceback="ValueError: not -4", arguments="x: int"
    )
    assert call_details.error_of(None, [{"text": "done 3"}]) == CallError()
    retried = [
        "Traceback (most recent call last):",
        "KeyError: 2",
        f"{ARGUMENTS_PREFIX}x: str of 1",
    ]
    last = call_details.error_of(None, [*lines, *({"text": text} for text in retried)])
    assert (last.message, last.arguments) == ("KeyError: 2", "x: str of 1")


def record(**changes: Any) -> CallRecord:
    """A submitted call that has failed."""
    values = {
        "id": "req-sub",
        "tenant": "t-1",
        "environment": "main",
        "app": "search",
        "function": "embed",
        "method": "",
        "state": "FAILED",
        "sequence": 3,
        "submitted_at": 1_799_999_000.0,
        "status": 500,
        "content_type": CONTENT_PROBLEM,
        "result": base64.b64encode(json.dumps({"detail": "ValueError: <u>"}).encode()).decode(),
    }
    return CallRecord(**{**values, **changes})


async def test_a_submitted_call_shows_its_state_and_result_to_its_own_tenant(
    controller: Controller,
) -> None:
    tenant = await controller.tenant()
    await deployed(controller)
    text = base64.b64encode(b'{"<b>": 1}').decode()
    with controller.context.store.write() as write:
        submitted_calls.put(
            write,
            [
                record(tenant=tenant),
                record(id="req-run", tenant=tenant, state="RUNNING", status=0, result=""),
                record(
                    id="req-ok",
                    tenant=tenant,
                    state="SUCCEEDED",
                    status=200,
                    content_type="application/json",
                    result=text,
                ),
            ],
        )
    client, session = controller.client(None), await sign_in(controller, controller.key)
    failed = await client.get("/dashboard/calls/req-sub", headers=session)
    assert "ValueError: &lt;u&gt;" in failed.text
    running = await client.get("/dashboard/calls/req-run", headers=session)
    assert "data-again" in running.text
    done = await client.get("/dashboard/calls/req-ok", headers=session)
    assert ("{&#34;&lt;b&gt;&#34;: 1}" in done.text, "data-again" in done.text) == (True, False)
    listed = await client.get("/dashboard/calls", params={"state": "RUNNING"}, headers=session)
    assert ("req-run" in listed.text, "req-ok" in listed.text) == (True, False)
    other = await sign_in(controller, await controller.other_tenant())
    assert (await client.get("/dashboard/calls/req-ok", headers=other)).status_code == 404


async def test_a_pickle_and_a_large_result_are_described_and_not_opened(
    controller: Controller,
) -> None:
    tenant = await controller.tenant()
    await deployed(controller)
    small = base64.b64encode(b"\x80\x05\x95...").decode()
    large = base64.b64encode(b"x" * (call_details.MAX_RESULT + 3)).decode()
    deep = base64.b64encode(b"[" * 50_000).decode()
    pickled = "application/vnd.pilotlight.pickle"
    with controller.context.store.write() as write:
        submitted_calls.put(
            write,
            [
                record(tenant=tenant, content_type=pickled, result=small),
                record(id="req-large", tenant=tenant, content_type="text/plain", result=large),
                record(id="req-deep", tenant=tenant, result=deep),
            ],
        )

    def found(call: str) -> dict[str, Any]:
        with controller.context.store.read() as sql:
            submitted = submitted_calls.find(
                sql,
                tenant=tenant,
                environment="main",
                call=call,
                result_chars=call_details.RESULT_CHARS,
            )
        assert submitted is not None
        return submitted

    for call, size_bytes in (("req-sub", 6), ("req-large", call_details.MAX_RESULT + 3)):
        shown = call_details.result_of(found(call))
        assert shown is not None
        assert (shown.text, abs(shown.size_bytes - size_bytes) < 3) == (None, True)
        assert call_details.error_of(found(call), []).message == ""
    assert found("req-large")["result"] == ""
    assert call_details.error_of(found("req-deep"), []).message == ""

"""The dashboard's page of logs: a bounded tail, then live lines, of the tenant's own instances."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from fastapi import Request

from pilotlight.controller.dashboard import log_lines
from pilotlight.controller.dashboard.page_context import form_cookie, page_context, session_cookie
from pilotlight.controller.dashboard.pages import live_events
from pilotlight.controller.dashboard.pages.calls import logs
from snapshotter.errors import LogsBusy
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import instance, spec
from tests.functions.controller.test_dashboard import sign_in


def line(text: str, **changes: Any) -> dict[str, Any]:
    """A line as the node agent sends it."""
    return {
        "time": 1_800_000_000.5,
        "instance": "i-1",
        "stream": "stdout",
        "call": "req-1",
        "text": text,
        **changes,
    }


async def test_lines_are_asked_for_by_the_sessions_tenant_and_shown_as_text(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    tenant = await controller.tenant()
    controller.agent.instances = [instance(tenant)]
    controller.agent.lines = [
        line("<script>alert(1)</script>", call='"><img src=x>'),
        line("x" * (log_lines.MAX_LINE + 5), stream="stderr"),
    ]
    session = await sign_in(controller, controller.key)
    page = await controller.client(None).get(
        "/dashboard/logs",
        params={"function": "search/embed", "instance": "i-1", "call": "req-1", "tenant": "t-9"},
        headers=session,
    )
    assert page.status_code == 200
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.text
    assert "<script>alert" not in page.text
    assert "<img src=x" not in page.text
    assert "x" * log_lines.MAX_LINE + "…" in page.text
    (asked,) = [args for name, args in controller.agent.asked if name == "logs"]
    assert asked["labels"] == {
        "tenant": tenant,
        "environment": "main",
        "app": "search",
        "function": "embed",
    }
    assert (asked["instance_id"], asked["call_id"]) == ("i-1", "req-1")
    assert (asked["tail"], asked["follow"]) == (log_lines.TAIL, False)


async def test_a_node_that_refuses_is_told_and_a_billing_key_sees_no_lines(
    controller: Controller,
) -> None:
    controller.agent.logs_failure = LogsBusy("4 requests already read logs", {"limit": 4})
    session = await sign_in(controller, controller.key)
    page = await controller.client(None).get("/dashboard/logs", headers=session)
    assert (page.status_code, "4 requests already read logs" in page.text) == (200, True)
    billing = await sign_in(controller, await controller.new_key(scope="read-billing"))
    for path in ("/dashboard/logs", "/dashboard/logs/events"):
        answer = await controller.client(None).get(path, headers=billing)
        assert answer.status_code == 403, path


async def test_new_lines_are_streamed_until_the_session_ends(controller: Controller) -> None:
    controller.agent.lines = [line(f"line {n} <b>") for n in range(3)]
    stream, hub, place, viewer = await _streaming(controller)
    assert await anext(stream) == f"retry: {live_events.RETRY_S * 1000}\n\n".encode()
    name, _, data = (await anext(stream)).decode().strip().partition("\ndata: ")
    body = json.loads(data)
    assert (name, body["all"], body["rows"].count("<tr>")) == ("event: lines", True, 3)
    assert "line 2 &lt;b&gt;" in body["rows"]
    viewer.end()
    assert await anext(stream) == live_events.OVER
    assert await anext(stream, None) is None
    await controller.agent.follow_ended.wait()
    hub.remove(place, viewer)
    assert repr(hub) == "<EventHub 0 places, 0 viewers>"


async def test_a_stream_that_the_node_refuses_says_why(controller: Controller) -> None:
    controller.agent.logs_failure = LogsBusy("32 requests already follow logs", {"limit": 32})
    stream, hub, place, viewer = await _streaming(controller)
    await anext(stream)
    assert b"event: trouble" in (told := await anext(stream))
    assert b"32 requests already follow logs" in told
    assert await anext(stream, None) is None
    hub.remove(place, viewer)


class _Hub(live_events.EventHub):
    """Shows who joined."""

    def join(self, place: Any, viewer: live_events.Viewer) -> None:
        self.viewer = viewer
        super().join(place, viewer)


async def _streaming(controller: Controller) -> tuple[Any, Any, Any, Any]:
    """The body of a stream, as the application makes it, with its place in the hub."""
    session = (await sign_in(controller, controller.key))["cookie"]
    hub = _Hub(controller.context)
    app = SimpleNamespace(state=SimpleNamespace(live=hub))
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/dashboard/logs/events",
        "query_string": b"",
        "headers": [(b"cookie", session.encode())],
        "app": app,
        "scheme": "http",
        "server": ("controller", 80),
    }
    request = Request(scope)
    visit = await page_context(
        request=request,
        context=controller.context,
        session=await session_cookie(controller.context, request),
        form=await form_cookie(controller.context, request),
    )
    answer: Any = await logs.events(visit, request)
    return answer.body_iterator, hub, visit.place, hub.viewer

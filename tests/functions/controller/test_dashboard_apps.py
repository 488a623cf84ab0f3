"""The dashboard's pages of apps, of keys and secrets, and the form that calls a function."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx
import pytest

from pilotlight.controller.dashboard.pages.calls import invoke
from pilotlight.controller.identity import sessions
from pilotlight.controller.scheduling import dispatch_queue
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec, usage
from tests.functions.controller.test_dashboard import sign_in

EVIL = "it's <b>new</b>"
METHODS = [{"name": "", "example": {"text": EVIL}}]


async def deploy(controller: Controller, *specs: dict[str, Any], app: str = "search") -> None:
    """Deploy an app."""
    body = {"functions": list(specs) or [spec("embed", methods=METHODS)], "message": EVIL}
    answer = await controller.http.post(f"/v1/apps/{app}/deploy", json=body)
    assert answer.status_code in (200, 201), answer.text


async def test_an_app_shows_its_addresses_and_who_deployed_it_when(controller: Controller) -> None:
    web = spec("site", kind="asgi", methods=[{"name": ""}])
    await deploy(controller, spec("embed", methods=METHODS), web)
    client, session = controller.client(None), await sign_in(controller, controller.key)
    listed = await client.get("/dashboard/apps", headers=session)
    page = await client.get("/dashboard/apps/search", headers=session)
    key = (await controller.http.get("/v1/whoami")).json()["key"]
    shown = (await controller.http.get("/v1/apps/search")).json()["functions"]
    for text in (listed.text, page.text):
        assert "it&#39;s &lt;b&gt;new&lt;/b&gt;" in text
        assert key in text
        assert "15 Jan 08:00:00" in text
    for revision in (share["revision"] for f in shown for share in f["traffic"]):
        assert revision in page.text
    plain = re.sub(r"<span data-origin>([^<]*)</span>", r"\1", page.text)
    assert "POST $PILOTLIGHT_URL/v1/functions/search/embed:invoke" in plain
    assert "curl &#34;$PILOTLIGHT_URL/fn/search/site/&#34;" in plain.replace('"', "&#34;")
    # one shell word: a quote in an example cannot end it
    assert "-d &#39;" not in plain
    assert "-d '{&#34;text&#34;: &#34;it&#39;\\&#39;&#39;s &lt;b&gt;new&lt;/b&gt;&#34;}'" in plain
    assert "data-own-origin" in plain
    other = await sign_in(controller, await controller.other_tenant())
    assert (await client.get("/dashboard/apps/search", headers=other)).status_code == 404
    assert "search" not in (await client.get("/dashboard/apps", headers=other)).text


async def test_keys_and_secrets_show_names_and_times_and_no_values(controller: Controller) -> None:
    secret = await controller.new_key(scope="deploy", name="<b>ci</b>", expires_in_s=86_400)
    await controller.http.put("/v1/secrets/hub", json={"values": {"HF_TOKEN": "very-secret"}})
    keys = (await controller.http.get("/v1/keys")).json()["keys"]
    made = next(key["id"] for key in keys if key["name"] == "<b>ci</b>")
    record = usage(
        tenant=await controller.tenant(), key=made, started_at=controller.clock.now - 7200
    )
    await controller.internal("/internal/usage", {"activator": "a", "records": [record.to_json()]})
    client = controller.client(None)
    page = await client.get("/dashboard/access", headers=await sign_in(controller, controller.key))
    row = page.text[page.text.index(made) :].partition("</tr>")[0]
    for said in ("&lt;b&gt;ci&lt;/b&gt;", "deploy", "2.0 h ago", "16 Jan 2027"):
        assert said in row, said
    assert ("hub" in page.text, "HF_TOKEN" in page.text) == (True, True)
    for hidden in ("very-secret", secret, controller.key):
        assert hidden not in page.text
    limited = await client.get("/dashboard/access", headers=await sign_in(controller, secret))
    assert ("HF_TOKEN" in limited.text, made in limited.text) == (True, False)
    billing = await sign_in(controller, await controller.new_key(scope="read-billing"))
    for path in ("/dashboard/access", "/dashboard/apps", "/dashboard/invoke"):
        assert (await client.get(path, headers=billing)).status_code == 403, path
    other = await sign_in(controller, await controller.other_tenant())
    theirs = await client.get("/dashboard/access", headers=other)
    assert ("hub" in theirs.text, made in theirs.text) == (False, False)


async def send(
    controller: Controller, session: dict[str, str], *, token: str = "x", **data: str
) -> httpx.Response:
    """Send the form as a page of this site does."""
    headers = {"cookie": f"{session['cookie']}; {sessions.FORM_COOKIE}=x"}
    return await controller.client(None).post(
        "/dashboard/invoke", data={"form": token, **data}, headers=headers
    )


async def test_the_form_queues_a_call_of_the_signed_in_key(controller: Controller) -> None:
    await deploy(controller)
    made = (await controller.http.post("/v1/keys", json={"scope": "deploy"})).json()
    session = await sign_in(controller, made["secret"])
    client = controller.client(None)
    page = await client.get(
        "/dashboard/invoke", params={"function": "search/embed"}, headers=session
    )
    assert "{&#34;text&#34;: &#34;it&#39;s &lt;b&gt;new&lt;/b&gt;&#34;}" in page.text
    answer = await send(controller, session, function="search/embed", body='{"text": "hi"}')
    assert answer.status_code == 303, answer.text
    call = answer.headers["location"].removeprefix("/dashboard/calls/").partition("?")[0]
    shown = await client.get(answer.headers["location"], headers=session)
    assert ("data-again" in shown.text, "Queued" in shown.text) == (True, True)
    with controller.context.store.write() as write:
        (document,) = dispatch_queue.claim(write, activator="a-1")
    assert (document["record"]["id"], document["key"]) == (call, made["id"])
    assert base64.b64decode(document["body"]) == b'{"text": "hi"}'
    assert document["record"]["tenant"] == document["owner"] == await controller.tenant()


@pytest.mark.parametrize(
    "data,status,said",
    [
        ({"function": "search/embed", "body": "{"}, 400, "the body is not JSON"),
        ({"function": "search/embed", "body": "[" * 16_000}, 400, "the body is not JSON"),
        ({"function": "search/embed", "body": "1"}, 400, "must be a JSON object"),
        ({"function": "search/embed", "method": "<u>"}, 400, "has no method"),
        ({"function": "search/site"}, 400, "web application"),
        ({"function": "search/gone"}, 404, "there is no function"),
        ({"function": "search/embed", "body": "x" * (invoke.MAX_BODY + 1)}, 400, "at most"),
        ({"function": "search/embed", "token": "y"}, 403, "another site"),
    ],
)
async def test_the_form_refuses_what_cannot_be_a_call(
    controller: Controller, data: dict[str, str], status: int, said: str
) -> None:
    web = spec("site", kind="asgi", methods=[{"name": ""}])
    await deploy(controller, spec("embed"), web)
    session = await sign_in(controller, controller.key)
    answer = await send(controller, session, **data)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert "<u>" not in answer.text
    with controller.context.store.read() as sql:
        assert dispatch_queue.waiting(sql, tenant=await controller.tenant()) == 0


async def test_the_form_refuses_a_key_that_may_not_call_and_more_than_its_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoke, "MAX_WAITING", 1)
    await deploy(controller)
    billing = await sign_in(controller, await controller.new_key(scope="read-billing"))
    assert (await send(controller, billing, function="search/embed")).status_code == 403
    session = await sign_in(controller, controller.key)
    assert (await send(controller, session, function="search/embed")).status_code == 303
    full = await send(controller, session, function="search/embed")
    assert (full.status_code, "wait for an activator" in full.text) == (429, True)
    other = await sign_in(controller, await controller.other_tenant())
    assert (await send(controller, other, function="search/embed")).status_code == 404

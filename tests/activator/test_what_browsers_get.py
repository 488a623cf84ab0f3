"""What a browser may make of what functions say: types that it does not run, and a sandbox around
all else."""

from __future__ import annotations

import httpx
import pytest

from pilotlight.spec.function import FunctionKind
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

HTML = b"<script>fetch('/dashboard')</script>"
OWN = {"authorization": f"Bearer {KEY}"}


def _answers(edge: Edge, content_type: str) -> None:
    async def answer(request: WorkerRequest) -> WorkerAnswer:
        if request.path.startswith("/asgi"):
            return WorkerAnswer(
                body=HTML, content_type=content_type, headers=("x-content-type-options: sniff",)
            )
        return WorkerAnswer(body=HTML, content_type=content_type)

    edge.fleet.behaviour = answer
    edge.add(route_of(spec_of(access=("*",))))
    edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))


@pytest.mark.parametrize(
    "said,answered",
    [
        ("text/html", "application/octet-stream"),
        ("TEXT/HTML; charset=utf-8", "application/octet-stream"),
        ("image/svg+xml", "application/octet-stream"),
        ("application/xhtml+xml", "application/octet-stream"),
        ("application/json, text/html", "application/octet-stream"),
        ("audio/wav, text/html", "application/octet-stream"),
        ("application/javascript", "application/octet-stream"),
        ("application/json", "application/json"),
        ("text/plain; charset=utf-8", "text/plain; charset=utf-8"),
        ("image/png", "image/png"),
        ("audio/wav", "audio/wav"),
    ],
)
async def test_a_call_is_answered_with_types_that_no_browser_runs(
    edge: Edge, said: str, answered: str
) -> None:
    edge.add_tenant("acme")
    _answers(edge, said)

    for headers in ({}, OWN, OWN):  # the last one without a task
        answer = await edge.client.post(
            f"{edge.url}/t/acme/v1/functions/shop/hello:invoke", json={"x": 1}, headers=headers
        )

        assert (answer.status_code, answer.content) == (200, HTML)
        assert answer.headers.get_list("content-type") == [answered]
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers.get_list("content-security-policy") == ["sandbox"]


@pytest.mark.parametrize("headers", [{}, OWN])
async def test_a_page_keeps_its_type_and_runs_in_a_sandbox(
    edge: Edge, headers: dict[str, str]
) -> None:
    edge.add_tenant("acme")
    _answers(edge, "text/html")

    page = await edge.client.get(f"{edge.url}/t/acme/fn/shop/page/", headers=headers)

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html")
    assert page.headers.get_list("x-content-type-options") == ["nosniff"]
    assert page.headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in page.headers["content-security-policy"]


async def test_errors_results_and_receipts_are_guarded_too(edge: Edge) -> None:
    _answers(edge, "text/html")

    wrong = await edge.call(json={"x": "<script>"})
    receipt = await edge.call("shop/hello:submit", json={"x": 1})
    result = await edge.client.get(
        f"{edge.url}{receipt.headers['location']}?wait_s=10", headers=OWN
    )
    stream = await edge.client.get(f"{edge.url}{receipt.headers['location']}/stream", headers=OWN)

    assert [answer.status_code for answer in (wrong, receipt, result, stream)] == [
        400,
        202,
        200,
        200,
    ]
    for answer in (wrong, receipt, result, stream):
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers.get_list("content-security-policy") == ["sandbox"]


async def test_a_page_says_nothing_for_the_origin(edge: Edge) -> None:
    """It is not the function's: browsers would send reports of all visits to it, go elsewhere for
    it, or ask for its password."""
    lines = (
        'nel: {"report_to":"x","max_age":99,"include_subdomains":true}',
        'report-to: {"group":"x","max_age":99,"endpoints":[{"url":"https://elsewhere.test/"}]}',
        'reporting-endpoints: x="https://elsewhere.test/"',
        'www-authenticate: Basic realm="sign in"',
        'Alt-Svc: h3="elsewhere.test:443"',
        "clear-site-data: *",
        "service-worker-allowed: /",
        "strict-transport-security: max-age=99",
        "etag: kept",
    )

    async def answer(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=401, body=HTML, content_type="text/html", headers=lines)

    edge.fleet.behaviour = answer
    edge.add_tenant("acme")
    edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))
    page = await edge.client.get(f"{edge.url}/t/acme/fn/shop/page/")

    assert page.status_code == 401
    assert page.headers["etag"] == "kept"
    assert {line.partition(":")[0].lower() for line in lines} & set(page.headers) == {"etag"}


async def test_a_browser_keeps_the_cookies_of_one_function_from_another(edge: Edge) -> None:
    """As frameworks set them: for the whole host, which all functions share."""
    seen: list[str] = []

    async def answer(request: WorkerRequest) -> WorkerAnswer:
        seen.append(request.headers.get("cookie", ""))
        return WorkerAnswer(headers=("set-cookie: session=of-the-user; HttpOnly; Path=/",))

    edge.fleet.behaviour = answer
    edge.add_tenant("acme")
    edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))
    edge.add(route_of(spec_of("pages", kind=FunctionKind.ASGI, access=("*",))))

    async with httpx.AsyncClient(base_url=edge.url) as browser:
        for path in ("page/in", "page/", "pages/", "page"):
            assert (await browser.get(f"/t/acme/fn/shop/{path}")).status_code == 200
    assert seen == ["", "session=of-the-user", "", "session=of-the-user"]


async def test_a_page_does_not_speak_for_the_platform(edge: Edge) -> None:
    lines = (
        "pilotlight-cost: 0",
        "pilotlight-revision: v9",
        "Pilotlight-Degraded: fallback",
        "idempotency-replayed: true",
        "pilotlight-outcome: ok",
    )

    async def answer(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(headers=lines)

    edge.fleet.behaviour = answer
    edge.add_tenant("acme")
    edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))
    page = await edge.client.get(f"{edge.url}/t/acme/fn/shop/page/")

    assert page.headers.get_list("pilotlight-revision") != ["v9"]
    assert len(page.headers.get_list("pilotlight-revision")) == 1
    assert page.headers.get_list("pilotlight-outcome")[-1] == "ok"
    assert not {"pilotlight-cost", "pilotlight-degraded", "idempotency-replayed"} & set(
        page.headers
    )

"""Raw HTTP to functions that are web applications."""

from __future__ import annotations

import pytest

from pilotlight.spec import FunctionKind, MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

HEADERS = {"authorization": f"Bearer {KEY}"}


async def tell(request: WorkerRequest) -> WorkerAnswer:
    """What the worker sees, line by line."""
    lines = [f"{request.method} {request.path}", *(f"{name}: {value}" for name, value in request.headers.items())]
    return WorkerAnswer(body="\n".join(lines).encode())


@pytest.fixture(name="behaviour")
def _behaviour() -> object:
    return tell


@pytest.fixture(name="site")
def _site(edge: Edge) -> str:
    edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))))
    return f"{edge.url}/fn/shop/site"


async def test_a_worker_never_sees_the_key_nor_what_a_caller_says_in_our_name(edge: Edge, site: str) -> None:
    sent = {**HEADERS, "pilotlight-root-path": "/elsewhere", "Pilotlight-Deadline-S": "9", "pilotlight-call": "theirs", "x-own": "1"}
    seen = (await edge.client.get(f"{site}/a", headers=sent)).text

    assert KEY not in seen
    assert "pilotlight-root-path: /fn/shop/site" in seen
    assert "x-own: 1" in seen
    assert "theirs" not in seen
    assert "deadline" not in seen.lower()


@pytest.mark.parametrize("path", ["/v1/%2e%2e/internal/feed", "/v1/..%2finternal/feed", "/dashboard/%2e/x", "/v1/x/.."])
async def test_a_path_that_would_be_another_one_behind_the_edge_is_not_passed_on(edge: Edge, path: str) -> None:
    answer = await edge.client.get(f"{edge.url}{path}", headers=HEADERS)

    assert answer.status_code == 404

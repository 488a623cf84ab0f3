"""Routes are analysed late, and with the same result."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Query
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from pilotlight.controller import http_app
from pilotlight.controller.lazy_routes import APIRouter, LazyRoute


async def item(number: int, limit: Annotated[int, Query(le=9)] = 3) -> dict[str, int]:
    """One item."""
    return {"number": number, "limit": limit}


def built(route_class: type[APIRoute]) -> FastAPI:
    router = APIRouter(prefix="/v1", tags=["items"], route_class=route_class)
    router.add_api_route("/items/{number}", item, methods=["GET"])
    app = FastAPI()
    app.include_router(router)
    return app


def test_a_route_is_analysed_when_it_is_first_asked() -> None:
    router = APIRouter()
    router.add_api_route("/items/{number}", item, methods=["GET"])
    (route,) = router.routes
    app = FastAPI()
    app.router.routes.append(route)

    assert "dependant" not in vars(route)

    with TestClient(app) as client:
        assert client.post("/items/7").status_code == 405
        assert client.get("/elsewhere").status_code == 404
        assert "dependant" not in vars(route)

        assert client.get("/items/7?limit=9").json() == {"number": 7, "limit": 9}
        assert "dependant" in vars(route)
        assert client.get("/items/7?limit=10").status_code == 422


def test_a_document_is_the_same_as_with_routes_of_the_framework() -> None:
    assert built(LazyRoute).openapi() == built(APIRoute).openapi()


def test_what_a_route_does_not_have_is_an_attribute_error() -> None:
    route = LazyRoute("/items/{number}", item)

    with pytest.raises(AttributeError, match="'LazyRoute' object has no attribute 'absent'"):
        route.absent  # noqa: B018


def test_every_route_of_the_controller_can_be_analysed() -> None:
    routes: list[Any] = [route for router in http_app._ROUTERS for route in router.routes]

    assert routes
    assert all(isinstance(route, LazyRoute) and route.dependant.call for route in routes)

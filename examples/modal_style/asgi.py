"""A FastAPI application with several routes, one of which starts background work."""

from typing import Any

import pilotlight as modal

image = modal.Image.debian_slim().pip_install("fastapi")
app = modal.App("style-asgi")


@app.function()
def slow_reverse(text: str) -> str:
    return text[::-1]


@app.function(image=image)
@modal.concurrent(max_inputs=100)
@modal.asgi_app()
def web() -> Any:
    from fastapi import FastAPI

    site = FastAPI()

    @site.get("/")
    def index() -> dict[str, str]:
        return {"status": "ok"}

    @site.post("/jobs")
    def accept(text: str) -> dict[str, str]:
        return {"call_id": slow_reverse.spawn(text).object_id}

    @site.get("/jobs/{call_id}")
    def result(call_id: str) -> dict[str, str]:
        return {"result": modal.FunctionCall.from_id(call_id).get(timeout=20)}

    return site

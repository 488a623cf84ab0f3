"""A web application as a function: served under `/fn/web/site/`, WebSocket included.

Everything runs on the event loop (`async def` throughout), so no thread exists at the snapshot
point and instances are forked."""

from typing import Any

import pilotlight

app = pilotlight.App("web")


@app.function(cpu=0.25, memory="512MiB")
@pilotlight.concurrent(max_inputs=100)
@pilotlight.asgi_app(example="/")
def site() -> Any:
    """Build the application; called once, before the snapshot, because it declares an example (a
    path that it answers)."""
    from fastapi import FastAPI, WebSocket, WebSocketDisconnect

    web = FastAPI(title="A site at zero")

    @web.get("/")
    async def index() -> dict[str, str]:
        return {"message": "served by an instance that may not have existed a moment ago"}

    @web.get("/items/{item_id}")
    async def item(item_id: int, q: str | None = None) -> dict[str, int | str | None]:
        return {"item_id": item_id, "q": q}

    @web.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send_text(await socket.receive_text())
        except WebSocketDisconnect:
            return

    return web

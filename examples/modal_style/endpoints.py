"""Functions as web endpoints: a query, a body, and their documentation."""

from typing import Any

from pydantic import BaseModel

import pilotlight as modal

image = modal.Image.debian_slim().pip_install("fastapi[standard]")
app = modal.App("style-endpoints", image=image)


class Order(BaseModel):
    item: str
    count: int = 1


@app.function()
@modal.fastapi_endpoint()
def greet(user: str = "world") -> dict[str, str]:
    return {"greeting": f"Hello, {user}!"}


@app.function()
@modal.fastapi_endpoint(method="POST", docs=True)
def order(wanted: Order) -> dict[str, Any]:
    return {"ordered": [wanted.item] * wanted.count}


@app.function()
@modal.web_endpoint(method="POST")
def shout(body: dict[str, str]) -> str:
    return body["text"].upper()

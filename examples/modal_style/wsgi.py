"""A Flask application."""

from typing import Any

import pilotlight as modal

image = modal.Image.debian_slim().pip_install("flask")
app = modal.App("style-wsgi", image=image)


@app.function()
@modal.concurrent(max_inputs=10)
@modal.wsgi_app()
def site() -> Any:
    from flask import Flask, request

    pages = Flask(__name__)

    @pages.get("/")
    def index() -> str:
        return "Hello from Flask"

    @pages.post("/echo")
    def echo() -> Any:
        return request.json

    return pages

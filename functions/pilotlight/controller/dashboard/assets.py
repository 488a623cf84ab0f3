"""Static files of the pages: the dashboard's style and scripts, and Plotly from its package. URLs
contain a content hash, so they are cached indefinitely."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Header, Response
from fastapi import Path as InPath

from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

PREFIX = "/dashboard/static"
_OWN = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = ("style.css", "early.js", "pages.js", "signin.js", "mark.svg", "plotly.js")

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its content, and the first half of its sha256 in hex."""

    content: bytes
    digest: str


@functools.cache
def load(name: str) -> Asset:
    """Return a static file, read once. Raises KeyError for any other name."""
    if name not in _NAMES:
        raise KeyError(name)
    content = (_plotly() if name == "plotly.js" else _OWN / name).read_bytes()
    return Asset(content, hashlib.sha256(content).hexdigest()[:32])


@functools.cache
def compressed(name: str) -> bytes:
    """Return a file as gzip, compressed once: this takes a third of a second for Plotly's 5 MB."""
    return gzip.compress(load(name).content, 6, mtime=0)


def url(name: str) -> str:
    """Return a file's URL path."""
    return f"{PREFIX}/{load(name).digest}/{name}"


def _plotly() -> Path:
    """Return the path of Plotly's JavaScript without importing the package, which takes half a
    second."""
    found = importlib.util.find_spec("plotly")
    assert found is not None, "plotly is part of the extra `server`"
    assert found.origin is not None
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


@router.get(PREFIX + "/{digest}/{name:path}")
def static(
    digest: Annotated[str, InPath(max_length=64)],
    name: Annotated[str, InPath(max_length=64)],
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """Serve one file. Its URL contains the content hash, so browsers request it once. Raises
    NotFound."""
    try:
        asset = load(name)
    except KeyError as e:
        raise NotFound(f"there is no static file {name!r}") from e
    if digest != asset.digest:
        raise NotFound(f"{name} has changed: reload the page")
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
    }
    use_gzip = "gzip" in accept_encoding
    if use_gzip:
        headers["content-encoding"] = "gzip"
    return Response(
        compressed(name) if use_gzip else asset.content,
        media_type=_TYPES[Path(name).suffix],
        headers=headers,
    )

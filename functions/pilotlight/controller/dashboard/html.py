"""HTML rendering: one Jinja environment, and the headers that every page has.

User functions are served under the same origin (`/fn/…`), so 'self' would allow a page to load a
tenant's script: scripts and styles are allowed by a nonce only. Pages cannot evaluate code, be
framed, or load external resources."""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.responses import HTMLResponse

from pilotlight.controller.analytics.environment_usage import START_KINDS
from pilotlight.controller.dashboard import assets, formatting, svg

if TYPE_CHECKING:
    import jinja2


@functools.cache
def _pages() -> jinja2.Environment:
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(formatting.FILTERS)
    pages.filters.update(bars=svg.bars, shares=svg.shares, total_ms=svg.total_ms)
    pages.globals.update(asset=assets.url, waterfall=svg.waterfall, kinds=START_KINDS)
    return pages


def render(name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template, with its own content security policy."""
    nonce = secrets.token_urlsafe(16)
    body = _pages().get_template(name).render(nonce=nonce, **values)
    return HTMLResponse(body, status_code=status, headers=_headers(nonce))


def fragment(name: str, macro: str, *arguments: Any) -> str:
    """Render one macro of a template."""
    return str(getattr(_pages().get_template(name).module, macro)(*arguments))


def _headers(nonce: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": f"'nonce-{nonce}'",
        "style-src": f"'nonce-{nonce}'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "cache-control": "no-store",
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

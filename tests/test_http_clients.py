"""No HTTP client of the platform keeps cookies: each is made with `cookies=no_cookies()`
(`pilotlight.core.transport.endpoint.cookies`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("activator", "functions", "weight_cache", "snapshotter")
CLIENTS = frozenset(
    {
        "httpx.Client",
        "httpx.AsyncClient",
        "requests.Session",
        "requests.session",
        "aiohttp.ClientSession",
    }
)
"""What keeps the cookies of its answers, unless it is told not to. `httpx.get` and its like make a
client for one request."""
LIBRARIES = frozenset(name.partition(".")[0] for name in CLIENTS)


def clients_with_cookies(source: str) -> list[int]:
    """Lines of `source` that name such a client otherwise than in an annotation, or in a call with
    `cookies=no_cookies()`."""
    if not any(library in source for library in LIBRARIES):
        return []  # parsing every module would take seconds
    tree = ast.parse(source)
    names = dict(imported(tree))
    ignored = set(nodes_of_annotations(tree))
    ignored.update(
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and is_without_cookies(node)
    )
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and full_name(node, names) in CLIENTS
    ]
    return sorted(node.lineno for node in found if node not in ignored)


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in this module, full name) of what is imported from the libraries, anywhere in the
    module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name, alias.name)
                for alias in node.names
                if alias.name in LIBRARIES
            )
        elif isinstance(node, ast.ImportFrom) and node.module in LIBRARIES:
            yield from (
                (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
            )


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """`httpx.Client` for whatever this module calls it; "" for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := full_name(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


def nodes_of_annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node inside an annotation."""
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in annotations:
            if isinstance(annotation, ast.AST):
                yield from ast.walk(annotation)


def is_without_cookies(call: ast.Call) -> bool:
    """Whether the call has the argument `cookies=no_cookies()`, or aiohttp's
    `cookie_jar=aiohttp.DummyCookieJar()`."""
    jars = [keyword.value for keyword in call.keywords if keyword.arg == "cookie_jar"]
    if any(ast.unparse(jar) == "aiohttp.DummyCookieJar()" for jar in jars):
        return True
    values = [keyword.value for keyword in call.keywords if keyword.arg == "cookies"]
    return any(
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "no_cookies"
        for value in values
    )


def sources() -> list[Path]:
    """Every module of the platform."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.slow  # parses every file of the platform
def test_every_client_of_the_platform_is_made_without_cookies() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := clients_with_cookies(path.read_text()))
    }

    assert not found, (
        "pass cookies=no_cookies() of pilotlight.core.transport.cookies: a client with a jar gives one "
        "caller's cookies to the next"
    )


def test_the_clients_of_the_platform_are_seen() -> None:
    seen = [path.name for path in sources() if "no_cookies()" in path.read_text()]

    assert {"activation_requests.py", "http_client.py", "transport.py", "webhook_sender.py"} <= set(
        seen
    )


@pytest.mark.parametrize(
    "source",
    [
        "import httpx\nhttpx.Client()",
        "import httpx\nhttpx.AsyncClient(timeout=1, cookies=None)",
        "import httpx\nhttpx.AsyncClient(cookies=httpx.Cookies())",
        "import httpx as web\nweb.AsyncClient()",
        "from httpx import AsyncClient\nAsyncClient()",
        "from httpx import Client as Http\nHttp(timeout=1)",
        "import httpx\nmake = httpx.Client",
        "import httpx\nclass Mine(httpx.Client): ...",
        "def f() -> None:\n    import httpx; httpx.Client()",
        "import httpx\npartial(httpx.AsyncClient, timeout=1)(cookies=no_cookies())",
        "import aiohttp\naiohttp.ClientSession()",
        "import requests\nrequests.Session()",
        "import httpx\nclient: httpx.Client = httpx.Client()",
    ],
)
def test_a_client_that_keeps_cookies_is_found(source: str) -> None:
    assert clients_with_cookies(source) == [2]


@pytest.mark.parametrize(
    "source",
    [
        "import httpx\nhttpx.Client(timeout=1, cookies=no_cookies())",
        "import httpx\nhttpx.AsyncClient(**options, cookies=no_cookies())",
        "import httpx\ndef f(client: httpx.Client | None) -> dict[int, httpx.AsyncClient]: ...",
        "import httpx\nclient: httpx.Client",
        "from pilotlight.client.client import AsyncClient\nAsyncClient()",
        "import httpx\nhttpx.get('http://127.0.0.1/')",
    ],
)
def test_a_client_without_cookies_is_not_found(source: str) -> None:
    assert clients_with_cookies(source) == []

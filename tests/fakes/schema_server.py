"""A web server on loopback that has a JSON Schema at every path, and the schemas that make a
validator ask it for one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.loopback import LoopbackServer, handler_for
from tests.fakes.user_code import Answer, Asked

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA = b'{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"}'


class SchemaServer:
    """Attributes: `requests`, the path of each request."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.server = LoopbackServer(("127.0.0.1", 0), handler_for(self._answer))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _answer(self, asked: Asked) -> Answer:
        self.requests.append(asked.path)
        return Answer(body=SCHEMA, content_type="application/schema+json")


@contextlib.contextmanager
def serve_schemas() -> Iterator[SchemaServer]:
    """One that listens, until the context ends."""
    made = SchemaServer()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), name="schemas")
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def schemas_from(url: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Schemas by what is wrong with them: each names a document at `url`, or the file `stored.json`
    of `directory`, outside itself."""
    file = directory / "stored.json"
    return {
        **_with_drafts(url, file),
        "reference": {"$ref": f"{url}/x"},
        "nested reference": {"properties": {"a": {"$ref": f"{url}/x"}}},
        "reference with a fragment": {"properties": {"a": {"$ref": f"{url}/x#/$defs/y"}}},
        "dynamic reference": {"properties": {"a": {"$dynamicRef": f"{url}/x"}}},
        "recursive reference": {
            "properties": {"a": {"$recursiveRef": f"{url}/x", "$ref": f"{url}/x"}}
        },
        "reference to a file": {"properties": {"a": {"$ref": file.as_uri()}}},
        "reference relative to an id": {"$id": f"{url}/base/", "properties": {"a": {"$ref": "x"}}},
        "reference relative to an inner id": {
            "properties": {"a": {"$id": f"{url}/base/", "items": {"$ref": "x"}}}
        },
        "reference relative to an id of a file": {
            "$id": f"{directory.as_uri()}/",
            "properties": {"a": {"$ref": "stored.json"}},
        },
        "pointer below an inner id": {
            "properties": {"a": {"$id": f"{url}/base", "$ref": "#/$defs/x"}},
            "$defs": {"x": {}},
        },
        "reference under an id of draft 4": {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": f"{url}/base/",
            "properties": {"a": {"$ref": "x"}},
        },
    }


def _with_drafts(url: str, file: Path) -> dict[str, dict[str, Any]]:
    """Those whose `$schema` names no draft."""
    foreign = {"$schema": f"{url}/x", "type": "string"}
    return {
        "draft": {"$schema": f"{url}/x", "type": "object"},
        "draft with a fragment": {"$schema": f"{url}/x#", "type": "object"},
        "draft in a file": {"$schema": file.as_uri(), "type": "object"},
        "draft of a property": {"properties": {"a": foreign}},
        "draft of a definition with an id": {
            "$defs": {"a": {"$id": "http://127.0.0.1/a", **foreign}}
        },
        "draft of a property that is called as a keyword": {
            "properties": {"enum": foreign, "properties": {"type": "string"}}
        },
        "draft of items": {"properties": {"a": {"prefixItems": [foreign]}}},
        "draft below an unknown keyword": {"$ref": "#/unknown/0", "unknown": [foreign]},
        "draft below a supported draft": {"$schema": DIALECT, "anyOf": [foreign]},
        "draft below an id": {"$id": f"{url}/base", "anyOf": [foreign]},
    }


NAMES = tuple(schemas_from("http://127.0.0.1", Path("/")))
"""The keys of `schemas_from`, for `pytest.mark.parametrize`."""

"""Calls of functions with JSON, as callers without the SDK make them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pilotlight.protocol import CONTENT_JSON

if TYPE_CHECKING:
    from pilotlight.client.client import Client


def call_json(client: Client, app: str, function: str, arguments: Any) -> Any:
    """Call a function and return its answer. Raises PilotlightError."""
    headers = {"content-type": CONTENT_JSON, "accept": CONTENT_JSON}
    answer = client.invoke(app, function, json.dumps(arguments).encode(), headers=headers)
    return answer.value()

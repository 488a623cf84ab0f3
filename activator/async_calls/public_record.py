"""The record of a submitted call as callers read it: with a JSON result as JSON.

In the journal and at the controller a result is base64, whatever its type."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from pilotlight import errors
from pilotlight.protocol import CONTENT_NDJSON, RESULT_BASE64, RESULT_JSON
from pilotlight.validation.json_size import require_few_values

MAX_VALUES: Final = 20_000
"""Largest JSON result (`json_size`) that is sent as JSON: it is parsed here, to know that it is
valid, which takes a few milliseconds of the event loop."""


def public_record(record: Mapping[str, Any]) -> bytes:
    """Return a record, which is JSON with its result in base64, for a caller. `result_encoding`
    says what `result` is: `json`, `base64`, or null while there is none."""
    encoded = str(record["result"])
    text = _json_text(str(record["content_type"]), encoded)
    if text is None:
        encoding = RESULT_BASE64 if encoded else None
        return json.dumps(
            {**record, "result": encoded or None, "result_encoding": encoding}
        ).encode()
    rest = {name: value for name, value in record.items() if name != "result"}
    head = json.dumps({**rest, "result_encoding": RESULT_JSON}).encode()
    return b'%b, "result": %b}' % (head[:-1], text)


def _json_text(content_type: str, encoded: str) -> bytes | None:
    """Return a result as JSON, that of a stream of lines as an array; None if it is not JSON, or
    too large to be parsed here. The text is kept as it is: numbers keep their digits."""
    media_type = content_type.partition(";")[0].strip().lower()
    if not encoded or not media_type.endswith("json"):
        return None
    body = base64.b64decode(encoded)
    try:
        require_few_values(body, MAX_VALUES, "")
        if media_type != CONTENT_NDJSON:
            _parse(body)
            return body
        lines = [line for line in body.splitlines() if line.strip()]
        for line in lines:
            _parse(line)
        return b"[%b]" % b",".join(lines)
    except (errors.TooLarge, ValueError, RecursionError):
        return None


def _parse(text: bytes) -> None:
    """Raises ValueError for text that is not JSON in UTF-8 (RFC 8259)."""
    json.loads(text.decode(), parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")

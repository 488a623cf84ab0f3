"""The process that parses what is in batch files: `python -m
pilotlight.controller.batches.line_process`.

A request (`pilotlight.core.compute.loop`) is what to do as JSON, and the data."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pilotlight.core.compute.loop import serve
from pilotlight.errors import PilotlightError
from pilotlight.validation.json_size import require_few_values

MAX_LINE_BYTES: Final = 1024**2
MAX_VALUES: Final = 100_000
"""JSON values of a request to a language model: an activator's event loop decodes it."""
MAX_CUSTOM_ID: Final = 512
MAX_MODEL: Final = 512
REQUEST_S: Final = 20.0


class _Wrong(Exception):
    """Raised when a line is invalid: its code and message."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def main() -> None:
    """Answer requests until standard input ends."""
    serve(answer_of, lambda _: REQUEST_S)


def answer_of(head: bytes, data: bytes) -> bytes:
    """Return the parsed lines of a file as JSON, or composed lines of one."""
    asked = json.loads(head)
    if "endpoint" not in asked:
        return composed(json.loads(data))
    found = list(parsed_lines(data, asked["endpoint"], is_openai=asked["is_openai"]))
    return json.dumps(found).encode()


def parsed_lines(data: bytes, endpoint: str, *, is_openai: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of a piece of a file, whose last line may lack its end: `n` (from 0), `id`
    (custom_id), `model` and `body` (JSON); or `n`, `id`, and `code`, `message` and `param` of what
    is wrong. Blank lines are left out."""
    for number, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        name = ""
        try:
            given = _object(line)
            name = _custom_id(given)
            yield {"n": number, "id": name, **_request(given, line, endpoint, is_openai=is_openai)}
        except _Wrong as e:
            yield {"n": number, "id": name, "code": e.code, "message": str(e), "param": e.param}


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _Wrong("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes")
    try:
        given = _loads(line)
    except (ValueError, RecursionError, MemoryError) as e:
        raise _Wrong("invalid_json_line", f"this line is not valid JSON: {e!s:.200}") from e
    if not isinstance(given, dict):
        raise _Wrong("invalid_json_line", "this line is not a JSON object")
    return given


def _custom_id(given: Mapping[str, Any]) -> str:
    name = given.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID or _is_unstorable(name):
        raise _Wrong(
            "invalid_custom_id",
            f"custom_id: a text of 1 to {MAX_CUSTOM_ID} characters",
            "custom_id",
        )
    return name


def _is_unstorable(text: str) -> bool:
    """Whether it has NUL or half of a surrogate pair, which databases do not take."""
    return "\0" in text or any("\ud800" <= c <= "\udfff" for c in text)


def _request(
    given: Mapping[str, Any], line: bytes, endpoint: str, *, is_openai: bool
) -> dict[str, Any]:
    if given.get("method", "POST") != "POST":
        raise _Wrong("invalid_method", "method: only POST", "method")
    if given.get("url") != endpoint:
        raise _Wrong(
            "mismatched_url", f"url: every line has the batch's endpoint, {endpoint}", "url"
        )
    body = given.get("body", {} if not is_openai else None)
    if not is_openai:
        if not isinstance(body, dict | list):
            raise _Wrong("invalid_body", "body: an object or a list, the arguments", "body")
        return {"model": "", "body": json.dumps(body)}
    if not isinstance(body, dict):
        raise _Wrong("invalid_body", "body: an object", "body")
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL or _is_unstorable(model):
        raise _Wrong(
            "invalid_model", "body.model: name a model, such as app/function", "body.model"
        )
    if body.get("stream"):
        raise _Wrong(
            "invalid_body", "body.stream: lines of a batch are not streamed", "body.stream"
        )
    _require_few(line)
    return {"model": model, "body": json.dumps({"path": endpoint, "body": body})}


def _require_few(line: bytes) -> None:
    try:
        require_few_values(line, MAX_VALUES, "send less in one line, or text in place of token ids")
    except PilotlightError as e:
        raise _Wrong("too_many_values", str(e), "body") from e


def composed(ended: list[dict[str, Any]]) -> bytes:
    """Return lines of an output or error file for lines that have ended: dicts with `custom_id`,
    `call`, `batch_line`, `status`, `outcome`, `content_type`, `result` (base64)."""
    return b"".join(_composed(one) for one in ended)


def _composed(one: Mapping[str, Any]) -> bytes:
    body, refusal = _body(one["content_type"], base64.b64decode(one["result"])), None
    is_platforms = one["outcome"] == "error"
    if is_platforms:
        refusal = _refusal(body)
    head = json.dumps({"id": one["batch_line"], "custom_id": one["custom_id"]})[:-1]
    response = b"null"
    if not is_platforms:
        known = json.dumps({"status_code": one["status"], "request_id": one["call"]})[:-1]
        response = b'%b, "body": %b}' % (known.encode(), body)
    return b'%b, "response": %b, "error": %b}\n' % (
        head.encode(),
        response,
        json.dumps(refusal).encode(),
    )


def _refusal(body: bytes) -> dict[str, str]:
    document = json.loads(body)
    if not isinstance(document, dict):
        return {"code": "internal", "message": ""}
    kind = str(document.get("type", "internal")).rpartition("/")[2]
    return {"code": kind, "message": str(document.get("detail", ""))}


def _body(content_type: str, data: bytes) -> bytes:
    """Return an answer's body as JSON in one line: the value itself, the list of the lines of
    NDJSON, or a text; base64 of other bytes."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/x-ndjson":
        pieces = [line for line in data.split(b"\n") if line.strip()]
        if all(map(_is_json, pieces)):
            return b"[" + b", ".join(map(_in_one_line, pieces)) + b"]"
    elif (kind == "application/json" or kind.endswith("+json")) and _is_json(data):
        return _in_one_line(data)
    try:
        return json.dumps(data.decode()).encode()
    except UnicodeDecodeError:
        return json.dumps({"base64": base64.b64encode(data).decode()}).encode()


def _in_one_line(data: bytes) -> bytes:
    # in valid JSON these are white space between values, and the separators are in strings only
    data = data.replace(b"\r", b" ").replace(b"\n", b" ")
    for separator in "\u0085\u2028\u2029":
        data = data.replace(separator.encode(), b"\\u%04x" % ord(separator))
    return data


def _is_json(data: bytes) -> bool:
    try:
        _loads(data)
        data.decode()
    except (ValueError, RecursionError, MemoryError):
        return False
    return True


def _loads(data: bytes) -> Any:
    return json.loads(data.decode(), parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


if __name__ == "__main__":
    main()

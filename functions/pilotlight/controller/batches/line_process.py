"""The process that parses what is in batch files: `python -m
pilotlight.controller.batches.line_process`.

It reads requests from standard input and answers each on standard output, in frames: four bytes of
length, then the data. A request is two frames: what to do as JSON, and the data. SIGALRM ends the
process when a request takes more than REQUEST_S: the decoder lets no Python code run meanwhile."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

from pilotlight.errors import PilotlightError
from pilotlight.validation.json_size import require_few_values

MAX_LINE_BYTES: Final = 1024**2
MAX_VALUES: Final = 100_000
"""JSON values of a request to a language model: an activator's event loop decodes it."""
MAX_CUSTOM_ID: Final = 512
MAX_MODEL: Final = 512
REQUEST_S: Final = 20.0
MAX_MEMORY_BYTES: Final = 2 * 1024**3
NICENESS: Final = 10
"""Lower CPU priority than the controller."""
_PR_SET_DUMPABLE: Final = 4


class _Wrong(Exception):
    """Raised when a line is invalid: its code and message."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def main() -> None:
    """Answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, b"ready")
    while (head := read_frame(requests)) is not None:
        data = read_frame(requests)
        if data is None:
            return
        signal.setitimer(signal.ITIMER_REAL, REQUEST_S)
        asked = json.loads(head)
        if "endpoint" in asked:
            found = list(parsed_lines(data, asked["endpoint"], is_openai=asked["is_openai"]))
            answer = json.dumps(found).encode()
        else:
            answer = composed(json.loads(data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, answer)


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


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame; None where the input has ended."""
    head = source.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Write and flush one frame."""
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


if __name__ == "__main__":
    main()

"""Requests and answers of the fake platform, and user code run as a worker would run it."""

from __future__ import annotations

import json
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.client.pickling import dumps
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_PROBLEM,
    HEADER_ENVIRONMENT,
    HEADER_OUTCOME,
    problem,
)


@dataclass(kw_only=True)
class Answer:
    """What a route answers; `stream` instead of `body` is sent in chunks as it is produced."""

    status: int = 200
    content_type: str = CONTENT_JSON
    body: bytes = b""
    stream: Iterator[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Asked:
    """One request, parsed."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def environment(self) -> str:
        return self.headers.get(HEADER_ENVIRONMENT, "main")

    def json(self) -> Any:
        return json.loads(self.body)


def run(call: Callable[..., Any], asked: Asked) -> Answer:
    """Run user code as a worker would, in the form that the caller asked for."""
    is_pickle = asked.headers.get("content-type") == CONTENT_PICKLE
    if is_pickle:
        args, kwargs = pickle.loads(asked.body)
    else:
        given = json.loads(asked.body or b"[]")
        args, kwargs = ((), given) if isinstance(given, dict) else (tuple(given), {})
    try:
        value = call(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - user code may raise anything: it becomes the answer
        return _raised(e, is_pickle)
    if hasattr(value, "__next__"):
        items = _pickled_items(value) if is_pickle else _lines(value)
        return Answer(
            content_type=CONTENT_PICKLE_STREAM if is_pickle else CONTENT_NDJSON,
            stream=items,
            headers={HEADER_OUTCOME: "ok"},
        )
    if is_pickle:
        return Answer(
            content_type=CONTENT_PICKLE, body=dumps(value), headers={HEADER_OUTCOME: "ok"}
        )
    return Answer(body=json.dumps(value).encode(), headers={HEADER_OUTCOME: "ok"})


def _raised(error: Exception, is_pickle: bool) -> Answer:
    headers = {HEADER_OUTCOME: "raised"}
    if is_pickle:
        error.add_note("Remote traceback:\n" + "".join(traceback.format_exception(error)))
        return Answer(status=500, content_type=CONTENT_PICKLE, body=dumps(error), headers=headers)
    return Answer(
        status=500,
        content_type=CONTENT_PROBLEM,
        body=json.dumps(_problem_of(error)).encode(),
        headers=headers,
    )


def _problem_of(error: Exception) -> dict[str, Any]:
    named = {"error": {"type": type(error).__name__, "message": str(error)}}
    return problem(
        type="function-raised",
        title="Function raised",
        status=500,
        detail=f"{type(error).__name__}: {error}",
        extra=named,
    )


def _lines(items: Iterator[Any]) -> Iterator[bytes]:
    try:
        for item in items:
            yield json.dumps(item).encode() + b"\n"
    except Exception as e:  # noqa: BLE001 - user code may raise anything: it ends the stream
        yield json.dumps(_problem_of(e)).encode() + b"\n"


def _pickled_items(items: Iterator[Any]) -> Iterator[bytes]:
    try:
        for item in items:
            data = dumps(item)
            yield len(data).to_bytes(4, "big") + data
    except Exception as e:  # noqa: BLE001 - user code may raise anything: it ends the stream
        data = dumps(e)
        yield b"\xff\xff\xff\xff" + len(data).to_bytes(4, "big") + data


def entered(kind: type) -> Any:
    """An instance after its hooks, made once per class."""
    if kind not in _instances:
        instance = kind()
        for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
            if "enter" in getattr(getattr(kind, name), "_pilotlight_marks", {}):
                getattr(instance, name)()
        _instances[kind] = instance
    return _instances[kind]


_instances: dict[type, Any] = {}

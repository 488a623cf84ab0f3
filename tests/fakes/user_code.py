"""Requests and answers of the fake platform, and user code run as a worker would run it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.client.pickling import dumps
from pilotlight.current_call.context import CURRENT_CALL
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_PROBLEM,
    HEADER_CALL,
    HEADER_ENVIRONMENT,
    HEADER_OUTCOME,
    problem,
)
from pilotlight.sdk.binding.parameters import set_arguments
from pilotlight.spec.function import FunctionSpec
from pilotlight.worker.user_code.current_call import RunningCall
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import marks_of
from pilotlight.worker.user_code.web_endpoints import application_builder


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


@contextlib.contextmanager
def running(call_id: str) -> Iterator[None]:
    """Make this the current call of the thread, for `pilotlight.context()`."""
    headers = {HEADER_CALL.encode(): call_id.encode()}
    token = CURRENT_CALL.set(RunningCall(headers, CallSpans(call_id)))
    try:
        yield
    finally:
        CURRENT_CALL.reset(token)


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
        if inspect.isasyncgen(value):
            value = iter(asyncio.run(_collected(value)))
        elif inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
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


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


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


def entered(kind: type, arguments: Mapping[str, Any] | None = None) -> Any:
    """An instance after its hooks, made once per class and set of arguments."""
    key = kind, json.dumps(arguments or {}, sort_keys=True)
    if key not in _instances:
        instance = kind()
        set_arguments(instance, arguments or {})
        for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
            if "enter" in getattr(getattr(kind, name), "_pilotlight_marks", {}):
                getattr(instance, name)()
        _instances[key] = instance
    return _instances[key]


_instances: dict[tuple[type, str], Any] = {}


def web_application(raw: Any, spec: FunctionSpec) -> Any:
    """The ASGI application of a function, or of a method of an instance."""
    build = raw
    if inspect.isclass(raw):
        instance = entered(raw, spec.arguments)
        found = {
            name: bound
            for name in dir(raw)
            if "asgi" in marks_of(bound := getattr(instance, name, None))
        }
        build = found.get(spec.qualname.rpartition(".")[2]) or next(iter(found.values()))
    built = application_builder(build, marks_of(build).get("asgi"))()
    return asyncio.run(built) if inspect.iscoroutine(built) else built

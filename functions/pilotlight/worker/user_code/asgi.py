"""A function that is a web application: built once after the wake, its lifespan run, and served
under WORKER_ASGI.

An application that declares an example path is built before the snapshot and that path is requested
once: the snapshot then contains what building and a first request import and compute. Such an
application must build without secrets and answer without its lifespan, which runs after the wake,
in the serving loop, like any enter(snap=False). Without an example the snapshot contains only the
effects of the module and of enter(snap=True) hooks, including their threads and processes.

The application sees the path that the caller used: `root_path` is the public prefix and `path`
begins with it (ASGI 3, HTTP connection scope), so that the links it generates work for callers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from pilotlight.current_call.context import CURRENT_CALL as RUNNING
from pilotlight.current_call.spans import CURRENT_RECORDER
from pilotlight.protocol import (
    CONTENT_PROBLEM,
    HEADER_CALL,
    HEADER_OUTCOME,
    HEADER_ROOT_PATH,
    WORKER_ASGI,
)
from pilotlight.worker.user_code import output, serialization, user_errors
from pilotlight.worker.user_code.current_call import RunningCall
from pilotlight.worker.user_code.spans import CallSpans

_ROOT_PATH = HEADER_ROOT_PATH.encode()
_CALL = HEADER_CALL.encode()
_OUTCOME = HEADER_OUTCOME.encode()


class LifespanFailed(Exception):
    """Raised when the application's lifespan startup reports a failure."""


class ExampleFailed(Exception):
    """Raised when the application answers its own example with a server error."""


class WebApplication:
    """The user's ASGI application and its lifespan. Owned by the event loop."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._app: Any = None
        self._state: dict[str, Any] = {}
        self._to_app: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._lifespan: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WebApplication {'built' if self._app is not None else 'not built'}>"

    async def startup(self) -> None:
        """Build the application, if not built yet, and run its lifespan startup. Raises what either
        raises, and LifespanFailed."""
        await self._be_built()
        self._lifespan = asyncio.create_task(self._run_lifespan(), name="lifespan")
        await self._exchange("startup")

    async def shutdown(self) -> None:
        """Run the application's lifespan shutdown."""
        await self._exchange("shutdown")
        if self._lifespan is not None:
            await asyncio.wait([self._lifespan])

    async def answer_example(self, path: str) -> dict[str, Any]:
        """GET the path without a server; returns status and body. Raises what building and the
        application raise, and ExampleFailed."""
        await self._be_built()
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        answer: dict[str, Any] = {"status": 0, "body": b""}

        async def send(message: dict[str, Any]) -> None:
            answer["status"] = message.get("status", answer["status"])
            answer["body"] += message.get("body", b"")

        await self._app(_scope(path, self._state.copy()), asked.get, send)
        if answer["status"] >= 500:
            raise ExampleFailed(
                f"the application answered its example, GET {path}, with status "
                f"{answer['status']}: {answer['body'][:200]!r}"
            )
        return answer

    async def _be_built(self) -> None:
        if self._app is None:
            app = self._build()
            self._app = await app if inspect.isawaitable(app) else app

    async def _run_lifespan(self) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self._state,
        }
        await self._app(scope, self._to_app.get, self._from_app.put)

    async def _exchange(self, event: str) -> None:
        if self._lifespan is None or self._lifespan.done():
            return  # the application does not support lifespan, which ASGI allows
        await self._to_app.put({"type": f"lifespan.{event}"})
        answer = asyncio.ensure_future(self._from_app.get())
        await asyncio.wait([answer, self._lifespan], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            message = answer.result()
            if message["type"] == f"lifespan.{event}.failed":
                raise LifespanFailed(
                    message.get("message") or f"the application's lifespan {event} failed"
                )
            return
        answer.cancel()
        # ASGI: an application that raises here does not support lifespan; not an error
        self._lifespan.exception()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request or WebSocket to the application."""
        headers = dict(scope["headers"])
        root_path = headers.get(_ROOT_PATH, b"").decode("latin-1").rstrip("/")
        call = headers.get(_CALL, b"").decode("latin-1")
        spans = CallSpans(call, headers.get(b"traceparent"))
        output.CALL.set(call)
        CURRENT_RECORDER.set(spans)
        RUNNING.set(RunningCall(headers, spans))
        spans.make_current()
        inner = {
            **scope,
            **_paths(scope, root_path),
            "root_path": root_path,
            "state": self._state.copy(),
            "extensions": {},
        }
        sender = _Sender(send, spans)
        try:
            await self._app(inner, receive, sender)
        except Exception as e:
            user_errors.report(e)
            if scope["type"] != "http" or (sender.started and not sender.complete):
                raise  # the server closes the connection: the peer notices the missing rest
            if not sender.started:
                await sender.answer_raised(e)
        finally:
            output.end_call(call)


def _scope(path: str, state: dict[str, Any]) -> dict[str, Any]:
    """An HTTP connection scope (ASGI 3) like those of our server."""
    plain, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"worker")],
        "client": None,
        "server": None,
        "state": state,
        "extensions": {},
    }


class _Sender:
    """Adds the outcome header to the head of a response, and the spans recorded so far if they are
    requested."""

    def __init__(self, send: Any, spans: CallSpans) -> None:
        self._send = send
        self._spans = spans
        self.started = False
        self.complete = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            own = [(_OUTCOME, b"ok"), *self._spans.header(message["status"])]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def answer_raised(self, error: BaseException) -> None:
        body = serialization.as_json(user_errors.as_problem(error))
        headers = [
            (b"content-type", CONTENT_PROBLEM.encode()),
            (b"content-length", b"%d" % len(body)),
            (_OUTCOME, b"raised"),
        ]
        headers += self._spans.header(500)
        await self._send({"type": "http.response.start", "status": 500, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _paths(scope: Any, root_path: str) -> dict[str, Any]:
    prefix = len(WORKER_ASGI)
    raw = scope.get("raw_path") or scope["path"].encode()
    return {
        "path": root_path + (scope["path"][prefix:] or "/"),
        "raw_path": root_path.encode("latin-1") + (raw[prefix:] or b"/"),
    }

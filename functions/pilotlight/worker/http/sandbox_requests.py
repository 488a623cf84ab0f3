"""Requests to a sandbox, below WORKER_SANDBOX; `docs/how-to/sandboxes.md` describes them.

One request has one answer, and none streams: output is read piece by piece, from an offset, and an
answer waits until there is some."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from pilotlight.errors import InvalidInput, NotFound, PilotlightError, TooLarge
from pilotlight.protocol import CONTENT_JSON, HEADER_OUTCOME, WORKER_SANDBOX
from pilotlight.spec.sandboxes import (
    EXEC_WAIT_S,
    FILE_PIECE_BYTES,
    MAX_BODY_BYTES,
    WAIT_S,
)
from pilotlight.worker.http.http_responses import send_problem
from pilotlight.worker.sandbox import files
from pilotlight.worker.sandbox.lifetime import Sandbox
from pilotlight.worker.sandbox.processes import SandboxProcess

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable

T = TypeVar("T")
_BYTES = "application/octet-stream"


class SandboxServer:
    """Answers requests to one sandbox. Owner: the event loop."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __repr__(self) -> str:
        return f"<SandboxServer of {self._sandbox!r}>"

    async def answer(
        self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer one request."""
        try:
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
            body = await _body(receive)
            await self._sandbox.wait_started()
            found = await self._route(scope["method"], scope["path"], query, body)
        except PilotlightError as e:
            await send_problem(send, e)
            return
        kind, data = (
            (_BYTES, found)
            if isinstance(found, bytes)
            else (CONTENT_JSON, json.dumps(found).encode())
        )
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", b"%d" % len(data)),
            (HEADER_OUTCOME.encode(), b"ok"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _route(self, method: str, path: str, query: Mapping[str, str], body: bytes) -> Any:
        what, *rest = path.removeprefix(WORKER_SANDBOX).strip("/").split("/")
        if what == "exec" and not rest:
            return await self._execute(body)
        if what == "processes" and rest:
            process = self._sandbox.process(_number(rest[0], "process"))
            if rest[1:] == ["stdin"]:
                await process.write(body, is_last=query.get("eof") == "1")
                return {}
            if rest[1:] == ["kill"]:
                process.kill()
                return {}
            if len(rest) == 1:
                return await _output(process, query)
        if what == "files" and not rest:
            return await self._file(method, query, body)
        if what == "directory" and not rest:
            return await self._directory(method, query)
        raise _no_such(method, path)

    async def _execute(self, body: bytes) -> dict[str, Any]:
        asked = _parsed(body)
        process = await self._sandbox.execute(
            asked["args"], workdir=asked["workdir"], env=asked["env"], timeout_s=asked["timeout_s"]
        )
        try:
            async with asyncio.timeout(EXEC_WAIT_S):
                await process.wait()
        except TimeoutError:
            pass  # it goes on
        return _news(process, 0, 0)

    async def _file(self, method: str, query: Mapping[str, str], body: bytes) -> Any:
        path = self._path(query)
        offset = _number(query["offset"], "offset") if "offset" in query else None
        if method == "GET":
            limit = _number(query.get("limit", str(FILE_PIECE_BYTES)), "limit")
            return await _in_thread(path, lambda: files.read(path, offset=offset or 0, limit=limit))
        if method == "PUT":
            truncate, exclusive = query.get("truncate") == "1", query.get("exclusive") == "1"
            end = await _in_thread(
                path,
                lambda: files.write(
                    path, body, offset=offset, truncate=truncate, exclusive=exclusive
                ),
            )
            return {"offset": end}
        if method == "DELETE":
            recursive = query.get("recursive") == "1"
            await _in_thread(path, lambda: files.remove(path, recursive=recursive))
            return {}
        raise _no_such(method, "files")

    async def _directory(self, method: str, query: Mapping[str, str]) -> Any:
        path = self._path(query)
        if method == "GET" and query.get("stat") == "1":
            return await _in_thread(path, lambda: files.describe(path))
        if method == "GET":
            return {"entries": await _in_thread(path, lambda: files.entries(path))}
        if method == "POST":
            parents = query.get("parents") == "1"
            await _in_thread(path, lambda: files.make_directory(path, parents=parents))
            return {}
        raise _no_such(method, "directory")

    def _path(self, query: Mapping[str, str]) -> str:
        given = query.get("path", "")
        if not given or "\0" in given:
            raise InvalidInput("query parameter path is missing or invalid", parameter="path")
        return os.path.join(self._sandbox.workdir, given)


async def _output(process: SandboxProcess, query: Mapping[str, str]) -> dict[str, Any]:
    stdout = _number(query.get("stdout", "0"), "stdout")
    stderr = _number(query.get("stderr", "0"), "stderr")
    await process.wait_output(stdout, stderr, min(WAIT_S, _seconds(query.get("wait_s", "0"))))
    return _news(process, stdout, stderr)


def _news(process: SandboxProcess, stdout: int, stderr: int) -> dict[str, Any]:
    """What follows these offsets. `is_ended`: nothing follows this."""
    pieces = process.read(stdout, stderr)
    is_all = (
        stdout + len(pieces[0]) == process.stdout.end
        and stderr + len(pieces[1]) == process.stderr.end
    )
    return {
        "process": process.number,
        "stdout": base64.b64encode(pieces[0]).decode(),
        "stderr": base64.b64encode(pieces[1]).decode(),
        "returncode": process.returncode,
        "is_ended": process.is_ended and is_all,
    }


async def _in_thread(path: str, work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except (OSError, ValueError) as e:
        raise files.error_of(e, path) from e


async def _body(receive: ASGIReceiveCallable) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise TooLarge(
                f"the body has more than {MAX_BODY_BYTES} bytes: send it in pieces",
                limit_bytes=MAX_BODY_BYTES,
            )
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _parsed(body: bytes) -> dict[str, Any]:
    """Parse the body of `exec`. Raises InvalidInput."""
    try:
        asked = json.loads(body)
        args, env = asked["args"], asked.get("env") or {}
        workdir, timeout_s = asked.get("workdir") or "", asked.get("timeout_s")
        is_valid = (
            all(isinstance(one, str) for one in [*args, *env, *env.values(), workdir])
            and isinstance(args, list)
            and (timeout_s is None or 0 < float(timeout_s) <= 7 * 86_400)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise InvalidInput(f"the body is no command: {type(e).__name__}: {e}"[:200]) from e
    if not is_valid:
        raise InvalidInput(
            'the body must be {"args": [texts], "workdir": text, "env": {name: text}, "timeout_s": '
            "seconds}, all but args optional"
        )
    return {"args": args, "env": env, "workdir": workdir, "timeout_s": timeout_s}


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidInput(f"{name} = {text[:40]!r}: must be a whole number", parameter=name)
    return int(text)


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError as e:
        raise InvalidInput(f"wait_s = {text[:40]!r}: must be seconds", parameter="wait_s") from e


def _no_such(method: str, path: str) -> NotFound:
    """The error of what an activator refuses before (`activator.async_calls.sandboxes`)."""
    return NotFound(f"a sandbox does not serve {method} {path[:200]}")

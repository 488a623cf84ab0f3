"""Files of a sandbox: `with sandbox.open("data.txt", "w") as f: f.write("…")`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from pilotlight.client import sandbox_answers
from pilotlight.errors import InvalidInput, PilotlightError
from pilotlight.sdk.sandboxes.requests import SandboxStep, sandbox_step
from pilotlight.sdk.steps import Operation, Steps, run
from pilotlight.spec.sandboxes import FILE_PIECE_BYTES

_MODES = frozenset({"r", "w", "a", "x", "r+", "w+", "a+", "x+"})


def send_for_path(step: SandboxStep, path: str) -> Steps[Any]:
    """Send a request about a path. Raises OSError (FileNotFoundError, …) as its kind."""
    try:
        return (yield step)
    except PilotlightError as e:
        number = e.detail.get("errno")
        if not isinstance(number, int) or number not in errno.errorcode:
            raise
        raise OSError(number, os.strerror(number), path) from e


class SandboxFile:
    """An open file of a sandbox, text or, with "b" in its mode, bytes. Each operation is a request,
    nothing is buffered, and methods have asynchronous forms: `await f.read.aio()`."""

    def __init__(self, sandbox: str, path: str, mode: str) -> None:
        plain = mode.replace("b", "").replace("t", "")
        if plain not in _MODES:
            raise InvalidInput(
                f"mode = {mode!r}: must be one of {', '.join(sorted(_MODES))}, with 'b' for bytes",
                parameter="mode",
            )
        self._sandbox = sandbox
        self._path = path
        self._kind = plain[0]
        self._is_text = "b" not in mode
        self._reads = plain[0] == "r" or "+" in plain
        self._writes = plain != "r"
        self._at = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SandboxFile {self._path} at {self._at}{' closed' if self._is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True

    def __iter__(self) -> Iterator[Any]:
        while line := run(self._read_line()):
            yield line

    def begin(self) -> Steps[SandboxFile]:
        """Open it. Raises OSError."""
        if self._kind == "r":
            found = yield from send_for_path(self._step("GET", "directory", stat=True), self._path)
            if sandbox_answers.flag(found, "is_directory"):
                raise IsADirectoryError(21, os.strerror(21), self._path)
            return self
        truncate, exclusive = self._kind == "w" or None, self._kind == "x" or None
        end = yield from send_for_path(
            self._step("PUT", "files", truncate=truncate, exclusive=exclusive), self._path
        )
        self._at = sandbox_answers.number(end, "offset")
        return self

    @Operation
    def read(self, n: int | None = None) -> Steps[Any]:
        """Return the rest, or up to `n` bytes."""
        return self._value((yield from self._read(n)))

    @Operation
    def readline(self) -> Steps[Any]:
        """Return the next line, with its end; empty at the end of the file."""
        return (yield from self._read_line())

    @Operation
    def readlines(self) -> Steps[list[Any]]:
        """Return the remaining lines."""
        data = self._value((yield from self._read(None)))
        return list(data.splitlines(keepends=True))

    @Operation
    def write(self, data: str | bytes) -> Steps[int]:
        """Write all of `data`. Raises OSError."""
        self._check(self._writes, "written")
        raw = data.encode() if isinstance(data, str) else bytes(data)
        for begin in range(0, len(raw), FILE_PIECE_BYTES):
            piece = raw[begin : begin + FILE_PIECE_BYTES]
            offset = None if self._kind == "a" else self._at
            end = yield from send_for_path(
                self._step("PUT", "files", content=piece, offset=offset), self._path
            )
            self._at = sandbox_answers.number(end, "offset")
        return len(data)

    @Operation
    def seek(self, offset: int, whence: int = 0) -> Steps[int]:
        """Move to a position in bytes, from the beginning (0), here (1) or the end (2)."""
        base = self._at if whence == 1 else 0
        if whence == 2:
            found = yield from send_for_path(self._step("GET", "directory", stat=True), self._path)
            base = sandbox_answers.number(found, "size_bytes")
        self._at = max(0, base + offset)
        return self._at

    @Operation
    def flush(self) -> Steps[None]:
        """Do nothing: what was written is in the file."""
        yield from ()

    @Operation
    def close(self) -> Steps[None]:
        """Close it: further operations raise ValueError."""
        self._is_closed = True
        yield from ()

    def _read(self, limit: int | None) -> Steps[bytes]:
        self._check(self._reads, "read")
        parts: list[bytes] = []
        left = limit
        while left is None or left > 0:
            wanted = FILE_PIECE_BYTES if left is None else min(left, FILE_PIECE_BYTES)
            step = self._step("GET", "files", offset=self._at, limit=wanted)
            answer = yield from send_for_path(step, self._path)
            piece = sandbox_answers.content(answer, wanted)
            if not piece:
                break
            parts.append(piece)
            self._at += len(piece)
            left = None if left is None else left - len(piece)
        return b"".join(parts)

    def _read_line(self) -> Steps[Any]:
        begin, data = self._at, b""
        while b"\n" not in data and (piece := (yield from self._read(8192))):
            data += piece
        line = data[: data.find(b"\n") + 1] or data
        self._at = begin + len(line)
        return self._value(line)

    def _step(self, method: str, place: str, **more: Any) -> SandboxStep:
        return sandbox_step(self._sandbox, method, place, path=self._path, **more)

    def _check(self, is_allowed: bool, what: str) -> None:
        if self._is_closed:
            raise ValueError("the file is closed")
        if not is_allowed:
            raise InvalidInput(f"{self._path}: its mode does not allow that it is {what}")

    def _value(self, data: bytes) -> Any:
        return data.decode(errors="replace") if self._is_text else data

"""sys.stdout and sys.stderr of a worker: whole lines, each marked with the call that wrote it.

A line written inside a call begins with `\\x1e<call id>\\x1f`; the shim strips the mark and records
it. Where several instances share an output, as in a pod, the mark is `<call id>@<instance>`, also
outside of calls. The call comes from a context variable, so it is correct in tasks and in our call
threads (threads that user code starts itself write unmarked lines).

Lines are written at once, in pieces of at most PIPE_BUF bytes, which a pipe accepts atomically:
writers never interleave within a line of usual length and no lock is needed (a cancelled thread
could die holding one). An unfinished line is held back until its newline, the end of its call, or
MAX_PENDING characters; of a progress bar redrawn with carriage returns only the last state remains.
If the pipe has no reader, output is dropped: a print must not break user code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from contextvars import ContextVar

CALL: ContextVar[str] = ContextVar("pilotlight_call", default="")
"""Id of the call that runs in this context; empty outside calls."""

PIPE_BUF = 4096
"""Number of bytes that Linux writes to a pipe atomically (pipe(7))."""
PENDING: dict[tuple[int, str], str] = {}
"""(descriptor, call) → its unfinished line. One for all streams, so that the end of a call costs
one look-up."""
_NAMED: list[str] = []
"""The instance that marks name, if any."""
MAX_PENDING = 8192
"""Characters of an unfinished line that are held back."""


class LineWriter(io.TextIOBase):
    """A text stream over a file descriptor. Any thread may write to it; no lock is needed (module
    docstring)."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._bytes = _ByteSide(self)

    def __repr__(self) -> str:
        return f"<LineWriter fd={self._descriptor}>"

    encoding = "utf-8"
    errors = "backslashreplace"

    @property
    def buffer(self) -> io.RawIOBase:
        """The byte side, for code that writes to `sys.stdout.buffer`."""
        return self._bytes

    def fileno(self) -> int:
        """The descriptor: 1 or 2, whatever it refers to now."""
        return self._descriptor

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, text: str) -> int:
        """Write whole lines, keep the rest; returns the number of characters taken."""
        call = CALL.get()
        held = PENDING.pop((self._descriptor, call), "") if PENDING else ""
        *lines, rest = (held + text).split("\n")
        if lines:
            self._emit(call, lines)
        if "\r" in rest:
            rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        if len(rest) > MAX_PENDING:
            self._emit(call, [rest])
        elif rest:
            PENDING[self._descriptor, call] = rest
        return len(text)

    def end_call(self, call: str) -> None:
        """Write the call's unfinished line."""
        if rest := PENDING.pop((self._descriptor, call), ""):
            self._emit(call, [rest])

    def _emit(self, call: str, lines: Iterable[str]) -> None:
        mark = f"\x1e{'@'.join([call, *_NAMED])}\x1f".encode() if call or _NAMED else b""
        piece = bytearray()
        for line in lines:
            data = mark + line.rstrip("\r").encode("utf-8", "backslashreplace") + b"\n"
            if piece and len(piece) + len(data) > PIPE_BUF:
                self._write_all(bytes(piece))
                piece.clear()
            piece += data
        self._write_all(bytes(piece))

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._descriptor, view) :]


class _ByteSide(io.RawIOBase):
    def __init__(self, lines: LineWriter) -> None:
        super().__init__()
        self._lines = lines

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._lines.fileno()

    def write(self, data: object) -> int:
        text = bytes(memoryview(data))  # type: ignore[arg-type]  # any buffer, as for every raw stream
        self._lines.write(text.decode("utf-8", "backslashreplace"))
        return len(text)


def install() -> None:
    """Replace sys.stdout and sys.stderr; done before user code is imported, since logging handlers
    keep the stream they find."""
    sys.stdout = LineWriter(1)
    sys.stderr = LineWriter(2)


def name_instance(instance: str) -> None:
    """Name the instance in all lines from now on."""
    _NAMED[:] = [instance]


def end_call(call: str) -> None:
    """Write the unfinished lines of a call on both streams."""
    if PENDING:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LineWriter):
                stream.end_call(call)


def finish() -> None:
    """Write all unfinished lines: before a fork and at the end of the process."""
    for _, call in list(PENDING):
        end_call(call)
    sys.stdout.flush()  # user code may have replaced them
    sys.stderr.flush()

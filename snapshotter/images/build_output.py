"""A build's output, split into lines, and the limits on how much of it is passed on.

Each line passed on costs work in the agent's event loop, in the log and for every listener. A
command has a burst, then LINES_PER_S and BYTES_PER_S; output beyond that is counted, and read with
pauses to save CPU. The last lines of a command are always passed on: they say why it failed."""

from __future__ import annotations

from collections import deque

LINES_PER_S = 500
BYTES_PER_S = 256 * 1024
"""The sustained rate: far above what compilers and pip print, far below what would saturate a
core."""
_BURST_S = 8
"""Seconds of these rates available as a burst: `tar xv` of a large archive prints 4000 lines."""
MAX_LINE_BYTES = 64 * 1024
"""Longer lines are split."""
LAST_LINES = 40
_LAST_LINE_BYTES = 2048
"""Of omitted output, this many last lines are kept, and the last bytes of each."""


class Output:
    """The output of one command. Owner: the task that reads it.

    Attributes:
        left_out: number of lines omitted.
        is_flooded: whether the last block exceeded the limits; the reader should pause.
    """

    def __init__(self, *, now: float) -> None:
        self._part = b""
        self._refilled_at = now
        self._lines, self._bytes = float(LINES_PER_S * _BURST_S), float(BYTES_PER_S * _BURST_S)
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self.left_out = 0
        self.is_flooded = False

    def __repr__(self) -> str:
        return f"<Output {self.left_out} lines left out>"

    def feed(self, block: bytes, *, now: float) -> list[str]:
        """Take a block; return the complete lines to pass on, without line ends. Costs less than a
        millisecond for any content."""
        self._refill(now)
        data = self._part + block
        whole, newline, self._part = data.rpartition(b"\n")
        most = int(self._lines)
        raw = whole.split(b"\n", most) if newline else []
        rest = raw.pop() if len(raw) > most else None
        taken: list[bytes] = []
        for number, line in enumerate(raw):
            if self._bytes < len(line):
                rest = b"\n".join(raw[number:] if rest is None else [*raw[number:], rest])
                break
            self._bytes -= len(line)
            taken.append(line)
        self._lines -= len(taken)
        if taken:
            self._last.clear()  # lines omitted before these are not the last lines
        self.is_flooded = rest is not None
        if rest is not None:
            self._drop(rest)
        return [_text(piece) for line in (*taken, *self._overlong()) for piece in _pieces(line)]

    def end(self) -> list[str]:
        """At the end of the output, the last lines: the omitted ones, preceded by a note on how
        many were omitted."""
        remark = [
            (
                f"[{self.left_out} lines omitted: the command printed more than {LINES_PER_S} "
                f"lines or {BYTES_PER_S} bytes per second]"
            )
        ]
        part, self._part = self._part, b""
        return [
            *(remark if self.left_out else ()),
            *map(_text, self._last),
            *map(_text, _pieces(part) if part else ()),
        ]

    def _refill(self, now: float) -> None:
        spent_s, self._refilled_at = now - self._refilled_at, now
        self._lines = min(float(LINES_PER_S * _BURST_S), self._lines + spent_s * LINES_PER_S)
        self._bytes = min(float(BYTES_PER_S * _BURST_S), self._bytes + spent_s * BYTES_PER_S)

    def _drop(self, lines: bytes) -> None:
        self.left_out += lines.count(b"\n") + 1
        self._last.extend(
            line[-_LAST_LINE_BYTES:] for line in lines.rsplit(b"\n", LAST_LINES)[-LAST_LINES:]
        )

    def _overlong(self) -> list[bytes]:
        """An incomplete line that is too long to wait for its end."""
        if len(self._part) < MAX_LINE_BYTES:
            return []
        part, self._part = self._part, b""
        if self.is_flooded or self._bytes < len(part) or self._lines < 1:
            self._drop(part)
            self.is_flooded = True
            return []
        self._bytes -= len(part)
        self._lines -= 1
        self._last.clear()
        return [part]


def _pieces(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)] or [b""]


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").rstrip("\r\n")

"""What a build prints, as lines, and how much of it is passed on.

Each line that is passed on is work for the event loop of the agent, for the log and for everybody
who listens. A command has a burst, and LINES_PER_S and BYTES_PER_S after that; what comes faster is
counted, and read with pauses, so that it costs no core. The last lines of a command are passed on
in any case: they say why it failed."""

from __future__ import annotations

from collections import deque

LINES_PER_S = 500
BYTES_PER_S = 256 * 1024
"""What is passed on for ever: far above what compilers and pip print, far below what would keep a
core busy."""
_BURST_S = 8
"""Of these rates may be used at once: `tar xv` of a large archive has 4000 lines."""
MAX_LINE_BYTES = 64 * 1024
"""A longer line comes in pieces."""
LAST_LINES = 40
_LAST_LINE_BYTES = 2048
"""Of what was left out, so many last lines are kept, and of each so many last bytes."""


class Output:
    """The output of one command. Owner: the task that reads it.

    Attributes:
        left_out: lines that were not passed on.
        is_flooded: whether the last block was more than is passed on: whoever reads should pause.
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
        """The whole lines of what was read that are passed on, without their ends. A block of any
        content costs less than a millisecond."""
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
            self._last.clear()  # what was left out before them are not the last lines
        self.is_flooded = rest is not None
        if rest is not None:
            self._leave_out(rest)
        return [_text(piece) for line in (*taken, *self._overlong()) for piece in _pieces(line)]

    def end(self) -> list[str]:
        """The last lines, once nothing comes any more: those that were left out, after a word on
        how many were."""
        remark = [
            (
                f"[{self.left_out} lines were left out: the command printed more than {LINES_PER_S} "
                f"lines or {BYTES_PER_S} bytes a second]"
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

    def _leave_out(self, lines: bytes) -> None:
        self.left_out += lines.count(b"\n") + 1
        self._last.extend(
            line[-_LAST_LINE_BYTES:] for line in lines.rsplit(b"\n", LAST_LINES)[-LAST_LINES:]
        )

    def _overlong(self) -> list[bytes]:
        """A line without an end so far that is too long to wait for it."""
        if len(self._part) < MAX_LINE_BYTES:
            return []
        part, self._part = self._part, b""
        if self.is_flooded or self._bytes < len(part) or self._lines < 1:
            self._leave_out(part)
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

"""The process that writes the rows: `python -m activator.prediction_log.writer DIRECTORY MAX_BYTES
SHIP_S`.

It reads the key of feature hashes (32 bytes) and then frames from standard input, and reports what
became of them on standard output, as JSON lines. It is given no address of the platform and no
credentials, and can make no socket: the activator ships its files. What callers sent is parsed, and
files are converted, in processes of their own (`bounded_process`): a record that ends one, or takes
more than its bounds, is dropped alone, and its tenant's next ones for a pause. At the end of its
input it converts what it has, and ends."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from activator.prediction_log import content, monitoring
from activator.prediction_log.bounded_process import (
    WRITER_CALLS,
    BeyondLimits,
    BoundedProcess,
    Compute,
)
from activator.prediction_log.frames import FrameReader, LoggedCall
from activator.prediction_log.spool import Spool
from pilotlight.spec.prediction_log import Content
from snapshotter.shim.sandbox.isolation import allow_only

KEY_BYTES: Final = 32
READ_BYTES: Final = 1024 * 1024
NICENESS: Final = 15
"""Lower CPU priority than the activator and its argument checks."""
PARSE_CPU_S, PARSE_BYTES = 1.0, 256 * 1024**2
"""Of one record, whose bodies have `frames.MAX_BODY_BYTES` at most."""
CONVERT_CPU_S, CONVERT_BYTES = 30.0, 1024**3
"""Of one file of `spool.ROTATE_BYTES`."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""How long rows of a tenant are dropped after one of its records exceeded these; it doubles."""
MAX_PAUSED: Final = 10_000
"""Tenants whose pauses are known."""
TICK_S: Final = 1.0
MISSING_LIBRARY: Final = 3
"""Exit status without pyarrow."""
_PR_SET_DUMPABLE: Final = 4


def main() -> int:
    """Write rows until standard input ends."""
    # other activators have the same uid: they must not read this process's memory
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends the input
        signal.signal(number, signal.SIG_IGN)
    allow_only(WRITER_CALLS)
    converter = BoundedProcess(_converter, cpu_s=CONVERT_CPU_S, memory_bytes=CONVERT_BYTES)
    sketcher = BoundedProcess(lambda: _sketch_of, cpu_s=CONVERT_CPU_S, memory_bytes=CONVERT_BYTES)
    try:
        converter.start()
    except ImportError:
        return MISSING_LIBRARY
    directory, max_bytes, ship_s = sys.argv[1:]
    key = os.read(sys.stdin.fileno(), KEY_BYTES)
    spool = Spool(
        Path(directory),
        partial(_convert, converter),
        sketch=partial(_sketch, sketcher),
        max_bytes=int(max_bytes),
        max_age_s=float(ship_s),
    )
    spool.recover()
    _run(spool, RowMaker(key), every_s=min(TICK_S, float(ship_s)))
    converter.close()
    sketcher.close()
    return 0


def _converter() -> Compute:
    """Import what converts files, and use it once: it loads parts when they are needed."""
    from activator.prediction_log import parquet

    parquet.set_limits()
    parquet.convert([])

    def convert(data: bytes) -> bytes:
        converted, rows = parquet.convert(data.split(b"\n"))
        return rows.to_bytes(4, "big") + converted

    return convert


def _convert(converter: BoundedProcess, lines: Iterable[bytes]) -> tuple[bytes, int]:
    """Convert rows in the converter's process. Raises ValueError, BeyondLimits."""
    data = converter.run(b"\n".join(lines))
    return data[4:], int.from_bytes(data[:4], "big")


def _sketch_of(data: bytes) -> bytes:
    return monitoring.sketch(data.split(b"\n")) or b""


def _sketch(sketcher: BoundedProcess, lines: Iterable[bytes]) -> bytes | None:
    """Count the watched values of rows in the sketcher's process; None if they have none. Raises
    ValueError, BeyondLimits."""
    rows = list(lines)
    if not any(monitoring.WATCHED_MEMBER in row for row in rows):
        return None
    return sketcher.run(b"\n".join(rows)) or None


class _Pause(NamedTuple):
    until: float
    length_s: float


class RowMaker:
    """Makes rows of records, in a process of their own. Owner: the writer process."""

    def __init__(self, key: bytes, *, cpu_s: float = PARSE_CPU_S) -> None:
        def parse(frame: bytes) -> bytes:
            (logged,) = FrameReader().feed(frame)
            return make_row(logged, key)

        self._process = BoundedProcess(lambda: parse, cpu_s=cpu_s, memory_bytes=PARSE_BYTES)
        self._pauses: dict[str, _Pause] = {}

    def __repr__(self) -> str:
        return f"<RowMaker by {self._process!r}, {len(self._pauses)} tenants paused>"

    def make(self, logged: LoggedCall, now: float) -> bytes:
        """Return the row of a record. Raises ValueError, and BeyondLimits for one that cannot be
        parsed within its bounds and for those of its tenant in the pause after it. `now`: monotonic
        seconds."""
        tenant = logged.facts["tenant"]
        pause = self._pauses.get(tenant)
        if pause is not None and now < pause.until:
            raise BeyondLimits("the tenant's records are dropped for a pause")
        try:
            row = self._process.run(logged.encode())
        except BeyondLimits:
            length_s = FIRST_PAUSE_S if pause is None else min(MAX_PAUSE_S, 2 * pause.length_s)
            if len(self._pauses) >= MAX_PAUSED:
                self._pauses.clear()
            self._pauses[tenant] = _Pause(now + length_s, length_s)
            raise
        if pause is not None and now > pause.until + MAX_PAUSE_S:
            del self._pauses[tenant]
        return row

    def close(self) -> None:
        """End the process."""
        self._process.close()


def make_row(logged: LoggedCall, key: bytes) -> bytes:
    """Return the row as JSON."""
    facts = logged.facts
    terms: dict[str, Any] = facts.pop("log")
    row = {
        **monitoring.watched_values(logged, terms),
        **content.output_columns(
            logged.output if facts.pop("output_is_json") else b"",
            content=Content(terms["outputs"]),
            scrub=terms["scrub"],
        ),
        **content.input_columns(
            logged.input if facts.pop("input_is_json") else b"",
            content=Content(terms["inputs"]),
            scrub=terms["scrub"],
            parameters=facts.pop("parameters"),
            key=key,
        ),
        **facts,
    }
    return json.dumps(row, separators=(",", ":")).encode()


def _run(spool: Spool, rows: RowMaker, *, every_s: float) -> None:
    reader, reported = FrameReader(), ""
    descriptor, is_open = sys.stdin.fileno(), True
    next_at = time.monotonic()
    while is_open:
        if select.select([descriptor], [], [], every_s)[0]:
            data = os.read(descriptor, READ_BYTES)
            is_open = bool(data)
            for logged in reader.feed(data):
                _write(spool, logged, rows)
        if time.monotonic() >= next_at:
            spool.rotate()
            reported = _report(spool, reported)
            next_at = time.monotonic() + every_s
    rows.close()
    spool.close()
    _report(spool, reported)


def _write(spool: Spool, logged: LoggedCall, rows: RowMaker) -> None:
    facts = logged.facts
    place = {"tenant": facts["tenant"], "function": facts.pop("function_id")}
    at_s, keep_s = facts["at_ns"] / 1e9, facts["log"]["keep_s"]
    try:
        row = rows.make(logged, time.monotonic())
    except BeyondLimits:
        spool.dropped["limits"] += 1
    except ValueError:
        spool.dropped["invalid"] += 1
    except OSError:  # no process could be forked
        spool.dropped["writer"] += 1
    else:
        spool.append(row, **place, at_s=at_s, keep_s=keep_s)


def _report(spool: Spool, reported: str) -> str:
    """Report the counts since the start to the parent, unless they are those of the last report
    (`reported`)."""
    state = {
        "written": spool.written,
        "dropped": dict(spool.dropped),
        "used_bytes": spool.used_bytes,
        "ready": spool.ready,
        "open_age_s": round(spool.open_age_s, 1),
    }
    text = json.dumps(state)
    if text != reported:
        try:
            os.write(sys.stdout.fileno(), text.encode() + b"\n")
        except BrokenPipeError:
            pass  # the parent was killed: the end of the input follows
    return text


if __name__ == "__main__":
    sys.exit(main())

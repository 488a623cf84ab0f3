"""The process that writes the rows: `python -m activator.prediction_log.writer DIRECTORY MAX_BYTES
SHIP_S`.

It reads the key of feature hashes (32 bytes) and then frames from standard input, and reports what
became of them on standard output, as JSON lines. It is given no address of the platform and no
credentials. At the end of its input it converts what it has, and ends."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from activator.prediction_log import content, monitoring
from activator.prediction_log.frames import FrameReader, Logged
from activator.prediction_log.spool import Spool
from pilotlight.spec.prediction_log import Content

KEY_BYTES: Final = 32
READ_BYTES: Final = 1024 * 1024
NICENESS: Final = 15
"""Lower CPU priority than the activator and its argument checks."""
MAX_MEMORY_BYTES: Final = 4 * 1024**3
"""Address space; most of it are libraries. Rows are bounded by `frames.MAX_BODY_BYTES`."""
TICK_S: Final = 1.0
MISSING_LIBRARY: Final = 3
"""Exit status without pyarrow."""
_PR_SET_DUMPABLE: Final = 4


def main() -> int:
    """Write rows until standard input ends."""
    # other activators have the same uid: they must not read this process's memory
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends the input
        signal.signal(number, signal.SIG_IGN)
    try:
        from activator.prediction_log import parquet
    except ImportError:
        return MISSING_LIBRARY
    parquet.set_limits()
    directory, max_bytes, ship_s = sys.argv[1:]
    key = os.read(sys.stdin.fileno(), KEY_BYTES)
    spool = Spool(
        Path(directory),
        parquet.convert,
        sketch=monitoring.sketch,
        max_bytes=int(max_bytes),
        max_age_s=float(ship_s),
    )
    spool.recover()
    _run(spool, key, every_s=min(TICK_S, float(ship_s)))
    return 0


def row_of(logged: Logged, key: bytes) -> bytes:
    """Return the row as JSON."""
    facts = logged.facts
    terms: dict[str, Any] = facts.pop("log")
    row = {
        **monitoring.values_of(logged, terms),
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


def _run(spool: Spool, key: bytes, *, every_s: float) -> None:
    reader, reported = FrameReader(), ""
    descriptor, is_open = sys.stdin.fileno(), True
    next_at = time.monotonic()
    while is_open:
        if select.select([descriptor], [], [], every_s)[0]:
            data = os.read(descriptor, READ_BYTES)
            is_open = bool(data)
            for logged in reader.feed(data):
                _write(spool, logged, key)
        if time.monotonic() >= next_at:
            spool.rotate()
            reported = _report(spool, reported)
            next_at = time.monotonic() + every_s
    spool.close()
    _report(spool, reported)


def _write(spool: Spool, logged: Logged, key: bytes) -> None:
    facts = logged.facts
    place = {"tenant": facts["tenant"], "function": facts.pop("function_id")}
    at_s, keep_s = facts["at_ns"] / 1e9, facts["log"]["keep_s"]
    spool.append(row_of(logged, key), **place, at_s=at_s, keep_s=keep_s)


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

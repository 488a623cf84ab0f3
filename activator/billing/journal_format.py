"""The journal's lines: one JSON object each, distinguished by `t`.

| t | fields | meaning |
|---|---|---|
| J | version, activator, life, segment, at | first line of a segment; `life` names the process that wrote it |
| T | n, request, minimum, step, u | a template: the fixed fields `u` of the records that name `n` in this segment, and prices of a call |
| O | n, c, a, k, at, q, s, v, m | attempt `a` of call `c` is dispatched; virtual clock `v` of its instance; `m`: rarely used fields |
| V | i, at, v | the virtual clock of instance `i` was `v` |
| C | at, v, u | closed: the complete UsageRecord `u` (always last, so that it can be cut out unparsed) |
| H | at | proof of life |
| S | n, c, p | a submitted call and its payload; `n` attempts were made |
| R | n, c, p | its result, which the controller does not have yet |
| F | c | the submitted call is over |

Times `at` are wall nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from activator.billing.usage_pricing import UsageTemplate

VERSION = 1
CLOSE_MARK = b'{"t":"C",'
_RECORD_MARK = b'"u":'


def header(*, activator: str, life: str, segment: int, at_ns: int) -> bytes:
    """First line of a segment."""
    return _line(
        {
            "t": "J",
            "version": VERSION,
            "activator": activator,
            "life": life,
            "segment": segment,
            "at": at_ns,
        }
    )


def template(n: int, usage: UsageTemplate) -> bytes:
    """The fixed part of records, referenced by `n`."""
    return _line(
        {
            "t": "T",
            "n": n,
            "request": usage.request_price,
            "minimum": usage.minimum_ms,
            "step": usage.rounding_ms,
            "u": dict(usage.fixed),
        }
    )


def opened(
    *,
    n: int,
    call: str,
    attempt: int,
    start_kind: str,
    at_ns: int,
    queued_ms: int,
    start_ms: int,
    virtual_ns: int,
    mark: str = "",
) -> bytes:
    """An attempt is being dispatched. `mark`: rarely used fields, formatted by
    `usage_pricing.encode_optional_fields`."""
    more = f',"m":{{{mark[1:]}}}' if mark else ""
    return (
        f'{{"t":"O","n":{n},"c":{quoted(call)},"a":{attempt},"k":"{start_kind}","at":{at_ns},'
        f'"q":{queued_ms},"s":{start_ms},"v":{virtual_ns}{more}}}\n'
    ).encode()


def virtual(*, instance: str, at_ns: int, virtual_ns: int) -> bytes:
    """An instance's virtual clock."""
    return _line({"t": "V", "i": instance, "at": at_ns, "v": virtual_ns})


def closed(record: bytes, *, at_ns: int, virtual_ns: int) -> bytes:
    """A complete usage record."""
    return b'{"t":"C","at":%d,"v":%d,"u":%b}\n' % (at_ns, virtual_ns, record)


def heartbeat(at_ns: int) -> bytes:
    """Proof of life."""
    return b'{"t":"H","at":%d}\n' % at_ns


def submitted(call: str, payload: Mapping[str, Any], *, attempts: int = 0) -> bytes:
    """A submitted call."""
    return _line({"t": "S", "n": attempts, "c": call, "p": payload})


def finished(call: str, result: Mapping[str, Any], *, attempts: int) -> bytes:
    """A submitted call's result."""
    return _line({"t": "R", "n": attempts, "c": call, "p": result})


def forgotten(call: str) -> bytes:
    """A submitted call is over."""
    return _line({"t": "F", "c": call})


def record_of(line: bytes) -> bytes:
    """Extract the usage record from a close line (without its newline), without parsing it."""
    return line[line.index(_RECORD_MARK) + len(_RECORD_MARK) : -1]


def at_of(line: bytes) -> int:
    """Extract the time from a close line, without parsing it."""
    start = len(CLOSE_MARK) + len(b'"at":')
    return int(line[start : line.index(b",", start)])


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line. Returns None when it is not a journal line (torn or damaged)."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("t"), str) else None


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"

"""Validates what a worker reports to its shim: user code shares the channel, so types and sizes are
checked before a report is forwarded.

Runs in the shim, which checks messages of workers, and in the agent, which checks messages of
shims. Standard library only. All functions raise ValueError, and nothing else, for an invalid
report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

PHASES = frozenset(
    {
        "boot",
        "import",
        "enter",
        "warmup",
        "fork",
        "assign",
        "serve",
        "wake",
        "prove",
        "quiesce",
        "first_answer",
    }
)
_LONGEST_MS = 7 * 86_400_000.0
"""The longest startup timeout that a function may declare: no phase of a start takes longer."""
_MOST_BYTES = 96 * 1024
"""Limit of one report as JSON: with the shim's additions it fits into a datagram."""
_MOST_NAMES = 200
_MOST_OBSTACLES = 24
"""More than workers name (`pilotlight.worker.snapshot.snapshot_blockers.MAX_NAMED`), plus the
shim's own."""
_MOST_NOTES = 50
_MOST_CONNECTIONS = 10_000_000
_MOST_IMPORTS = 400
"""As many as workers record (`pilotlight.worker.imports.recorder.MAX_RECORDED`)."""
_MOST_ANSWERS = 100
_IMPORT_TEXT = 128
_NAME_TEXT = 64
_NOTE_TEXT = 1024
_OBSTACLE_TEXTS = {"kind": 32, "what": 256, "where": 256, "message": 1024}
_ERROR_TEXT = 8 * 1024
_ERROR_KEYS = 8


def phases_of(report: object, *, also: frozenset[str] = frozenset()) -> dict[str, float]:
    """The phases that a worker may report, in ms, and those in `also`. They label metrics, are
    summed, and predict the next start.

    Other names are dropped, and so are invalid durations: negative, not finite, longer than a start
    may take.
    """
    if not isinstance(report, Mapping):
        return {}
    return {
        name: float(ms)
        for name, ms in report.items()
        if (name in PHASES or name in also) and _is_duration(ms)
    }


def point_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot point: threads, phases_ms, joins, imports, answers, and the keys of `findings_of`.
    Long texts and lists are truncated."""
    return _sized(
        {
            "threads": _names(_list(report, "threads")),
            "phases_ms": phases_of(report.get("phases_ms")),
            "joins": bool(report.get("joins", False)),
            "imports": _imports(report.get("imports", {})),
            "answers": answers_of(report.get("answers", {})),
            **findings_of(report),
        }
    )


def quiesced_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """A quiesced process: phases_ms, and the keys of `findings_of`."""
    return _sized({"phases_ms": phases_of(report.get("phases_ms")), **findings_of(report)})


def findings_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Obstacles, listens, connections_inside; missing keys get empty values."""
    connections = report.get("connections_inside", 0)
    if type(connections) is not int or not 0 <= connections <= _MOST_CONNECTIONS:
        raise ValueError(f"connections_inside must be an integer from 0 to {_MOST_CONNECTIONS}")
    return {
        "obstacles": [
            _obstacle(one) for one in _list(report, "obstacles", default=())[:_MOST_OBSTACLES]
        ],
        "listens": _names(_list(report, "listens", default=())),
        "connections_inside": connections,
    }


def answers_of(report: object) -> dict[str, list[str]]:
    """The answers to a worker's examples: method → digest (hex) and type."""
    if not isinstance(report, Mapping):
        raise ValueError("answers must be an object")
    answers = {}
    for name, answer in list(report.items())[:_MOST_ANSWERS]:
        if not isinstance(answer, list) or len(answer) != 2:
            raise ValueError("an answer must be a list of digest and type")
        answers[_text(name, _NAME_TEXT)] = [_text(part, _NAME_TEXT) for part in answer]
    return answers


def _imports(report: object) -> dict[str, Any]:
    """What a worker imported: `modules` (name, ms and parts of each, in order; a part is a name and
    ms), and `ended`, why they are not all. The names are imported by other workers of the tenant:
    whole ones only."""
    if not isinstance(report, Mapping):
        raise ValueError("imports must be an object")
    modules: list[list[Any]] = []
    left = _MOST_IMPORTS
    for entry in _list(report, "modules", default=()):
        if not isinstance(entry, list) or len(entry) not in (2, 3):
            raise ValueError("an import must be a list of name, duration and parts")
        parts = entry[2] if len(entry) == 3 else []
        if not isinstance(parts, list):
            raise ValueError("the parts of an import must be a list")
        left -= 1 + len(parts)
        named = _timed_names([entry[:2]])
        if left < 0 or not named:
            break
        modules.append([*named[0], _timed_names(parts)])
    return {"modules": modules, "ended": _text(report.get("ended", ""), _NOTE_TEXT)}


def _timed_names(entries: list[Any]) -> list[list[Any]]:
    """Names of modules with their durations, up to the first one that is not a module's."""
    named = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2 or not _is_duration(entry[1]):
            raise ValueError("an import must be a list of name and duration")
        name = _text(entry[0], _IMPORT_TEXT + 1)
        if len(name) > _IMPORT_TEXT or not all(part.isidentifier() for part in name.split(".")):
            break
        named.append([name, float(entry[1])])
    return named


def proved_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a validation: ok, error, notes, phases_ms."""
    error, ok = report.get("error"), report.get("ok")
    if not isinstance(ok, bool) or not (error is None or isinstance(error, Mapping)):
        raise ValueError("a validation needs a boolean ok, and an error that is an object or null")
    notes = [_text(note, _NOTE_TEXT) for note in _list(report, "notes", default=())[:_MOST_NOTES]]
    texts = None if error is None else error_of(error, most=_ERROR_TEXT)
    return _sized(
        {"ok": ok, "error": texts, "notes": notes, "phases_ms": phases_of(report.get("phases_ms"))}
    )


def error_of(report: object, *, most: int) -> dict[str, str]:
    """The texts of a failure, each truncated to its last `most` characters."""
    if not isinstance(report, Mapping):
        raise ValueError("an error must be an object")
    texts = [
        (name, text)
        for name, text in report.items()
        if isinstance(name, str) and isinstance(text, str)
    ]
    return {name[:_NAME_TEXT]: text[-most:] for name, text in texts[:_ERROR_KEYS]}


def status_of(report: object) -> int:
    """The wait status of a process that has exited (wait(2))."""
    if (
        type(report) is not int
        or not 0 <= report <= 0xFFFF
        or not (os.WIFEXITED(report) or os.WIFSIGNALED(report))
    ):
        raise ValueError("not the wait status of an exited process")
    return report


def _is_duration(ms: object) -> bool:
    return isinstance(ms, int | float) and not isinstance(ms, bool) and 0 <= ms <= _LONGEST_MS


def _obstacle(report: object) -> dict[str, Any]:
    if not isinstance(report, Mapping):
        raise ValueError("an obstacle must be an object")
    fd = report.get("fd")
    if fd is not None and (type(fd) is not int or not 0 <= fd < 2**31):
        raise ValueError("an obstacle's fd must be a descriptor or null")
    texts = {
        name: _or_none(report.get(name), partial(_text, most=most))
        for name, most in _OBSTACLE_TEXTS.items()
    }
    return {**texts, "fd": fd}


def _or_none(report: object, check: Callable[[object], T]) -> T | None:
    return None if report is None else check(report)


def _text(report: object, most: int) -> str:
    if not isinstance(report, str):
        raise ValueError("names and messages must be strings")
    return report[:most]


def _names(report: list[object]) -> list[str]:
    return [_text(name, _NAME_TEXT) for name in report[:_MOST_NAMES]]


def _list(report: Mapping[str, Any], name: str, default: object = None) -> list[object]:
    value = report.get(name, default)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list")
    return list(value)


def _sized(report: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(report)) > _MOST_BYTES:
        raise ValueError(f"a report exceeds {_MOST_BYTES} bytes")
    return report

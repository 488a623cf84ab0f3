"""Answers of sandboxes, checked: code in a sandbox can write them in its server's place, and its
caller has a key of the platform."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.errors import WorkerCrashed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutput:
    """What a command has written since it was last asked.

    Attributes:
        process: its number.
        returncode: None while it runs.
        is_ended: nothing follows."""

    process: int
    stdout: bytes
    stderr: bytes
    returncode: int | None
    is_ended: bool


def process_output(answer: Any) -> ProcessOutput:
    """Return the answer to `exec`, or about a command. Raises WorkerCrashed."""
    is_ended = bool(_member(answer, "is_ended"))
    is_running = not is_ended and _member(answer, "returncode") is None
    return ProcessOutput(
        process=number(answer, "process"),
        stdout=_output(answer, "stdout"),
        stderr=_output(answer, "stderr"),
        returncode=None if is_running else number(answer, "returncode"),
        is_ended=is_ended,
    )


def number(answer: Any, name: str) -> int:
    """Return a whole number, 0 or above. Raises WorkerCrashed."""
    value = _member(answer, name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _not_understood(name)
    return value


def flag(answer: Any, name: str) -> bool:
    """Return a boolean. Raises WorkerCrashed."""
    value = _member(answer, name)
    if not isinstance(value, bool):
        raise _not_understood(name)
    return value


def entries(answer: Any) -> Sequence[str]:
    """Return the names in a directory, none of which leads out of it. Raises WorkerCrashed."""
    names = _member(answer, "entries")
    if not isinstance(names, list) or not all(map(_is_entry, names)):
        raise _not_understood("entries")
    return tuple(names)


def content(answer: Any, limit: int) -> bytes:
    """Return a piece of a file, of at most `limit` bytes. Raises WorkerCrashed."""
    if not isinstance(answer, bytes) or len(answer) > limit:
        raise _not_understood("content")
    return answer


def ended_output(result: Any, name: str) -> tuple[bytes, int | None]:
    """Return what was not read of a stream when its sandbox ended, and the number of bytes that
    were written in all, None where that is not known. Raises WorkerCrashed."""
    if not isinstance(result, dict):
        raise _not_understood("result")
    unread = _output({name: "", **result}, name)
    end = f"{name}_end"
    return unread, number(result, end) if end in result else None


def _output(answer: Any, name: str) -> bytes:
    try:
        return base64.b64decode(_member(answer, name), validate=True)
    except (binascii.Error, TypeError, ValueError) as e:
        raise _not_understood(name) from e


def _member(answer: Any, name: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise _not_understood(name)
    return answer[name]


def _is_entry(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _not_understood(what: str) -> WorkerCrashed:
    return WorkerCrashed(
        f"the sandbox sent an answer that is not one ({what}): code in it may have replaced its "
        f"server; terminate it",
        reason="answer",
    )

"""Converts user exceptions to data: for the shim, for JSON callers (no internals), and for the SDK
(the same exception type).

`as_pickle(error)` returns bytes that unpickle to an exception wherever pilotlight is installed: the
original if its class can be loaded, otherwise a RemoteError with type, message and traceback. The
remote traceback is attached as a note (PEP 678)."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from types import TracebackType
from typing import Any

import cloudpickle

from pilotlight.errors import RemoteError
from pilotlight.protocol import ARGUMENTS_PREFIX, problem

MAX_MESSAGE = 4096
MAX_TRACEBACK = 48 * 1024
"""In characters: contains the first and the last frames of the deepest recursion."""
MAX_TRACEBACK_JSON = 64 * 1024
"""In bytes as JSON, where a character may become twelve; with a message of at most 48 KiB it fits
into the channel's 128 KiB."""

HOOK_NOTE = "in the hook "
"""Prefix of a note that names the hook in which an error was raised."""

_OURS = __file__.rsplit("/", 2)[0] + "/"


class CallCancelled(BaseException):
    """Raised inside a running synchronous function whose caller disconnected or whose deadline
    passed.

    A BaseException like asyncio.CancelledError, so that `except Exception` in user code does not
    swallow it."""


def type_name(error: BaseException) -> str:
    """`ValueError`, or `module.Class` for anything that is not a builtin."""
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def message_of(error: BaseException) -> str:
    """`str(error)`, truncated; handles a user's `__str__` that raises."""
    try:
        text = str(error)
    except Exception as e:  # a user's __str__ may raise anything
        text = f"<its __str__ raised {type(e).__name__}>"
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def traceback_text(error: BaseException) -> str:
    """The traceback without the frames of the worker and of importlib before the user's first; its
    middle is cut if it is too long."""
    _hide_our_frames(error)
    return _cut("".join(traceback.format_exception(error)), MAX_TRACEBACK)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"


def _hide_our_frames(error: BaseException) -> None:
    first: TracebackType | None = error.__traceback__
    while first is not None and _is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    # a syntax error has no frame of its own; any other error without user frames is our bug
    if first is not None or isinstance(error, SyntaxError):
        error.__traceback__ = first


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib")) or filename.endswith(
        "/importlib/__init__.py"
    )


def as_data(error: BaseException) -> dict[str, str]:
    """`{"type", "message", "traceback"}` for the control channel."""
    text, limit = traceback_text(error), MAX_TRACEBACK
    while len(json.dumps(text)) > MAX_TRACEBACK_JSON:
        limit //= 2
        text = _cut(text, limit)
    hook = next(
        (
            f" ({note.rstrip(',')})"
            for note in getattr(error, "__notes__", ())
            if note.startswith(HOOK_NOTE)
        ),
        "",
    )
    return {"type": type_name(error), "message": message_of(error) + hook, "traceback": text}


def as_problem(error: BaseException) -> dict[str, Any]:
    """The problem document of a function that raised: type and message, no internals."""
    if isinstance(error, MemoryError):
        kind, title = "out-of-memory", "The function ran out of memory"
    else:
        kind, title = "function-raised", "The function raised an exception"
    name, message = type_name(error), message_of(error)
    detail = f"{name}: {message}" if message else name
    return problem(
        type=kind,
        title=title,
        status=500,
        detail=detail,
        extra={"error": {"type": name, "message": message}},
    )


def report(error: BaseException, *, arguments: str = "") -> None:
    """Write the traceback to stderr, and thereby to the instance's log, with the types and sizes of
    the call's arguments."""
    text = f"{ARGUMENTS_PREFIX}{arguments}\n" if arguments else ""
    print(traceback_text(error), end=text, file=sys.stderr)


def as_pickle(error: BaseException) -> bytes:
    """cloudpickle bytes that load as an exception wherever pilotlight is installed."""
    return bytes(cloudpickle.dumps(_Portable(error)))


class _Portable:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error, text = self._error, traceback_text(self._error)
        return _rebuild, (_pickled_or_none(error), type_name(error), message_of(error), text)


def _pickled_or_none(error: BaseException) -> bytes | None:
    """The pickled error if it can be unpickled again: many exceptions pickle but lack the
    constructor arguments to be rebuilt."""
    try:
        data = bytes(cloudpickle.dumps(error))
        # our own bytes, in the tenant's own worker
        return data if isinstance(pickle.loads(data), BaseException) else None
    except Exception:  # user classes may raise anything while pickling
        return None


def _rebuild(data: bytes | None, name: str, message: str, remote_traceback: str) -> BaseException:
    error: BaseException | None = None
    if data is not None:
        try:
            error = pickle.loads(data)  # in the calling SDK: a response of its own tenant
        except Exception:  # the class's module is missing or differs: fall back to text
            error = None
    if not isinstance(error, BaseException):
        error = RemoteError(
            f"{name}: {message}" if message else name, type=name, traceback=remote_traceback
        )
    if not any(note.startswith("Remote traceback") for note in getattr(error, "__notes__", ())):
        error.add_note("Remote traceback:\n" + remote_traceback.rstrip())
    return error

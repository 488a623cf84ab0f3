"""Results of a call: one value as a body, or the frames of a stream.

JSON carries what it can: numpy and torch values by `tolist()`, pydantic models, dataclasses, dates,
enums, sets. Anything else is an error that names the type. NaN and infinity are refused: they are
not JSON (RFC 8259 §6)."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import cloudpickle  # type: ignore[import-untyped]  # ships none

from pilotlight.errors import DeadlineExceeded, PilotlightError
from pilotlight.protocol import CONTENT_NDJSON, CONTENT_PICKLE_STREAM, CONTENT_SSE, problem
from pilotlight.worker.user_code import user_errors


class ResultNotSerializable(PilotlightError):
    """Raised when a result cannot travel in the form that the caller asked for."""

    type = "result-not-serialisable"
    status = 500


class ExecutionTimeout(DeadlineExceeded):
    """Raised when this call's execution clock ran out: our own, where user code may raise a
    DeadlineExceeded of a call that it made."""


def as_json(value: Any) -> bytes:
    """The value as JSON text. Raises ResultNotSerializable."""
    try:
        return "".join(_encode(value, 0)).encode()
    except UnicodeEncodeError as e:
        raise ResultNotSerializable(
            f"the result holds text with lone surrogates, which UTF-8 cannot carry: {e.reason}"
        ) from e
    except RecursionError as e:
        raise ResultNotSerializable(
            "the result cannot be written as JSON: it contains itself, or is nested too deeply"
        ) from e
    except (TypeError, ValueError) as e:  # odd keys; NaN
        raise ResultNotSerializable(f"the result cannot be written as JSON: {e}") from e


def as_pickle(value: Any) -> bytes:
    """The value as cloudpickle bytes. Raises ResultNotSerializable."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as e:  # user classes may raise anything while pickling
        raise ResultNotSerializable(
            f"the result, of type {_name(value)}, cannot be pickled: {type(e).__name__}: {e}"
        ) from e


def problem_of(error: PilotlightError) -> dict[str, Any]:
    """The problem document of one of our own errors."""
    title = error.type.replace("-", " ").capitalize()
    return problem(
        type=error.type,
        title=title,
        status=error.status,
        detail=str(error),
        extra=dict(error.detail),
    )


class Framer(Protocol):
    """How the items of a generator travel."""

    content_type: str

    def item(self, value: Any) -> bytes:
        """One item. Raises ResultNotSerializable."""

    def error(self, error: BaseException) -> bytes:
        """The generator raised; ends the stream."""


class SseFrames:
    """`data: <json>` per item, `event: error` with a problem document last where it failed (HTML
    standard, server-sent events)."""

    content_type = CONTENT_SSE

    def item(self, value: Any) -> bytes:
        """See Framer."""
        return b"data: " + as_json(value) + b"\n\n"

    def error(self, error: BaseException) -> bytes:
        """See Framer."""
        return b"event: error\ndata: " + as_json(error_document(error)) + b"\n\n"


class NdjsonFrames:
    """One JSON text per line; when the generator raises, the last line is a problem document (its
    `type` begins with PROBLEM_BASE)."""

    content_type = CONTENT_NDJSON

    def item(self, value: Any) -> bytes:
        """See Framer."""
        return as_json(value) + b"\n"

    def error(self, error: BaseException) -> bytes:
        """See Framer."""
        return as_json(error_document(error)) + b"\n"


class PickleFrames:
    """Length and cloudpickle bytes per item; see CONTENT_PICKLE_STREAM."""

    content_type = CONTENT_PICKLE_STREAM
    _LENGTH = struct.Struct(">I")

    def item(self, value: Any) -> bytes:
        """See Framer."""
        data = as_pickle(value)
        return self._LENGTH.pack(len(data)) + data

    def error(self, error: BaseException) -> bytes:
        """See Framer."""
        data = user_errors.as_pickle(error)
        return self._LENGTH.pack(0xFFFFFFFF) + self._LENGTH.pack(len(data)) + data


def error_document(error: BaseException) -> dict[str, Any]:
    """The problem document of any error: ours as it is, the user's without internals."""
    return (
        problem_of(error)
        if isinstance(error, ResultNotSerializable | ExecutionTimeout)
        else user_errors.as_problem(error)
    )


def _default(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview | type):
        raise _unsuitable(value)
    for attribute, convert in _CONVERSIONS:
        if callable(getattr(value, attribute, None)):
            return convert(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike) or type(value).__module__ in (
        "uuid",
        "decimal",
        "fractions",
        "ipaddress",
    ):
        return str(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise _unsuitable(value)


def _unsuitable(value: Any) -> ResultNotSerializable:
    hint = (
        "; encode bytes as text, for instance with base64"
        if isinstance(value, bytes | bytearray | memoryview)
        else ""
    )
    return ResultNotSerializable(
        f"the result holds a {_name(value)}, which JSON cannot carry: return plain data, or call "
        f"it with the SDK{hint}"
    )


def _name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


_CONVERSIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("tolist", lambda v: v.tolist()),  # numpy scalars and arrays, torch tensors, array.array
    ("model_dump", lambda v: v.model_dump(mode="json")),  # pydantic
    ("isoformat", lambda v: v.isoformat()),  # datetime, pandas timestamps
)

_encode: Callable[[Any, int], Any] = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # the encoder behind json.dumps
    None,  # no table of containers: a cycle ends as RecursionError
    _default,
    json.encoder.encode_basestring,  # not ASCII only
    None,
    ":",
    ",",
    False,  # keys in their own order
    False,  # a key that is no text, number or None is an error
    False,  # so is NaN
)
"""Made once: json.dumps makes one per call."""

"""Serializes the results of a call: one value as a body, or the frames of a stream.

JSON supports numpy and torch values (by `tolist()`), pydantic models, dataclasses, dates, enums and
sets. Any other type is an error that names it. NaN and infinity are refused: they are not JSON (RFC
8259 §6)."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import cloudpickle

from pilotlight.errors import DeadlineExceeded, PilotlightError
from pilotlight.protocol import CONTENT_NDJSON, CONTENT_PICKLE_STREAM, CONTENT_SSE, problem
from pilotlight.worker.user_code import user_errors


class ResultNotSerializable(PilotlightError):
    """Raised when a result cannot be serialized in the format that the caller requested."""

    type = "result-not-serialisable"
    status = 500


class ExecutionTimeout(DeadlineExceeded):
    """Raised when this call exceeds its execution deadline; distinct from a DeadlineExceeded of a
    call that user code made."""


def as_json(value: Any) -> bytes:
    """The value as JSON text. Raises ResultNotSerializable."""
    try:
        return "".join(_encode(value, 0)).encode()
    except UnicodeEncodeError as e:
        raise ResultNotSerializable(
            f"the result contains text with lone surrogates, which is not valid UTF-8: {e.reason}"
        ) from e
    except RecursionError as e:
        raise ResultNotSerializable(
            "the result cannot be serialized as JSON: it contains itself, or is nested too deeply"
        ) from e
    except (TypeError, ValueError) as e:  # odd keys; NaN
        raise ResultNotSerializable(f"the result cannot be serialized as JSON: {e}") from e


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
    """Encodes the items of a generator."""

    content_type: str

    def item(self, value: Any) -> bytes:
        """Encode one item. Raises ResultNotSerializable."""

    def error(self, error: BaseException) -> bytes:
        """Encode the generator's error, which ends the stream."""


class SseFrames:
    """Server-sent events (HTML standard): `data: <json>` per item; after a failure, a final `event:
    error` with a problem document."""

    content_type = CONTENT_SSE

    def item(self, value: Any) -> bytes:
        """Encode one item. Raises ResultNotSerializable."""
        return b"data: " + as_json(value) + b"\n\n"

    def error(self, error: BaseException) -> bytes:
        """Encode the generator's error, which ends the stream."""
        return b"event: error\ndata: " + as_json(error_document(error)) + b"\n\n"


class NdjsonFrames:
    """One JSON text per line; when the generator raises, the last line is a problem document (its
    `type` begins with PROBLEM_BASE)."""

    content_type = CONTENT_NDJSON

    def item(self, value: Any) -> bytes:
        """Encode one item. Raises ResultNotSerializable."""
        return as_json(value) + b"\n"

    def error(self, error: BaseException) -> bytes:
        """Encode the generator's error, which ends the stream."""
        return as_json(error_document(error)) + b"\n"


class PickleFrames:
    """Length and cloudpickle bytes per item (CONTENT_PICKLE_STREAM)."""

    content_type = CONTENT_PICKLE_STREAM
    _LENGTH = struct.Struct(">I")

    def item(self, value: Any) -> bytes:
        """Encode one item. Raises ResultNotSerializable."""
        data = as_pickle(value)
        return self._LENGTH.pack(len(data)) + data

    def error(self, error: BaseException) -> bytes:
        """Encode the generator's error, which ends the stream."""
        data = user_errors.as_pickle(error)
        return self._LENGTH.pack(0xFFFFFFFF) + self._LENGTH.pack(len(data)) + data


def error_document(error: BaseException) -> dict[str, Any]:
    """The problem document of any error: our own unchanged, the user's without internals."""
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
        f"the result contains a {_name(value)}, which cannot be serialized as JSON: return plain "
        f"data, or call the function with the SDK{hint}"
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
    None,  # no table of containers: a cycle raises RecursionError
    _default,
    json.encoder.encode_basestring,  # not ASCII only
    None,
    ":",
    ",",
    False,  # keys in insertion order
    False,  # a key that is not a text, number or None is an error
    False,  # NaN is an error
)
"""Created once: json.dumps creates an encoder per call."""

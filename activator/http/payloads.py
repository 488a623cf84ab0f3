"""What the body of a call is, JSON or a pickle, and from whom a pickle is accepted.

A caller that sends a pickle runs code in the function's worker, with its environment and its
secrets. Pickles are therefore accepted only from callers of the function's own tenant. Only this
module decides that; `entry.Entry` holds the decision for a caller at a function, and a worker
refuses a pickle without the header that states it (HEADER_TRUSTED_PICKLE)."""

from __future__ import annotations

from typing import Final

from pilotlight import errors
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    HEADER_TRUSTED_PICKLE,
    is_pickle,
)

JSON: Final = CONTENT_JSON.encode()
PICKLE: Final = CONTENT_PICKLE.encode()
TRUSTED_LINE: Final = b"\r\n%b: 1" % HEADER_TRUSTED_PICKLE.encode()
"""Header line of a request to a worker whose body is a pickle that was accepted."""
CONTENT_TYPE: Final = b"content-type"
_OPAQUE: Final = "application/octet-stream"
_PICKLES: Final = frozenset({CONTENT_PICKLE, CONTENT_PICKLE_STREAM})


def payload_type(given: bytes | None) -> bytes:
    """JSON or PICKLE, as these very objects, for the Content-Type of a request (None = it has
    none).

    A body of any other type is JSON, and is sent on as JSON, so that a worker reads it as nothing
    else."""
    if given is None or given == JSON:
        return JSON
    return PICKLE if is_pickle(given) else JSON


def accepts_pickles(caller: str, owner: str) -> bool:
    """Whether a caller of tenant `caller` ("" = anonymous) may send pickles to a function of tenant
    `owner`."""
    return caller != "" and caller == owner


def checked_type(given: bytes | None, *, accepts: bool) -> bytes:
    """`payload_type`, where pickles are accepted or not. Raises UnsupportedMediaType."""
    found = payload_type(given)
    if found is PICKLE and not accepts:
        raise not_accepted()
    return found


def not_accepted() -> errors.UnsupportedMediaType:
    """The error of a pickle for a function of another tenant."""
    return errors.UnsupportedMediaType(
        "calls to another tenant's function are made with JSON: a pickle is accepted only from "
        "callers of the function's own tenant; "
        f"send the arguments as {CONTENT_JSON}",
        parameter="content-type",
    )


def answered_type(sent: bytes, answered: str) -> str:
    """The content type that a record keeps of an answer: a pickle only where the call was `sent` as
    one.

    A worker runs its tenant's code, which can answer anything, and clients open an answer with the
    type of a pickle."""
    if sent is not PICKLE and answered.partition(";")[0].strip().lower() in _PICKLES:
        return _OPAQUE
    return answered

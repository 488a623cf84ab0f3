"""The messages of CRIU's RPC (images/rpc.proto of its source), built from its compiled description.

The description is a FileDescriptorSet, written by `scripts/install-criu` from the rpc.proto of the
installed CRIU. Classes are created from it at run time, so this tree contains no generated code and
no copy of another project's file, and an option that this CRIU does not support is an error instead
of being silently dropped. Callers see plain values only."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message, message_factory

from snapshotter.criu.errors import CriuUnavailable

DESCRIPTOR_VARIABLE = "PILOTLIGHT_CRIU_RPC"
_SHARED = Path("share/pilotlight/criu-rpc.desc")
_FALLBACK_PREFIX = Path("/usr/local")


class InvalidResponse(ValueError):
    """Raised when bytes are not a valid response of CRIU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One message from CRIU.

    Attributes:
        kind: `DUMP`, `RESTORE`, `NOTIFY`, …, `EMPTY` if it did not understand the request.
        errno: 0 if it reports none.
        pid: of the restored root process, in CRIU's own PID namespace; 0 without one.
        notify: the current step, "" if this is not a notification.
        notify_pid: the process it concerns, or 0.
        version: `(major, minor, sublevel)`, or () in other answers.
    """

    kind: str
    success: bool
    errno: int
    error: str
    pid: int
    notify: str
    notify_pid: int
    version: tuple[int, ...]


class Messages:
    """Encoder and decoder for one version of the RPC."""

    def __init__(self, description: bytes) -> None:
        """`description`: a serialized FileDescriptorSet. Raises CriuUnavailable if it does not
        describe CRIU's RPC."""
        pool = descriptor_pool.DescriptorPool()
        try:
            for file in descriptor_pb2.FileDescriptorSet.FromString(description).file:
                pool.Add(file)
            self._request = message_factory.GetMessageClass(pool.FindMessageTypeByName("criu_req"))
            self._response = message_factory.GetMessageClass(
                pool.FindMessageTypeByName("criu_resp")
            )
            kinds = pool.FindEnumTypeByName("criu_req_type")
            self._kinds = {number: value.name for number, value in kinds.values_by_number.items()}
        except (message.DecodeError, TypeError, KeyError) as e:
            raise CriuUnavailable(
                f"not a description of CRIU's RPC: {e}; recreate it with scripts/install-criu"
            ) from e

    def request(self, kind: str, options: Mapping[str, Any] | None = None) -> bytes:
        """Encode a request of type `kind` with fields of `criu_opts` by name. Raises
        CriuUnavailable if this CRIU does not support an option."""
        body: dict[str, Any] = {"type": kind}
        if options is not None:
            body["opts"] = dict(options)
        try:
            return json_format.ParseDict(body, self._request()).SerializeToString()
        except json_format.ParseError as e:
            raise CriuUnavailable(f"the installed CRIU does not support the request: {e}") from e

    def notified(self, *, success: bool) -> bytes:
        """Encode the answer to a notification; with `success` false CRIU aborts."""
        return self._request(type="NOTIFY", notify_success=success).SerializeToString()

    def response(self, raw: bytes) -> Response:
        """Decode a response. Raises InvalidResponse."""
        try:
            body: Any = self._response.FromString(raw)
        except message.DecodeError as e:
            raise InvalidResponse(str(e)) from e
        if not body.IsInitialized():
            raise InvalidResponse("required fields are missing")
        version = body.version
        return Response(
            kind=self._kinds[body.type],
            success=body.success,
            errno=body.cr_errno,
            error=body.cr_errmsg,
            pid=body.restore.pid if body.HasField("restore") and body.restore.pid > 0 else 0,
            notify=body.notify.script if body.HasField("notify") else "",
            notify_pid=body.notify.pid,
            version=(version.major_number, version.minor_number, version.sublevel)
            if body.HasField("version")
            else (),
        )


def find_descriptor_set(environ: Mapping[str, str], binary: Path | None) -> Path | None:
    """The path of the description, or None: from the environment, otherwise installed beside
    `binary`, otherwise under /usr/local."""
    if named := environ.get(DESCRIPTOR_VARIABLE):
        return Path(named) if Path(named).is_file() else None
    prefixes = [*([binary.parent.parent] if binary is not None else []), _FALLBACK_PREFIX]
    return next((p / _SHARED for p in prefixes if (p / _SHARED).is_file()), None)


def load(path: Path) -> Messages:
    """The messages described in `path`, cached until the file changes. Raises CriuUnavailable."""
    try:
        stat = os.stat(path)
        return _load(path, stat.st_mtime_ns, stat.st_size)
    except OSError as e:
        raise CriuUnavailable(f"{path}: {e.strerror}; create it with scripts/install-criu") from e


@functools.lru_cache(maxsize=4)
def _load(path: Path, _mtime_ns: int, _size: int) -> Messages:
    return Messages(path.read_bytes())

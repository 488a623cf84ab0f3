"""A node agent as a pod's launcher sees it: a Unix stream in the tenant's directory, one JSON
object per line. Tests play its side."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WAIT_S = 30.0
"""Bound of every wait."""


class FakePodAgent:
    """Listens at `<directory>/agent.sock` while the context lasts."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "agent.sock"

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(WAIT_S)
        self._listener.bind(str(self._path))
        self._path.chmod(0o666)
        self._listener.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self._path.unlink()

    def accept(self) -> PodLine:
        """The next pod that announces itself. Raises TimeoutError."""
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_S)
        return PodLine(connection)


class PodLine:
    """A pod's line; `announced` is what it began with."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self.announced = self.hear()

    def __repr__(self) -> str:
        return f"<PodLine {self.announced.get('pod')}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()
        self._connection.close()

    def hear(self) -> dict[str, Any]:
        """The next message; {} at the end. Raises TimeoutError."""
        try:
            line = self._reader.readline()
        except ConnectionError:
            return {}
        message: dict[str, Any] = json.loads(line) if line else {}
        return message

    def is_silent(self, seconds: float) -> bool:
        """Whether it says nothing for so long."""
        return not select.select([self._connection], [], [], seconds)[0]

    def say(self, op: str, /, fds: Sequence[int] = (), **body: Any) -> None:
        """One message, with descriptors beside it."""
        data = json.dumps({"op": op, **body}).encode() + b"\n"
        if fds:
            socket.send_fds(self._connection, [data], list(fds))
        else:
            self._connection.sendall(data)

    def shout(self, data: bytes) -> None:
        """Bytes as they are."""
        self._connection.sendall(data)

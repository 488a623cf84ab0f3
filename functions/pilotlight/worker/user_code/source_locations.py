"""Locations in the user's own code: `app.py:12`.

The user's own files are those in the code directory. A function deployed by value (from a notebook)
has no files there: its own are all that belong neither to the standard library, nor to installed
packages, nor to the platform."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_MAX_FRAMES = 100
"""Maximum number of frames searched for one of the user's."""


class UserSource:
    """Recognizes the user's files. Immutable."""

    def __init__(self, code: str, *, by_value: bool) -> None:
        self._code = os.path.join(os.path.realpath(code), "")
        self._given = os.path.join(code, "")
        self._by_value = by_value
        self._libraries = (
            os.path.dirname(os.__file__) + "/",
            os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + "/",
            "<frozen ",
        )

    def __repr__(self) -> str:
        return f"<UserSource {self._code}>"

    def holds(self, filename: str) -> bool:
        """Whether the file of a code object is the user's own."""
        if filename.startswith((self._code, self._given)):
            return True
        return (
            self._by_value
            and "site-packages" not in filename
            and not filename.startswith(self._libraries)
        )

    def short(self, filename: str) -> str:
        """The file's path relative to the bundle."""
        return filename.removeprefix(self._code).removeprefix(self._given)

    def innermost(self, frame: FrameType | None) -> str | None:
        """`file:line` of the innermost user frame of the stack; None if there is none."""
        for _ in range(_MAX_FRAMES):
            if frame is None:
                return None
            if self.holds(frame.f_code.co_filename):
                return f"{self.short(frame.f_code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return None


def definition_of(function: Any) -> str:
    """Name and location of a function or bound method, such as `Service.load (app.py:12)`."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
    return (
        name if code is None else f"{name} ({_importable(code.co_filename)}:{code.co_firstlineno})"
    )


def _importable(filename: str) -> str:
    roots = [os.path.join(d, "") for d in sys.path if d]
    return min((filename.removeprefix(d) for d in roots), key=len, default=filename)


class SocketOrigins:
    """Records which user line created or connected each socket, until the snapshot point.

    `socket.socket` is written in Python: two of its methods are replaced until then and restored,
    so that an instance has no overhead. An audit hook could not be removed. Sockets that C
    libraries create (libpq, gRPC) are not recorded."""

    def __init__(self, user: UserSource) -> None:
        self._user = user
        self._places: dict[int, str] = {}
        self._class = socket.socket  # which user code may replace
        self._init: Callable[..., None] = self._class.__init__

    def __repr__(self) -> str:
        return f"<SocketOrigins known={len(self._places)}>"

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._places

    def get(self, descriptor: int) -> str | None:
        """`file:line` of the descriptor's socket; None if unknown."""
        return self._places.get(descriptor)

    def watch(self) -> None:
        """Start recording, before user code is imported."""
        kind, init, note = self._class, self._init, self._record

        def record_init(this: socket.socket, *args: Any, **kwargs: Any) -> None:
            init(this, *args, **kwargs)
            note(this.fileno())

        def record_connect(this: socket.socket, address: Any) -> None:
            note(this.fileno())
            super(kind, this).connect(address)

        kind.__init__ = record_init  # type: ignore[assignment,method-assign]
        kind.connect = record_connect  # type: ignore[assignment,method-assign]

    def unwatch(self) -> None:
        """Restore the original methods. Idempotent."""
        self._class.__init__ = self._init  # type: ignore[method-assign]
        if "connect" in vars(self._class):
            del self._class.connect

    def _record(self, descriptor: int) -> None:
        place = self._user.innermost(sys._getframe(1))
        if place is None:
            self._places.pop(descriptor, None)  # the number is reused by other code
        else:
            self._places[descriptor] = place

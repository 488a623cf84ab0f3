"""Keeps secrets out of snapshots: they are set when an instance wakes. User code that reads one
earlier gets an error that names it.

Until the wake, `os.environ` has a class whose look-ups of those names raise, for the user's own
code only: a library that checks for an optional token finds it unset. At the wake the object gets
its original class back, so that look-ups then cost nothing extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from pilotlight.worker.user_code.source_locations import UserSource

_THROUGH = ("/os.py", "<frozen os>", "/_collections_abc.py", "<frozen _collections_abc>")
"""Files whose frames lie between the reader and the look-up: os.getenv, environ.get, `in`."""


class SecretTooEarly(RuntimeError):
    """Raised when user code reads a secret's variable before it is set; not a KeyError, which
    `environ.get` would swallow."""


class Secrets:
    """Guards the secrets' names until `lift`. One per process: it acts on os.environ."""

    def __init__(self, names: Sequence[str], user: UserSource, *, snapshot: bool) -> None:
        self._names = frozenset(names)
        self._user = user
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return f"<Secrets {', '.join(sorted(self._names))}>"

    def guard(self) -> None:
        """Make look-ups of the names raise SecretTooEarly in the user's code."""
        if not self._names:
            return
        refuse = self._refuse
        names = self._names

        class GuardedEnviron(os._Environ):  # type: ignore[type-arg]  # one per guard: it closes over the names
            def __getitem__(self, key: Any) -> Any:
                try:
                    return super().__getitem__(key)
                except KeyError:
                    if key in names:
                        refuse(key)
                    raise

        os.environ.__class__ = GuardedEnviron

    def lift(self) -> None:
        """Restore the original os.environ, before the names are set. Idempotent."""
        if type(os.environ) is not os._Environ:
            os.environ.__class__ = os._Environ

    def _refuse(self, name: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_THROUGH):
            frame = frame.f_back
        if self._user.holds(frame.f_code.co_filename):
            place = f"{self._user.short(frame.f_code.co_filename)}:{frame.f_lineno}"
            raise SecretTooEarly(_message(name, place, snapshot=self._snapshot)) from None


def _message(name: str, place: str, *, snapshot: bool) -> str:
    when = (
        "after the snapshot, so that no snapshot contains it"
        if snapshot
        else "when the instance starts to serve"
    )
    return (
        f"{place} reads the secret {name}, which is set only {when}. Read it in a hook marked "
        f"@enter(snap=False), or in the call"
    )

"""A controller that is killed at a commit: an exception in place of `kill -9`, at any transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import event

from pilotlight.controller.database.store import Store


class Killed(BaseException):
    """The controller is killed."""


@contextmanager
def killed_after(store: Store, commits: int) -> Iterator[None]:
    """Kill at the commit after so many."""
    left = commits

    def on_commit(_connection: sa.Connection) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    event.listen(store.engine, "commit", on_commit)
    try:
        yield
    finally:
        event.remove(store.engine, "commit", on_commit)

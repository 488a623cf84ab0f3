"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pilotlight.cli.core.session import Session

ShowProgress = Callable[[int, str], None]
"""Shows how many are done, and a text."""


@contextlib.contextmanager
def progress_bar(session: Session, name: str, *, total: int | None) -> Iterator[ShowProgress]:
    """Show a bar with a name until the first text; nothing with --json or without a terminal.
    `total` None: it is not known."""
    if session.is_json or not session.notes().is_terminal:
        yield _show_nothing
        return
    from rich.progress import Progress

    with Progress(console=session.notes(), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def _show_nothing(done: int, text: str) -> None:
    """Show progress where there is no terminal."""

"""Progress events of a deploy or push."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PACKAGE, IMAGE, PUSH, UPLOAD, DEPLOY = "package", "image", "push", "upload", "deploy"
"""The stages, in order."""
NOTICE = "notice"
"""Stage of a remark that people have to see, not of an activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One step of progress.

    Attributes:
        stage: `package`, `image`, `push`, `upload`, `deploy` or `notice`.
        text: current activity, or a line of build output.
        done_bytes, total_bytes: bytes of the stage; 0 if it has no size."""

    stage: str
    text: str
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[ProgressEvent], None]
"""Callback for every step, one call at a time; for uploads from changing threads."""


def ignore_progress(_: ProgressEvent) -> None:
    """Do nothing."""

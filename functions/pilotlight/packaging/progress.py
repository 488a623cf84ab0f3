"""What a deploy or a push tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PACKAGE, IMAGE, UPLOAD, DEPLOY = "package", "image", "upload", "deploy"
"""The stages, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One step forward.

    Attributes:
        stage: `package`, `image`, `upload` or `deploy`.
        text: what is being done, or a line of a build's output.
        done_bytes, total_bytes: of the stage; 0 where it has no size.
    """

    stage: str
    text: str
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[ProgressEvent], None]
"""Told about every step, one at a time; about uploads not always from the same thread."""


def ignore_progress(_: ProgressEvent) -> None:
    """Where nobody listens."""

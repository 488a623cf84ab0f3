"""Resolves a tenant's symbolic link step by step, without following it.

CRIU opens the files of a process by name, with root's rights, and follows links: a link in place of
a directory would make it open a file of the host for the tenant. Standard library only. Source:
path_resolution(7).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_MAX_LINKS = 40
"""Limit in one path, as in the kernel."""


def escapes_root(path: str, *, homes: Sequence[str], files_below: str) -> bool:
    """True if `path` resolves to a location outside all `homes` that is not a regular file below
    `files_below`, or if a step on the way is outside both.

    All paths are absolute. Steps are checked because a path through /proc can lead anywhere.
    """
    known = [*homes, files_below]
    at, left, rest = "/", _MAX_LINKS, path.split("/")[::-1]
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        if not any(_is_below(at, home) or _is_below(home, at) for home in known):
            return True
        try:
            target = os.readlink(at)
        except OSError:  # not a link, or missing
            continue
        left -= 1
        if not left:
            return True
        rest += target.split("/")[::-1]
        at = "/" if target.startswith("/") else os.path.dirname(at)
    return not any(_is_below(at, home) for home in homes) and not (
        _is_below(at, files_below) and os.path.isfile(at)
    )


def _is_below(path: str, directory: str) -> bool:
    return directory in ("/", path) or path.startswith(f"{directory}/")

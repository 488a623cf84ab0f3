"""What the steps of an image may name: Debian packages, and where copied files go. The SDK, the
controller and the node agent share these checks.

`apt-get install` accepts more than names: `foo-` removes a package, `foo+` installs one,
`foo/suite` and `foo=1.0` choose a version, `foo^` is a task, and some names are regular expressions
(apt-get(8)). All of these are rejected.

Copied files go to a path relative to the image's files, which are in the working directory of
functions, or to an absolute path of the root directory that its functions see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9+.-]*(?:[a-z0-9]|\+\+))\Z")
"""Debian Policy §5.6.1, without names that end in `-`, `.` or a single `+` (apt reads the first and
the last as modifiers)."""
_MAX_CHARS = 128


def check_debian_package_name(name: object) -> str:
    """Return `name` if it is a plain Debian package name. Raises ValueError that states the
    rules."""
    if isinstance(name, str) and len(name) <= _MAX_CHARS and _NAME.match(name):
        return name
    raise ValueError(
        f"{name!r} is not the name of a Debian package: use lowercase letters, digits, '+', '.' "
        f"and '-', at least two, ending with a "
        "letter, a digit or '++'. Versions (=1.0), suites (/stable), architectures (:arm64) and "
        "modifiers (foo-, foo+) are not accepted"
    )


def apt_packages(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """All packages in the `apt` steps of an image, without duplicates. Raises ValueError for an
    invalid name."""
    found: dict[str, None] = {}
    for step in steps:
        if step.get("op") == "apt":
            packages = step.get("packages", ())
            if not isinstance(packages, list | tuple):
                raise ValueError(f"packages = {packages!r}: expected a list of names")
            found |= dict.fromkeys(check_debian_package_name(name) for name in packages)
    return list(found)


HOME = "root"
"""Modal's working directory: `/root/x` is `x` in the working directory."""
ABSOLUTE = ".absolute"
"""Directory of copied files whose paths are absolute, in the directory of all copied files."""
_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix", "proc", "run", "sbin"}
    | {"sys", "tmp", "usr", "var"}
)
"""Directories of the root that belong to the machine, or to the image's packages."""


def check_copy_target(target: str) -> PurePosixPath:
    """Return where files are copied to: relative for a path in the working directory, absolute for
    another one. Raises ValueError that says what is wrong."""
    path = PurePosixPath(target)
    if ".." in path.parts:
        raise ValueError(f"the target {target[:200]!r} must not have '..'")
    if not path.is_absolute():
        return path
    parts = path.parts[1:]
    if not parts:
        raise ValueError("the target '/' is the root directory: name a directory below it")
    if parts[0] == HOME:
        return PurePosixPath(*parts[1:])
    if parts[0] in _SYSTEM:
        raise ValueError(
            f"the target {target[:200]!r} is in /{parts[0]}, which is the system's: use a "
            f"directory of your own, such as /data"
        )
    return PurePosixPath("/", *parts)

"""Names of Debian packages that an image may install. The SDK, the controller and the node agent
share one pattern.

`apt-get install` accepts more than names: `foo-` removes a package, `foo+` installs one,
`foo/suite` and `foo=1.0` choose a version, `foo^` is a task, and some names are regular expressions
(apt-get(8)). All of these are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

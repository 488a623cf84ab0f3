"""Paths to values of JSON documents: a subset of JSONPath (RFC 9535): `$`, names (`.name`,
`['name']`), indexes (`[0]`), all (`.*`, `[*]`) and names at any depth (`..name`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from pilotlight.errors import InvalidInput

MAX_PATH_CHARS: Final = 256
MAX_SEGMENTS: Final = 16
_NAME = r"[^\x00-@\[-^`{-\x7f][^\x00-,./:-@\[-^`{-\x7f]*"
"""Letters, `_`, digits and `-` but not at first, and all beyond ASCII. The excluded characters are
listed because a class with ranges beyond ASCII takes 10 ms to compile."""
_SEGMENT: Final = re.compile(
    rf"\.\.(?P<deep>{_NAME})|\.(?P<name>{_NAME})|(?P<all>\.\*|\[\*\])"
    r"|\[(?P<index>0|[1-9][0-9]{0,8})\]"
    r"|\['(?P<single>[^'\\]+)'\]|\[\"(?P<double>[^\"\\]+)\"\]"
)


_PLAIN: Final = re.compile(_NAME)


class Segment(NamedTuple):
    """One step of a path: to the member or item `key` (None: to all of them), or to the members of
    this name at any depth."""

    key: str | int | None
    is_deep: bool = False


def format_path(keys: Iterable[str | int], *, is_general: bool = False) -> str:
    """Write a path as `parse_path` reads it. `is_general`: with `[*]` for all indexes."""
    return "$" + "".join(_format_key(key, is_general=is_general) for key in keys)


def _format_key(key: str | int, *, is_general: bool) -> str:
    if isinstance(key, int):
        return "[*]" if is_general else f"[{key}]"
    if _PLAIN.fullmatch(key):
        return f".{key}"
    quote = '"' if "'" in key else "'"
    return f"[{quote}{key}{quote}]"


def parse_path(
    path: str, *, where: str = "log: scrub path", parameter: str = "log"
) -> tuple[Segment, ...]:
    """Parse a path; () is the whole document. `where`, `parameter`: named by the error. Raises
    InvalidInput."""
    if len(path) > MAX_PATH_CHARS or not path.startswith("$"):
        raise InvalidInput(
            f"{where} {path[:80]!r}: must begin with $ and have at most {MAX_PATH_CHARS} "
            f"characters, such as $.user.email",
            parameter=parameter,
        )
    segments: list[Segment] = []
    at = 1
    while at < len(path):
        found = _SEGMENT.match(path, at)
        if found is None or len(segments) == MAX_SEGMENTS:
            raise InvalidInput(
                f"{where} {path!r}: not understood from {path[at : at + 20]!r}: use .name, "
                f"['name'], [0], [*], .* and ..name, at most {MAX_SEGMENTS} of them",
                parameter=parameter,
            )
        parts = found.groupdict()
        if parts["all"]:
            segments.append(Segment(None))
        elif parts["index"]:
            segments.append(Segment(int(parts["index"])))
        else:
            key = parts["deep"] or parts["name"] or parts["single"] or parts["double"]
            segments.append(Segment(key, is_deep=parts["deep"] is not None))
        at = found.end()
    return tuple(segments)

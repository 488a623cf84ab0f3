"""The prediction log of a function: which of its calls are logged, with what, and how long.

Paths that are scrubbed are a subset of JSONPath (RFC 9535): `$`, names (`.name`, `['name']`),
indexes (`[0]`), all (`.*`, `[*]`) and names at any depth (`..name`)."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from pilotlight.errors import InvalidInput

HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S
RAW_KEEP_S: Final = 7 * DAY_S
"""Retention window `raw`: default of a log with whole arguments or results."""
SUMMARY_KEEP_S: Final = 90 * DAY_S
"""Retention window `summaries`: default of a log with summaries or hashes only."""
MAX_KEEP_S: Final = 400 * DAY_S
MAX_PATHS: Final = 32
MAX_PATH_CHARS: Final = 256
MAX_SEGMENTS: Final = 16
_UNITS: Final = {"h": HOUR_S, "d": DAY_S}
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,4})([hd])")
_NAME = r"[^\x00-@\[-^`{-\x7f][^\x00-,./:-@\[-^`{-\x7f]*"
"""Letters, `_`, digits and `-` but not at first, and all beyond ASCII. The excluded characters are
listed because a class with ranges beyond ASCII takes 10 ms to compile."""
_SEGMENT: Final = re.compile(
    rf"\.\.(?P<deep>{_NAME})|\.(?P<name>{_NAME})|(?P<all>\.\*|\[\*\])"
    r"|\[(?P<index>0|[1-9][0-9]{0,8})\]"
    r"|\['(?P<single>[^'\\]+)'\]|\[\"(?P<double>[^\"\\]+)\"\]"
)


class Content(enum.StrEnum):
    """What a log has of arguments, or of results. NONE: sizes, and of arguments their hash.
    SUMMARY: also types, lengths and numbers, but no text. FULL: also the values."""

    NONE = "none"
    SUMMARY = "summary"
    FULL = "full"


class Segment(NamedTuple):
    """One step of a path: to the member or item `key` (None: to all of them), or to the members of
    this name at any depth."""

    key: str | int | None
    is_deep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionLogSpec:
    """Terms of a prediction log.

    Attributes:
        sample: share of the answered calls that are logged, above 0 and at most 1.
        inputs: what is logged of the arguments.
        outputs: what is logged of the result.
        scrub: JSON paths whose values are replaced in arguments and results before anything of them
            is hashed, summarized or written.
        keep_s: how long files of the log are stored, in whole hours."""

    sample: float
    inputs: Content = Content.SUMMARY
    outputs: Content = Content.SUMMARY
    scrub: tuple[str, ...] = ()
    keep_s: int = SUMMARY_KEEP_S

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise InvalidInput(
                f"log: sample = {self.sample!r}: must be above 0 and at most 1; for no log, leave "
                f"log= out",
                parameter="log",
            )
        if len(self.scrub) > MAX_PATHS:
            raise InvalidInput(
                f"log: scrub has {len(self.scrub)} paths, at most {MAX_PATHS}", parameter="log"
            )
        for path in self.scrub:
            parse_path(path)
        if self.keep_s % HOUR_S or not HOUR_S <= self.keep_s <= MAX_KEEP_S:
            raise InvalidInput(
                f"log: keep_s = {self.keep_s}: must be whole hours, {HOUR_S} to {MAX_KEEP_S}",
                parameter="log",
            )


def parse_path(path: str) -> tuple[Segment, ...]:
    """Parse a JSON path; () is the whole document. Raises InvalidInput."""
    if len(path) > MAX_PATH_CHARS or not path.startswith("$"):
        raise InvalidInput(
            f"log: scrub path {path[:80]!r}: must begin with $ and have at most {MAX_PATH_CHARS} "
            f"characters, such as $.user.email",
            parameter="log",
        )
    segments: list[Segment] = []
    at = 1
    while at < len(path):
        found = _SEGMENT.match(path, at)
        if found is None or len(segments) == MAX_SEGMENTS:
            raise InvalidInput(
                f"log: scrub path {path!r}: not understood from {path[at : at + 20]!r}: use .name, "
                f"['name'], [0], [*], .* and ..name, at most {MAX_SEGMENTS} of them",
                parameter="log",
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


def parse_window(text: str) -> int:
    """Parse a retention window such as "12h" or "7d" to seconds. Raises InvalidInput."""
    found = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not HOUR_S <= seconds <= MAX_KEEP_S:
        raise InvalidInput(
            f'log: keep = {text!r}: must be hours or days from "1h" to "{MAX_KEEP_S // DAY_S}d", '
            f'such as "7d"',
            parameter="log",
        )
    return seconds

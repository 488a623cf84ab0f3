"""The prediction log of a function: which of its calls are logged, with what, and how long."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from pilotlight.errors import InvalidInput
from pilotlight.spec.monitor import MonitorSpec, Reference
from pilotlight.validation.json_paths import parse_path

HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S
RAW_KEEP_S: Final = 7 * DAY_S
"""Retention window `raw`: default of a log with whole arguments or results."""
SUMMARY_KEEP_S: Final = 90 * DAY_S
"""Retention window `summaries`: default of a log with summaries or hashes only."""
MAX_KEEP_S: Final = 400 * DAY_S
MAX_PATHS: Final = 32
SCRUBBED: Final = "[scrubbed]"
"""In place of what `scrub` names."""
REST: Final = "*"
"""Name of the arguments by position beyond the named parameters."""
_UNITS: Final = {"h": HOUR_S, "d": DAY_S}
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,4})([hd])")


class Content(enum.StrEnum):
    """What a log has of arguments, or of results. NONE: sizes, and of arguments their hash.
    SUMMARY: also types, lengths and numbers, but no text. FULL: also the values."""

    NONE = "none"
    SUMMARY = "summary"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionLogSpec:
    """Terms of a prediction log.

    Attributes:
        sample: share of the answered calls that are logged, above 0 and at most 1.
        inputs: what is logged of the arguments.
        outputs: what is logged of the result.
        scrub: JSON paths whose values are replaced in arguments and results before anything of them
            is hashed, summarized or written.
        keep_s: how long files of the log are stored, in whole hours.
        monitor: what of the rows is watched for drift; None = nothing."""

    sample: float
    inputs: Content = Content.SUMMARY
    outputs: Content = Content.SUMMARY
    scrub: tuple[str, ...] = ()
    keep_s: int = SUMMARY_KEEP_S
    monitor: MonitorSpec | None = None

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
        if self.monitor is not None:
            self._check_monitor(self.monitor)

    def _check_monitor(self, monitor: MonitorSpec) -> None:
        needed_s = monitor.window_h * HOUR_S * (1 + (monitor.reference is Reference.PREVIOUS))
        if hidden := sorted(monitor.paths & set(self.scrub)):
            text = f"{hidden[0]!r} is scrubbed from the log: take it out of scrub or of monitor"
        elif monitor.prediction and self.outputs is Content.NONE:
            text = "prediction needs outputs='summary' or 'full' of the log, not 'none'"
        elif self.keep_s < needed_s:
            text = (
                f"the log is kept for {self.keep_s // HOUR_S} hours, and the windows that are "
                f"compared have {needed_s // HOUR_S}: raise keep, or lower window"
            )
        else:
            return
        raise InvalidInput(f"monitor: {text}", parameter="monitor")


def parse_window(text: str, *, where: str = "log: keep", parameter: str = "log") -> int:
    """Parse a window such as "12h" or "7d" to seconds. `where`, `parameter`: named by the error.
    Raises InvalidInput."""
    found = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not HOUR_S <= seconds <= MAX_KEEP_S:
        raise InvalidInput(
            f'{where} = {text!r}: must be hours or days from "1h" to "{MAX_KEEP_S // DAY_S}d", '
            f'such as "7d"',
            parameter=parameter,
        )
    return seconds

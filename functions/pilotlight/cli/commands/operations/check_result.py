"""Results of the checks of `pilotlight doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, BROKEN = "ok", "note", "broken"
LEAST_DISK_BYTES = 2 * 1024**3
"""With less free disk a check has a remark: weights and images need some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check: `state` is ok, note (works, with a remark) or broken; `way_out` is the
    suggested fix."""

    what: str
    state: str
    detail: str
    way_out: str = ""

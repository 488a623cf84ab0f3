"""What one look found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "broken"]
OK: State = "ok"
NOTE: State = "note"
BROKEN: State = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: `ok`; `note`: works, but worth knowing; `broken`: functions cannot be deployed,
        started or scaled like this. way_out: what would help, in words. commands: what would help,
        to be pasted into a shell; "" where only words do.
    """

    what: str
    state: State
    detail: str
    way_out: str = ""
    commands: tuple[str, ...] = ()

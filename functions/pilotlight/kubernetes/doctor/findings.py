"""Results of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "broken"]
OK: State = "ok"
NOTE: State = "note"
BROKEN: State = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        state: `ok`; `note`: works, but worth knowing; `broken`: functions cannot be deployed,
            started or scaled.
        way_out: the fix, in words.
        commands: the fix, as shell commands; () if there is none.
    """

    what: str
    state: State
    detail: str
    way_out: str = ""
    commands: tuple[str, ...] = ()

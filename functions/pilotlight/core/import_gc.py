"""Imported first by each process's main module: the garbage collector rests until `imported()`.

What a program imports is no garbage, and looking at it again and again takes a tenth of its start.
"""

from __future__ import annotations

import gc

_is_resting = gc.isenabled()
gc.disable()


def imported() -> None:
    """Collect as before, and leave what was imported out of it. Called after the last import."""
    global _is_resting
    if _is_resting:
        gc.freeze()
        gc.enable()
    _is_resting = False

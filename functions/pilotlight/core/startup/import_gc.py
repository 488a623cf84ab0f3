"""Pauses the garbage collector during startup. Imported first by each process's main module;
`imported()` ends the pause.

Imported modules are not garbage, and scanning them repeatedly takes a tenth of the startup time.
Leaves out the command line of httpx, which imports 70 modules (Rich, Pygments): another
twelfth of an activator's; and uvicorn's, until something uses it.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, cast

from pilotlight.core.startup.lazy_packages import defer_package

defer_package("uvicorn")
cast(Any, sys.modules).setdefault("httpx._main", None)  # httpx goes on without it
_is_resting = gc.isenabled()
gc.disable()


def imported() -> None:
    """Enable the collector, excluding the imported modules. Call after the last import."""
    global _is_resting
    if _is_resting:
        gc.freeze()
        gc.enable()
    _is_resting = False

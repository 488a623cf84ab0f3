"""A function that goes on computing after its answer, and spares no time for what else runs."""

from __future__ import annotations

import threading
import time

import pilotlight

app = pilotlight.App("restless")
_ENOUGH_S = 60.0


def _burn(until: float) -> None:
    while time.monotonic() < until:
        pass


@app.function(scaledown_window=60, snapshot=False)
def begin(after_s: float = 0.0) -> int:
    """Compute for a minute from now on, in another thread; how many threads there are."""
    if after_s:
        threading.Thread(target=_burn, args=(time.monotonic() + _ENOUGH_S,), daemon=True).start()
    return threading.active_count()

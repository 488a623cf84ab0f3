"""Times the phases of a start, and reports a phase that raises."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NoReturn

from pilotlight.worker.process.shim_channel import ShimChannel
from pilotlight.worker.user_code import output, user_errors


class PhaseTimer:
    """Stopwatch of the phases, in ms. A phase that raises is reported to the shim, and the process
    ends with status 1."""

    def __init__(self, control: ShimChannel, *, instance: str | None = None) -> None:
        self._control = control
        self._instance = instance
        self.ms: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        begun = time.monotonic()
        try:
            yield
        except BaseException as e:  # user code may raise anything
            self._fail(name, e)
        self.ms[name] = round((time.monotonic() - begun) * 1000, 3)

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        user_errors.report(error)
        output.finish()
        with contextlib.suppress(OSError):  # the shim has disconnected
            self._control.send(
                {
                    "event": "failed",
                    "instance": self._instance,
                    "phase": name,
                    "error": user_errors.as_data(error),
                }
            )
        os._exit(1)

"""The process that a pod's container runs: `python -m pilotlight.launcher`, or the console script
`pilotlight-launcher`.

It is the first process of the container, whose signals the kernel drops until it has a handler: a
pod that is deleted before that would stay for its whole grace period. So the handlers come before
the imports, which take longer than the interpreter's start."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

EX_CONFIG = 78
"""Exit status for an invalid pod configuration (sysexits.h)."""
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def main() -> int:
    """Run until the worker ends; return its exit status, 128 + the signal that ended it, or a
    status of sysexits.h if no worker was started."""
    began = time.monotonic()
    for number in _ENDS:
        signal.signal(number, _exit)
    from pilotlight.launcher.launcher import Launcher
    from pilotlight.launcher.log import log_event
    from pilotlight.launcher.pod_environment import (
        InvalidPod,
        PodEnvironment,
        PodPlace,
        is_warm,
    )

    try:
        kind = PodPlace if is_warm(os.environ) else PodEnvironment
        launcher = Launcher(kind.of(os.environ), began=began)
    except InvalidPod as e:
        log_event("launcher.misplaced", why=e)
        return EX_CONFIG
    return launcher.run()


def _exit(number: int, _: FrameType | None) -> None:
    """End before there is anything to clean up; the launcher's own handlers replace this one."""
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

"""The process that a pod's container runs: `python -m pilotlight.launcher`, or the console script
`pilotlight-launcher`."""

from __future__ import annotations

import os
import sys
import time

from pilotlight.launcher.launcher import Launcher
from pilotlight.launcher.log import log_event
from pilotlight.launcher.pod_environment import InvalidPod, PodEnvironment

EX_CONFIG = 78
"""Exit status for an invalid pod configuration (sysexits.h)."""


def main() -> int:
    """Run until the worker ends; return its exit status, 128 + the signal that ended it, or a
    status of sysexits.h if no worker was started."""
    began = time.monotonic()
    try:
        surroundings = PodEnvironment.of(os.environ)
        launcher = Launcher(surroundings, began=began)
    except InvalidPod as e:
        log_event("launcher.misplaced", why=e)
        return EX_CONFIG
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main())

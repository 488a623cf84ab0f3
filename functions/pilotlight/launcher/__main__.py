"""`python -m pilotlight.launcher`, console script `pilotlight-launcher`: the process that a pod's
container runs."""

from __future__ import annotations

import os
import sys
import time

from pilotlight.launcher.launcher import Launcher
from pilotlight.launcher.log import log_event
from pilotlight.launcher.pod_environment import InvalidPod, PodEnvironment

EX_CONFIG = 78
"""Exit status where the pod was put together wrongly (sysexits.h)."""


def main() -> int:
    """Run until the worker ends; its exit status, 128 + the signal that ended it, or one of
    sysexits.h when none came to be."""
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

"""`python -m pilotlight.controller --config platform.yaml --ready-fd N`: the control plane of one platform."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

import uvloop

from pilotlight.controller.lock import AlreadyRunning
from pilotlight.controller.server import serve
from pilotlight.controller.settings import ControllerConfig
from weight_cache.settings import SettingsInvalid

NICE = 5
"""The control plane gives way to calls: a ledger that is a second behind hurts nobody, a call that waits for it does (nice(2))."""


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; returns the exit status."""
    os.umask(0o077)  # what we write is nobody else's, unless its mode is set by hand
    parser = argparse.ArgumentParser(prog="python -m pilotlight.controller", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="platform.yaml; without it every setting has its default")
    parser.add_argument("--ready-fd", type=int, default=None, help="descriptor that gets one newline once this process serves")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.nice(NICE)
    try:
        uvloop.run(serve(ControllerConfig.read(args.config), ready_fd=args.ready_fd))
    except (AlreadyRunning, SettingsInvalid) as e:
        print(f"pilotlight controller: {e}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0  # told to stop while it stood by
    return 0


if __name__ == "__main__":
    sys.exit(main())

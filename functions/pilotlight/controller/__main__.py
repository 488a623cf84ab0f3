"""`python -m pilotlight.controller --config platform.yaml --ready-fd N`: the control plane of one
platform."""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

import uvloop

from pilotlight.controller.process import serve
from pilotlight.controller.server.bootstrap import first_admin_key
from pilotlight.controller.server.database_lock import AlreadyRunning, notify_controller
from pilotlight.controller.server.process_user import drop_root, open_as_root
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core import logging_config
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import Conflict

import_gc.imported()

NICE = 5
"""The control plane yields CPU time to calls: a ledger that lags by a second harms no one, a call
that waits for it is slow (nice(2))."""


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; return the exit status."""
    os.umask(0o077)  # files are private unless their mode is set explicitly
    parser = argparse.ArgumentParser(prog="python -m pilotlight.controller", description=__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        default=None,
        help="platform.yaml; without it every setting has its default",
    )
    parser.add_argument(
        "--ready-fd",
        type=int,
        default=None,
        help="file descriptor that receives one newline once the process serves",
    )
    parser.add_argument(
        "--first-key",
        action="store_true",
        help="print a first admin key if no key exists, and exit",
    )
    args = parser.parse_args(argv)
    logging_config.configure_logging("%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.nice(NICE)
    try:
        if args.first_key:
            return _first_key(args.config)
        config = ControllerConfig.read(args.config)
        opened = open_as_root(config)
        drop_root(config)
        uvloop.run(serve(config, opened, ready_fd=args.ready_fd))
    except (AlreadyRunning, Conflict, SettingsInvalid) as e:
        print(f"pilotlight controller: {e}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0  # stopped while it stood by
    return 0


def _first_key(config: Path | None) -> int:
    """Print the first admin key of a platform whose operator cannot run `pilotlight up`, because
    its controller runs in a cluster. Raises SettingsInvalid."""
    key = first_admin_key(config)
    if key is None:
        print(
            "pilotlight controller: there are keys already: `pilotlight token create` creates more",
            file=sys.stderr,
        )
        return 1
    print(key)
    notify_controller(ControllerConfig.read(config).paths.home / "controller.lock")
    return 0


if __name__ == "__main__":
    sys.exit(main())

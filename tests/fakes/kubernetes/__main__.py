"""`python -m tests.fakes.kubernetes [--port N] --kubeconfig FILE [--no-knative]`: an API server as
a process, until it is told to stop.

The kubeconfig is written when the server listens: its appearance is the sign that it does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path

from tests.fakes.kubernetes.server import ApiServer


async def _serve(port: int, kubeconfig: Path, *, knative: bool) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with ApiServer(port=port, knative=knative) as server:
        draft = server.write_kubeconfig(kubeconfig.with_suffix(".draft"))
        os.replace(draft, kubeconfig)
        print(f"{server.url} {kubeconfig}", flush=True)
        await stop.wait()


def main() -> None:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--no-knative", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.kubeconfig, knative=not arguments.no_knative))


if __name__ == "__main__":
    main()

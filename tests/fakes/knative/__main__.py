"""`python -m tests.fakes.knative [--directory DIR] [--nodes N] [--speed X]`: a cluster for
development, until it is told to stop.

Prints one line of JSON once it is up: `kubeconfig`, `wake_url`, `platform_yaml` (a file for
`pilotlight up --config`), `directory`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path

from tests.fakes.knative.cluster import DRAIN_S, FakeKnative

IMAGE = f"registry.example/pilotlight/runtime@sha256:{'0' * 64}"


def platform_yaml(kubeconfig: Path, wake_url: str, node_path: Path, home: Path) -> str:
    """Settings of a platform on that cluster."""
    document = {
        "platform": {"home": str(home), "fleet": "knative"},
        "cluster": {
            "kubeconfig": str(kubeconfig),
            "wake_url": wake_url,
            "node_path": str(node_path),
            "runtime_image": IMAGE,
        },
    }
    return json.dumps(document, indent=2)


async def _serve(
    directory: Path, *, nodes: int, speed: float, grace_s: float, quiet_s: float
) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with FakeKnative(
        directory, nodes=nodes, speed=speed, grace_s=grace_s, quiet_s=quiet_s
    ) as cluster:
        settings = directory / "platform.yaml"
        settings.write_text(
            platform_yaml(
                cluster.kubeconfig, cluster.wake_url, directory / "node", directory / "home"
            )
        )
        said = {
            "api": cluster.api.url,
            "kubeconfig": str(cluster.kubeconfig),
            "wake_url": cluster.wake_url,
            "platform_yaml": str(settings),
        }
        print(json.dumps({**said, "directory": str(directory)}), flush=True)
        await stop.wait()


def main() -> None:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="of pods' files; a temporary one by default")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0, help="of the autoscaler's time")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="scale-to-zero grace period, seconds of its time"
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=DRAIN_S,
        help="how long queue-proxy holds the end of a pod, seconds of that time",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="plk", ignore_cleanup_errors=True) as name:
        directory = arguments.directory or Path(name)
        directory.chmod(0o755)
        asyncio.run(
            _serve(
                directory,
                nodes=arguments.nodes,
                speed=arguments.speed,
                grace_s=arguments.grace,
                quiet_s=arguments.quiet,
            )
        )


if __name__ == "__main__":
    main()

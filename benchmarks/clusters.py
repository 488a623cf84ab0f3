"""Which cluster a benchmark runs on: `--kubeconfig FILE --cluster-config FILE` name a real one, on
its node (docs/how-to/test-on-a-cluster.md); otherwise it brings its own along."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.clustered import RealCluster


def real_cluster(argv: Sequence[str] | None = None) -> tuple[RealCluster | None, list[str]]:
    """The real cluster, None without one; and the other arguments. Raises SystemExit."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--cluster-config", type=Path)
    given, rest = parser.parse_known_args(argv)
    if given.kubeconfig is None:
        return None, rest
    if given.cluster_config is None:
        parser.error(
            "--kubeconfig: needs --cluster-config FILE as well (docs/how-to/test-on-a-cluster.md)"
        )
    return RealCluster.read(given.kubeconfig, given.cluster_config), rest

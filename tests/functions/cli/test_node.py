"""`pilotlight node list` and `cluster` against the real control plane."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from typer.testing import CliRunner

from pilotlight.cli.main import build
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from snapshotter.types import NODES_PATH
from tests.fakes.node_reports import node_report
from tests.fakes.served_controller import ServedController


def test_nodes_are_listed_with_what_is_hot_and_free(tmp_path: Path) -> None:
    with ServedController(tmp_path) as platform:

        def run(*words: str) -> str:
            done = CliRunner().invoke(
                build(), list(words), env=platform.environ(), prog_name="pilotlight"
            )
            assert done.exit_code == 0, done.output
            return done.stdout

        none = run("node", "list")
        token = PlatformKey.load(tmp_path / "platform.key").node_token
        body = node_report(weights=["a" * 64]).to_json()
        own = json.loads(run("cluster", "show", "--json"))
        adopted = run("cluster", "adopt", "unlabelled", "--yes")
        whose = run("cluster", "show")
        answer = httpx.post(
            platform.url + NODES_PATH, json=body, headers={HEADER_PLATFORM_TOKEN: token}
        )
        shown, told = run("node", "list"), json.loads(run("node", "list", "--json"))

    assert answer.status_code == 204
    assert adopted.strip() == f"unlabelled is adopted by {own['platform']}"
    assert f"platform {own['platform']}\nadopted: unlabelled" in whose
    assert "No nodes" in none
    assert "1 x NVIDIA H100 80GB HBM3 (1 free)" in shown
    assert [(row["node"], row["weights"]) for row in told] == [("node-1", 1)]

"""`pilotlight node list` and `cluster` against the real control plane."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from typer.testing import CliRunner

from pilotlight.cli.main import build
from pilotlight.controller.kubernetes.warm.status import PoolShape
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from snapshotter.node_reports import NODES_PATH
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
        shape = PoolShape(shape="small", wanted=3, warm=2, starting=1, promoted=14)
        platform.warm_pods.shapes = (shape,)
        whose = run("cluster", "show")
        platform.warm_pods.trouble = "pods do not grow: no right"
        troubled = run("cluster", "show")
        pool = json.loads(run("cluster", "show", "--json"))["warm_pods"]
        answer = httpx.post(
            platform.url + NODES_PATH, json=body, headers={HEADER_PLATFORM_TOKEN: token}
        )
        shown, told = run("node", "list"), json.loads(run("node", "list", "--json"))

    assert answer.status_code == 204
    assert adopted.strip() == f"unlabelled is adopted by {own['platform']}"
    assert f"platform {own['platform']}\nadopted: unlabelled" in whose
    assert own["warm_pods"] == []
    assert troubled.splitlines()[-1] == "pods do not grow: no right"
    assert pool == [{"shape": "small", "wanted": 3, "warm": 2, "starting": 1, "promoted": 14}]
    assert [line.split() for line in whose.splitlines()[-2:]] == [
        ["SHAPE", "WARM", "STARTING", "PROMOTED", "WANTED"],
        ["small", "2", "1", "14", "3"],
    ]
    assert "No nodes" in none
    assert "1 x NVIDIA H100 80GB HBM3 (1 free)" in shown
    assert [(row["node"], row["weights"]) for row in told] == [("node-1", 1)]

"""`pilotlight deploy` on a platform whose functions are in a cluster: it waits for them, and says
why one will not come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pilotlight.cli.commands.apps.deploy_progress import Deployer
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.cli.main import build
from pilotlight.controller.kubernetes.function_status import FunctionStatus, Phase
from tests.fakes.served_controller import ServedController

SOURCE = """
import pilotlight
app = pilotlight.App("search")

@app.function()
def embed(text: str) -> int:
    return 1
"""


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[ServedController]:
    with ServedController(tmp_path) as served:
        yield served


def run(platform: ServedController, *words: str) -> Result:
    return CliRunner().invoke(build(), list(words), env=platform.environ(), prog_name="pilotlight")


def shown(platform: ServedController) -> dict[str, object]:
    """The app's only function."""
    out = run(platform, "app", "show", "search", "--json")
    function: dict[str, object] = json.loads(out.stdout)["functions"][0]
    return function


def deploy(platform: ServedController, home: Path, *words: str) -> Result:
    file = home / "clustered.py"
    file.write_text(SOURCE)
    return run(platform, "deploy", str(file), *words)


def test_without_a_cluster_there_is_nothing_to_wait_for(
    platform: ServedController,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert deploy(platform, tmp_path, "--no-wait").exit_code == 0
    assert shown(platform)["cluster"] is None
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with platform.client() as client:
        Deployer(Session(options=CommonOptions()), client).wait_cluster("search", ["embed"])
    assert capsys.readouterr().err == ""


def test_it_ends_with_the_clusters_own_reason(platform: ServedController, tmp_path: Path) -> None:
    assert deploy(platform, tmp_path, "--no-wait").exit_code == 0
    platform.statuses.is_kept = True
    assert shown(platform)["cluster"]["reason"] == "NotSeen"  # type: ignore[index]
    status = FunctionStatus(
        phase=Phase.FAILED,
        reason="ImagePullBackOff",
        message="the image cannot be pulled [registry.example/x]",
        generation=1 << 20,
    )
    platform.statuses.set(str(shown(platform)["id"]), status, now=platform.now)
    said = run(platform, "app", "show", "search").stdout
    assert "failed" in said
    assert "embed: ImagePullBackOff: the image cannot be pulled [registry.example/x]" in said
    out = deploy(platform, tmp_path)
    assert out.exit_code == 1
    assert (
        "search/embed is not ready in the cluster: ImagePullBackOff: the image cannot be pulled"
        in out.stderr
    )


def test_what_was_said_of_an_earlier_change_says_nothing_of_this_one(
    platform: ServedController, tmp_path: Path
) -> None:
    assert deploy(platform, tmp_path, "--no-wait").exit_code == 0
    platform.statuses.is_kept = True
    function = str(shown(platform)["id"])
    for phase in (Phase.READY, Phase.FAILED):
        platform.statuses.set(
            function, FunctionStatus(phase=phase, generation=-1), now=platform.now
        )
        assert shown(platform)["cluster"] == {
            "phase": "pending",
            "reason": "NotSeen",
            "message": "the latest change has not reached the cluster yet",
            "since": platform.now,
        }
    platform.statuses.set(
        function, FunctionStatus(phase=Phase.READY, generation=1 << 20), now=platform.now
    )
    with platform.client() as client:
        Deployer(Session(options=CommonOptions(json=True)), client).wait_cluster(
            "search", ["embed"]
        )

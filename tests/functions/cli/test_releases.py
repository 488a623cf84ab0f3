"""`pilotlight deploy` with its terms, and `pilotlight app revisions|diff|promote|rollback|…`,
against the real control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pilotlight.cli.commands.apps import release_options
from pilotlight.cli.main import build
from pilotlight.errors import InvalidInput
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist

SOURCE = """
import pilotlight
app = pilotlight.App("search")

@app.function(require={require}, cpu={cpu})
def embed(text: str{more}) -> {returns}:
    return 1
"""


class Shell(Typist):
    """Types commands."""

    def __init__(self, platform: ServedController, home: Path) -> None:
        self.platform = platform
        self.home = home
        self.files = 0

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)

    def source(
        self, *, returns: str = "int", more: str = "", cpu: float = 1.0, require: str = "{}"
    ) -> str:
        self.files += 1  # of its own name: one process imports a module once
        file = self.home / f"searching{self.files}.py"
        file.write_text(SOURCE.format(returns=returns, more=more, cpu=cpu, require=require))
        return str(file)

    def deploy(self, *words: str, **source: Any) -> Any:
        return self.json("deploy", self.source(**source), "--no-wait", *words)["functions"][0]


@pytest.fixture(name="shell")
def _shell(served: ServedController, tmp_path: Path) -> Shell:
    (tmp_path / "source").mkdir()
    return Shell(served, tmp_path / "source")


@pytest.mark.parametrize("text", ["5", "31d", "x"])
def test_a_lease_out_of_bounds_is_refused_before_anything_is_sent(shell: Shell, text: str) -> None:
    said = shell.failed("deploy", shell.source(), "--no-wait", "--lease", text)
    assert text in said


def test_a_preview_has_a_lease_until_it_is_deployed_without(shell: Shell) -> None:
    file = shell.source()
    shell.json("deploy", file, "--no-wait", "--lease", "2h")
    assert [app["expires_at"] is not None for app in shell.json("app", "list")] == [True]
    shell.json("deploy", file, "--no-wait")
    assert [app["expires_at"] for app in shell.json("app", "list")] == [None]


def test_a_bad_release_is_refused_and_the_way_out_is_shown(shell: Shell) -> None:
    shell.deploy(returns="int")
    said = shell.failed("deploy", shell.source(returns="float"), "--no-wait")
    assert "the result: was integer, may now be number" in said
    assert "--allow-breaking" in said
    assert shell.deploy("--allow-breaking", returns="float")["stage"] == "live"
    metrics = shell.home / "metrics.json"
    metrics.write_text('{"embed": {"accuracy": 0.9}, "loss": 0.1}')
    gated = shell.source(returns="float", require='{"accuracy": ">= 0.91"}')
    assert "accuracy >= 0.91: the value is 0.9" in shell.failed(
        "deploy", gated, "--no-wait", "--eval", str(metrics)
    )
    metrics.write_text('{"accuracy": 0.95}')
    assert shell.json("deploy", gated, "--no-wait", "--eval", str(metrics))["functions"][0][
        "revision"
    ].startswith("v3-")


def test_releases_are_looked_at_compared_and_taken_back(shell: Shell) -> None:
    shell.deploy("--meta", "dataset=sha256:1")
    shell.deploy("--message", "more of it", cpu=2.0)
    newest = shell.run("app", "revisions", "search").stdout.splitlines()[1].split()
    assert (newest[0][:3], newest[1]) == ("v2-", "100")
    told = shell.json("app", "revision", "search/embed", "v1")
    assert told["lineage"]["dataset"] == "sha256:1"
    assert told["schemas"][0]["returns"]["type"] == "integer"
    assert "sha256:1" in shell.run("app", "revision", "search", "v1").stdout
    changed = shell.json("app", "diff", "search", "v1", "v2")["changes"]
    assert {"what": "resources.cpu", "from": 1.0, "to": 2.0} in changed
    assert "resources.cpu" in shell.run("app", "diff", "search", "v1", "v2").stdout
    assert "is back on v1-" in shell.run("app", "rollback", "search", "--yes").stdout
    assert "no revision of search/embed served before v1-" in shell.failed(
        "app", "rollback", "search", "--yes"
    )
    promoted = shell.run("app", "promote", "search/embed", "v2", "--yes").stdout
    assert "takes all traffic of search/embed" in promoted
    assert [entry["action"] for entry in shell.json("app", "history", "search")] == [
        "promote",
        "rollback",
        "deploy",
        "deploy",
    ]


def test_an_app_is_rolled_back_with_all_its_functions(shell: Shell) -> None:
    def deploy(names: str, cpu: float) -> None:
        source = "import pilotlight\napp = pilotlight.App('pair')\n"
        for name in names:
            source += f"@app.function(cpu={cpu})\ndef {name}(): ...\n"
        file = shell.home / f"pair{len(names)}_{cpu:g}.py"
        file.write_text(source)
        shell.good("deploy", str(file), "--no-wait")

    deploy("ab", 1.0)
    deploy("ab", 2.0)
    back = shell.json("app", "rollback", "pair", "--yes")
    assert [(one["function"], one["revision"][:3]) for one in back["functions"]] == [
        ("a", "v1-"),
        ("b", "v1-"),
    ]
    deploy("abc", 3.0)
    assert "3 functions" in shell.failed("app", "rollback", "pair", "--to", "v1", "--yes")
    said = shell.failed("app", "rollback", "pair", "--yes")
    assert "no function was changed: no revision of pair/c served before v1-" in said
    assert "rollback pair/NAME" in said
    assert shell.json("app", "history", "pair")[0]["action"] == "deploy"
    assert "pair/a is back on v1-" in shell.good("app", "rollback", "pair/a", "--yes")


def test_a_rollback_asks_first(shell: Shell) -> None:
    shell.deploy()
    done = CliRunner().invoke(
        build(),
        ["app", "rollback", "search"],
        env=shell.platform.environ(),
        input="n\n",
        prog_name="pilotlight",
    )
    assert done.exit_code != 0
    assert [entry["action"] for entry in shell.json("app", "history", "search")] == ["deploy"]


def test_somebody_else_approves(shell: Shell) -> None:
    shell.deploy()
    assert (
        "new revisions need 1 approval"
        in shell.run("app", "protect", "search", "--approvals", "1").stdout
    )
    waiting = shell.run("deploy", shell.source(cpu=2.0), "--no-wait").stdout
    assert (
        "needs 1 more approval: ask another person to run `pilotlight app approve search/embed v2-"
        in waiting
    )
    assert "needs 1 more approval" in shell.failed("app", "promote", "search", "v2", "--yes")
    assert "approve it with another key" in shell.failed("app", "approve", "search", "v2")
    other = shell.json("token", "create", "--scope", "deploy")["secret"]
    assert (
        "it may take traffic: pilotlight app promote search/embed v2-"
        in shell.run("app", "approve", "search", "v2", key=other).stdout
    )
    assert shell.json("app", "promote", "search", "v2", "--yes")["stage"] == "live"


@pytest.mark.slow  # a dozen commands
def test_names_are_given_and_taken(shell: Shell) -> None:
    first = shell.deploy()["revision"]
    second = shell.deploy("--no-traffic", "--tag", "next", cpu=2.0)
    assert second["stage"] == "no_traffic"
    assert shell.json("app", "alias", "search", "blessed", "next")["blessed"] == second["revision"]
    assert shell.json("app", "alias", "search", "blessed", "--remove") == {"stable": first}
    assert "managed by the platform" in shell.failed("app", "alias", "search", "stable", "v1")
    assert shell.json("app", "pin", "search", "default", "v1")["revision"] == first
    assert "is no longer pinned" in shell.run("app", "pin", "search", "default", "--remove").stdout
    promoted = shell.run(
        "app", "promote", "search", "next", "--canary", "10,100", "--every", "1m", "--yes"
    ).stdout
    assert "takes over search/embed step by step" in promoted


def test_what_serves_elsewhere_is_promoted(shell: Shell) -> None:
    shell.run("environment", "create", "staging")
    revision = shell.deploy("-e", "staging")["revision"]
    done = shell.json("app", "promote", "search", "--from", "staging", "--yes")
    assert (
        done["environment"],
        done["functions"][0]["revision"],
        done["functions"][0]["stage"],
    ) == ("main", revision, "live")
    assert "pass either a revision" in shell.failed("app", "promote", "search", "--yes")


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"a": "b"}', '{"a": true}', '{"a": {"b": {"c": 1}}}', '{"a": NaN}']
)
def test_an_evaluation_is_an_object_of_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InvalidInput):
        release_options.read_evaluation(tmp_path / "m.json")


def test_an_evaluation_may_be_by_function(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"accuracy": 1, "embed": {"recall": 0.5}}')
    assert release_options.read_evaluation(tmp_path / "m.json") == {
        "accuracy": 1.0,
        "embed.recall": 0.5,
    }
    assert release_options.read_evaluation(None) == {}
    with pytest.raises(InvalidInput, match="No such file"):
        release_options.read_evaluation(tmp_path / "missing.json")
    with pytest.raises(InvalidInput, match="name=value"):
        release_options.parse_lineage(["dataset"])

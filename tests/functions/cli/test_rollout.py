"""`pilotlight rollout …` against the real control plane, and the options that make a deploy one."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa

from pilotlight.cli.commands.apps.rollout_options import parse_rollout_gate, parse_rollout_plan
from pilotlight.controller.database import tables
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.rollouts import lifecycle
from pilotlight.controller.rollouts.plan import parse
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist
from tests.functions.controller.parts import spec


class Shell(Typist):
    """Types commands as the operator, over one function with a rollout."""

    first = ("rollout",)

    def __init__(self, platform: ServedController) -> None:
        self.platform = platform
        with platform.store.write() as write:
            tenant = write.sql.execute(sa.select(tables.tenants.c.id)).scalar_one()
            place = AppRef(
                tenant=tenant,
                uid=20_000,
                environment="main",
                app="search",
                actor="k-1",
                request="r",
            )
            specs = [from_json(FunctionSpec, spec(resources={"cpu": cpu})) for cpu in (2.0, 1.0)]
            revisions = [
                app_registry.deploy(write, place, specs=[one]).functions[0].revision
                for one in specs
            ]
            self.candidate, self.stable = revisions
            self.rollout = lifecycle.begin(
                write, place, function="hello", candidate=self.candidate, plan=parse({})
            )

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)


@pytest.fixture(name="shell")
def _shell(served: ServedController) -> Shell:
    return Shell(served)


def test_rollouts_are_listed_and_shown(shell: Shell) -> None:
    listed = shell.run("list").stdout
    assert "search/hello" in listed
    assert "running" in listed
    shown = shell.run("show", "search/hello").stdout
    for said in (
        shell.candidate,
        shell.stable,
        "5 % ── 25 % ── 50 % ── 100 %",
        "hold",
        "had no calls",
        "weight 5: started by k-1",
    ):
        assert said in shown, said
    assert shell.json("show", shell.rollout)["id"] == shell.rollout
    assert [row["id"] for row in shell.json("list", "--state", "active")] == [shell.rollout]


def test_a_rollout_is_paused_resumed_and_aborted(shell: Shell) -> None:
    assert "is paused" in shell.run("pause", shell.rollout).stdout
    assert "is running" in shell.run("resume", "search/hello").stdout
    refused = shell.run("abort", shell.rollout)
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    assert shell.json("abort", shell.rollout, "--yes")["state"] == "aborted"
    over = shell.run("promote", shell.rollout, "--yes")
    assert (over.exit_code, len(over.stderr.strip().splitlines())) == (1, 2)


def test_watching_ends_with_the_rollout_and_says_how_it_went(shell: Shell) -> None:
    shell.run("promote", shell.rollout, "--yes")
    watched = shell.run("watch", shell.rollout)
    assert watched.exit_code == 0
    assert [line.split()[2] for line in watched.stdout.strip().splitlines()] == ["advance", "done"]


def test_watching_what_was_taken_back_fails(shell: Shell) -> None:
    shell.run("abort", shell.rollout, "--yes")
    lines = shell.run("watch", "search/hello", "--json")
    assert lines.exit_code == 1
    assert [json.loads(line)["verdict"] for line in lines.stdout.splitlines()] == [
        "advance",
        "rollback",
    ]


def test_what_there_is_not_is_named(shell: Shell) -> None:
    for which in ("ro-none", "search/nothing"):
        done = shell.run("show", which)
        assert (done.exit_code, len(done.stderr.strip().splitlines())) == (1, 2), done.output


# -- the options of a deploy -----------------------------------------------------------------------
def test_options_make_a_plan_that_the_control_plane_takes() -> None:
    plan = parse_rollout_plan(
        "5,25%, 100",
        "90s",
        50,
        ["error_ratio", "latency_p99+30%", "cost_per_call<=0.001", "feedback:score>=0.9"],
    )
    assert plan == {
        "steps": [5, 25, 100],
        "every_s": 90,
        "min_samples": 50,
        "gates": [
            {"metric": "error_ratio"},
            {"metric": "latency_p99", "max_increase": 0.3},
            {"metric": "cost_per_call", "max": 0.001},
            {"metric": "feedback:score", "min": 0.9},
        ],
    }
    assert parse(plan).steps == (5, 25, 100)
    assert parse_rollout_plan(None, None, None, None) is None


@pytest.mark.parametrize(
    "canary,every,gates",
    [("many", None, None), (None, "5m", None), ("5,100", "soon", None), ("5,100", None, ["a=b"])],
)
def test_options_that_are_not_clear_are_refused(
    canary: str | None, every: str | None, gates: list[str] | None
) -> None:
    with pytest.raises(InvalidInput):
        parse_rollout_plan(canary, every, None, gates)


def test_what_more_is_better_of_may_lose_a_share() -> None:
    assert parse_rollout_gate("feedback:score-2%") == {
        "metric": "feedback:score",
        "max_increase": 0.02,
    }

"""`pilotlight slo`: what is left of budgets, how fast they go and where, as a terminal shows it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rich.console import Console
from typer.testing import CliRunner

from pilotlight.cli.commands.operations.slo import SLIS, WINDOWS, _listing, render
from pilotlight.cli.main import build
from pilotlight.controller.database import tables
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import spec


def indicator(sli: str, **changes: Any) -> dict[str, Any]:
    body = {
        "sli": sli,
        "target": 0.999,
        "bound_s": None,
        "bad": 0,
        "total": 0,
        "ratio": None,
        "budget_left": None,
        "is_spent": False,
        "is_told": True,
    }
    return {**body, "burn_rates": dict.fromkeys(WINDOWS), **changes}


def slo(**changes: Any) -> dict[str, Any]:
    alarm = {
        "id": "slo-1",
        "sli": "warm_latency",
        "severity": "page",
        "window": "1h/5m",
        "factor": 14.4,
        "burn_rate": 20.5,
        "burn_rate_now": 31.0,
        "bad": 60,
        "total": 300,
        "budget": 0.01,
        "stage": "queue",
        "began_at": 1_800_000_000.0,
        "ended_at": None,
    }
    slow = indicator(
        "warm_latency",
        target=0.99,
        bound_s=0.1,
        bad=60,
        total=300,
        ratio=0.8,
        budget_left=-19.0,
        is_spent=True,
        burn_rates=dict.fromkeys(WINDOWS, 20.0),
    )
    good = indicator(
        "availability",
        total=300,
        ratio=1.0,
        budget_left=1.0,
        burn_rates=dict.fromkeys(WINDOWS, 0.0),
    )
    stages = [
        {
            "stage": stage,
            "budget_s": 0.02,
            "calls": 300,
            "overruns": 60 if stage == "queue" else 0,
            "p50_ms": 1.0,
            "p99_ms": 250.0,
        }
        for stage in ("route", "admit", "queue", "start", "exec")
    ]
    body = {
        "environment": "main",
        "app": "search",
        "function": "embed",
        "revision": "v7-3f2a1c",
        "is_declared": True,
        "window_days": 30,
        "freeze": True,
        "frozen": True,
        "slis": [good, slow, *(indicator(sli) for sli in SLIS[2:])],
        "alarms": [alarm],
        "objectives": {},
        "stages": stages,
        "worst_stage": "queue",
        "history": [alarm],
    }
    return {**body, **changes}


def shown(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(what)
    return out.getvalue()


def test_a_function_shows_its_budgets_its_stages_and_its_alarms() -> None:
    text = shown(render(slo()))
    assert "search/embed" in text
    assert "frozen: no releases until the budget recovers" in text
    assert "99 % in 100 ms" in text
    assert "60 / 300" in text
    assert "60 of 300" in text
    assert "open  page    warm_latency: burn rate 20.5 over 1h/5m, mostly in queue" in text
    assert "first token" not in text  # nothing is known of it


def test_a_function_that_nobody_called_shows_what_it_would_promise() -> None:
    nothing = [indicator(sli) for sli in SLIS]
    text = shown(
        render(
            slo(
                is_declared=False, frozen=False, slis=nothing, history=[], alarms=[], worst_stage=""
            )
        )
    )
    assert "default objectives" in text
    assert "availability" in text
    assert "0 / 0" in text


def test_the_list_has_a_gauge_for_each_budget() -> None:
    text = shown(_listing([slo()]))
    assert "██████████  100%" in text
    assert "░░░░░░░░░░ -999%" in text
    assert "page" in text


@pytest.mark.parametrize("name", ["embed", "search/", ""])
def test_a_name_that_is_no_functions_is_told_how_to_write_it(name: str) -> None:
    done = CliRunner().invoke(build(), ["slo", "show", name], prog_name="pilotlight")
    assert done.exit_code == 1
    assert "APP/FUNCTION" in done.stderr


def test_a_platform_is_asked(tmp_path: Path) -> None:
    with ServedController(tmp_path) as platform:

        def run(*words: str) -> str:
            done = CliRunner().invoke(
                build(), ["slo", *words], env=platform.environ(), prog_name="pilotlight"
            )
            assert done.exit_code == 0, done.output
            return str(done.stdout)

        assert "No function takes traffic" in run("list")
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
            app_registry.deploy(write, place, specs=[from_json(FunctionSpec, spec())])
        assert "search/hello" in run("list")
        assert "default objectives" in run("show", "search/hello")
        body = json.loads(run("show", "search/hello", "--json"))
        assert (body["function"], body["is_declared"], [one["total"] for one in body["slis"]]) == (
            "hello",
            False,
            [0] * 6,
        )

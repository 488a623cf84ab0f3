"""`pilotlight budget …` against the real control plane."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from typer.testing import CliRunner

from pilotlight.cli.main import build
from pilotlight.controller.billing import usage_ingestion
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist
from tests.functions.controller.parts import usage

HOOK = "https://alerts.invalid/here"


class Shell(Typist):
    """Types commands as the operator."""

    first = ("budget",)

    def __init__(self, platform: ServedController) -> None:
        self.platform = platform
        with platform.client() as client:
            self.tenant = str(client.whoami()["tenant"]["id"])

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)

    def spend(self, cost: str, record: str, *, days_ago: int = 0, **changes: Any) -> None:
        at = self.platform.now - days_ago * 86_400
        with self.platform.store.write() as write:
            usage_ingestion.ingest_usage(
                write,
                [
                    usage(
                        record,
                        tenant=self.tenant,
                        cost=f"{Decimal(cost):.12f}",
                        started_at=at,
                        **changes,
                    ).to_json()
                ],
            )


@pytest.fixture(name="shell")
def _shell(served: ServedController) -> Shell:
    return Shell(served)


def test_a_budget_is_set_in_one_line_and_its_secret_shown_once(shell: Shell) -> None:
    done = shell.run("set", "250", "--webhook", HOOK)
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip().endswith(
        "is set: 250 USD per month for everything; calls are refused when it is spent"
    )
    assert "whsec_" in done.stderr
    assert "whsec_" not in shell.run("set", "260").output


def test_what_is_not_named_stays_as_it_is(shell: Shell) -> None:
    first = shell.json(
        "set",
        "5",
        "--function",
        "search/embed",
        "--period",
        "day",
        "--soft",
        "--alert",
        "30",
        "--alert",
        "90",
        "--webhook",
        HOOK,
    )
    second = shell.json("set", "7.50", "--function", "search/embed", "--period", "day")
    assert (second["id"], second["amount"], second["created"]) == (first["id"], "7.5", False)
    assert {key: second[key] for key in ("hard", "alerts", "webhook")} == {
        "hard": False,
        "alerts": [30, 90],
        "webhook": HOOK,
    }
    third = shell.json(
        "set", "7.50", "--function", "search/embed", "--period", "day", "--hard", "--webhook", ""
    )
    assert (third["hard"], third["webhook"], third["alerts"]) == (True, None, [30, 90])


def test_budgets_of_other_reaches_and_periods_stand_side_by_side(shell: Shell) -> None:
    for words in (
        (),
        ("--period", "day"),
        ("--app", "search"),
        ("--function", "search/embed"),
        ("--only-environment", "main"),
    ):
        assert shell.run("set", "1", *words).exit_code == 0
    listed = shell.run("list").stdout
    assert len(shell.json("list")) == 5
    for covers in ("everything", "search", "search/embed", "main: everything"):
        assert covers in listed


def test_one_is_shown_with_spending_forecast_and_alerts(shell: Shell) -> None:
    budget = shell.json("set", "10")["id"]
    for n in (1, 2, 3):
        shell.spend("0.3", f"req-{n}/1", days_ago=n)
    shell.spend("7.7", "req-0/1")
    said = shell.run("show", budget).stdout
    assert "spent     8.6 USD of 2027-01, 86 %; left 1.4 USD" in said
    assert "from 3 full days" in said
    assert re.search(r"reached   2027-01-\d\d \d\d:\d\d:\d\d at this rate", said)
    assert re.search(r"2027-01 +80 +8\.600000000000 +2027-01-15 \d\d:00:00 +0", said)
    assert [(a["percent"], a["attempts"]) for a in shell.json("show", budget)["alerted"]] == [
        (80, 0),
        (50, 0),
    ]


def test_a_deleted_budget_is_gone(shell: Shell) -> None:
    budget = shell.json("set", "10")["id"]
    assert "Cannot ask" in shell.failed("delete", budget)
    assert shell.run("delete", budget, "--yes").exit_code == 0
    assert shell.run("list").stdout.strip() == "No budgets."
    assert "there is no budget" in shell.failed("show", budget)


def test_a_webhook_that_does_not_take_the_example_is_a_failure(shell: Shell) -> None:
    budget = shell.json("set", "10", "--webhook", HOOK)["id"]
    done = shell.run("test", budget)
    assert done.exit_code == 1
    assert "no response" in done.stdout
    assert "alerts.invalid cannot be resolved" in done.stdout
    assert "webhook-signature: v1," in done.stdout
    assert shell.json("test", budget, status=1)["status"] is None


@pytest.mark.parametrize(
    "words, said",
    [
        (("-5",), None),
        (("0",), "amount = '0'"),
        (("NaN",), "amount = 'NaN'"),
        (("1", "--currency", "BTC"), "BTC"),
        (("1", "--function", "embed"), "APP/FUNCTION"),
        (("1", "--function", "a/b", "--app", "c"), "APP/FUNCTION"),
        (("1", "--alert", "0"), "alerts = 0"),
        (("1", "--webhook", "http://10.0.0.1/"), "webhook"),
        (("1", "--only-environment", "nowhere"), "environment create nowhere"),
    ],
)
def test_wrong_words_are_refused(shell: Shell, words: tuple[str, ...], said: str | None) -> None:
    if said is None:
        assert shell.run("set", *words).exit_code == 2  # looks like an option
        assert "amount = '-5'" in shell.failed("set", "--", *words)
    else:
        assert said in shell.failed("set", *words)
    assert shell.json("list") == []


def test_a_report_names_image_builds_and_environments_only_where_there_are_several(
    shell: Shell,
) -> None:
    def first_words() -> list[str]:
        told = CliRunner().invoke(build(), ["billing", "report"], env=shell.environment(None))
        assert told.exit_code == 0, told.output
        return [line.split("  ")[0] for line in told.output.splitlines()[1:-1]]

    shell.spend("1", "req-1/1")
    nobody: dict[str, Any] = {"environment": "", "app": "", "function": "", "function_id": ""}
    shell.spend("2", "b-1/BUILD/1", kind="BUILD", **nobody)
    assert sorted(first_words()) == ["(none)", "search/embed"]
    shell.spend("3", "req-2/1", environment="staging")
    assert sorted(first_words()) == ["(none)", "main: search/embed", "staging: search/embed"]

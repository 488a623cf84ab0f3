"""`pilotlight customer credit …` against the real control plane."""

from __future__ import annotations

from decimal import Decimal

import pytest

from pilotlight.controller.billing import usage_ingestion
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist
from tests.functions.controller.parts import usage


class Shell(Typist):
    """Types commands as the operator."""

    first = ("customer", "credit")

    def __init__(self, platform: ServedController) -> None:
        self.platform = platform
        with platform.client() as client:
            self.tenant = str(client.whoami()["tenant"]["id"])

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)

    def use(self, cost: str) -> None:
        """Have calls of ana cost this much."""
        one = usage(
            f"req-{cost}/1",
            tenant=self.tenant,
            customer="ana",
            cost=f"{Decimal(cost):.12f}",
            started_at=self.platform.now,
        )
        with self.platform.store.write() as write:
            usage_ingestion.ingest_usage(write, [one.to_json()])


@pytest.fixture(name="shell")
def _shell(served: ServedController) -> Shell:
    return Shell(served)


def test_credit_is_granted_used_and_shown(shell: Shell) -> None:
    assert shell.run("list").stdout.strip() == "No customer has prepaid credit."
    assert "not limited by any" in shell.run("show", "ana").stdout
    done = shell.run("grant", "ana", "5", "--expires", "90d", "--note", "order 7")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("5 USD granted until ")
    assert done.stdout.rstrip().endswith("customer ana has 5 USD")
    shell.use("1.5")
    shown = shell.run("show", "ana").stdout
    assert "ana: 3.5 USD left, 1.5 USD used since" in shown
    (row,) = shell.json("list")["credits"]
    assert (row["customer"], row["balance"], row["used"]) == ("ana", "3.5", "1.5")
    assert "3.5" in shell.run("list").stdout
    (use,) = shell.json("uses", "ana")["uses"]
    assert (use["function"], use["used"]) == ("embed", "1.5")
    assert "search/embed" in shell.run("uses", "ana").stdout
    assert "order 7" in shell.run("entries", "ana").stdout


def test_a_grant_is_repeated_safely_and_corrected(shell: Shell) -> None:
    made = shell.json("grant", "ana", "50", "--reference", "pay-1")
    again = shell.run("grant", "ana", "50", "--reference", "pay-1")
    assert "was used before" in again.stdout
    done = shell.run("withdraw", "ana", made["id"], "--amount", "45", "--note", "a typo")
    assert done.exit_code == 0, done.output
    assert "45 USD of" in done.stdout
    assert done.stdout.rstrip().endswith("customer ana has 5 USD")
    assert [one["amount"] for one in shell.json("entries", "ana")["entries"]] == ["-45", "50"]
    assert shell.run("close", "ana", "--yes").exit_code == 0
    assert shell.json("show", "ana") == {"credits": []}


def test_wrong_words_say_what_to_write(shell: Shell) -> None:
    for words in (("grant", "ana", "much"), ("grant", "ana", "5", "--expires", "soon")):
        done = shell.run(*words)
        assert done.exit_code == 1
        assert "rite a d" in done.output
    done = shell.run("close", "ben", "--yes")
    assert "has no prepaid credit" in done.output

"""`pilotlight experiment …` and `pilotlight feedback …` against the real control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pilotlight.client import sessions
from pilotlight.client.async_client import AsyncClient
from pilotlight.controller.billing import usage_ingestion
from pilotlight.errors import Conflict, NotFound
from pilotlight.sdk.calls import FunctionCall
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec, usage


class Shell(Typist):
    """Types commands as the operator; `search/hello` is deployed in two revisions."""

    def __init__(self, platform: ServedController, home: Path) -> None:
        self.platform = platform
        bundle = home / "bundle"
        bundle.write_bytes(BUNDLE)
        with platform.client() as client:
            self.tenant = str(client.whoami()["tenant"]["id"])
            client.put_blob(BUNDLE_DIGEST, bundle)
            bodies = [from_json(FunctionSpec, spec(module=module)) for module in ("app", "better")]
            self.old, self.new = (
                client.deploy("search", [body]).functions[0].revision for body in bodies
            )

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)

    def create(self, *words: str, name: str = "faster") -> Result:
        return self.run(
            "experiment",
            "create",
            "search/hello",
            name,
            "--arm",
            f"control={self.old}:80",
            "--arm",
            f"bold={self.new}",
            *words,
        )

    def call(self, call: str = "req-1", **changes: Any) -> None:
        with self.platform.store.write() as write:
            usage_ingestion.ingest_usage(
                write,
                [
                    usage(
                        f"{call}/1", **{"tenant": self.tenant, "revision": self.old, **changes}
                    ).to_json()
                ],
            )


@pytest.fixture(name="shell")
def _shell(served: ServedController, tmp_path: Path) -> Shell:
    return Shell(served, tmp_path)


def test_an_experiment_is_planned_started_watched_and_concluded(shell: Shell) -> None:
    planned = shell.create("--percent", "50", "--guardrail", "latency_p99 +20%")
    assert planned.exit_code == 0, planned.output
    assert "faster on search/hello is DRAFT" in planned.stdout
    assert "pilotlight experiment start x-" in planned.stderr
    assert shell.run("experiment", "start", "faster").stdout.strip().endswith("is RUNNING")
    plan = shell.run("experiment", "show", "faster").stdout
    for said in (
        "50 % of all units (key); guardrails: latency_p99 +20%",
        "control",
        "80",
        "bold",
        "20",
    ):
        assert said in plan, said
    report = shell.run("experiment", "report", "faster")
    assert (report.exit_code, "Not enough data to compare" in report.stdout) == (0, True), (
        report.output
    )
    assert "RUNNING" in shell.run("experiment", "list").stdout
    done = shell.run("experiment", "conclude", "faster", "bold", "--yes")
    assert (
        done.stdout.strip()
        == "search/hello: arm bold gets all traffic; see `pilotlight app history search`"
    )
    assert shell.json("experiment", "list")[0]["winner"] == "bold"


def test_an_invalid_report_is_loud_and_fails_scripts(shell: Shell) -> None:
    shell.create("--start")
    experiment = shell.json("experiment", "list")[0]["id"]
    shell.call(experiment=experiment, arm="bold", unit="ann")
    done = shell.run("experiment", "report", "faster")
    assert done.exit_code == 1
    assert (
        f"INVALID: arm bold: 1 calls were answered by a revision other than {shell.new}"
        in done.stdout
    )
    assert shell.json("experiment", "report", experiment, status=1)["valid"] is False
    assert "--force" in shell.failed("experiment", "conclude", "faster", "bold", "--yes")
    assert shell.run("experiment", "conclude", "faster", "bold", "--yes", "--force").exit_code == 0


def test_the_kill_switch_asks_nobody(shell: Shell) -> None:
    shell.create("--start", "--no-guardrails")
    assert (
        "is STOPPED: it burns"
        in shell.run("experiment", "stop", "faster", "--reason", "it burns").stdout
    )
    assert "it is not running" in shell.failed("experiment", "stop", "faster")


WRONG = [
    (("experiment", "show", "nobody"), "there is no experiment 'nobody'"),
    (("experiment", "create", "search", "faster", "--arm", "a=b"), "Write APP/FUNCTION"),
    (
        ("experiment", "create", "search/hello", "faster", "--arm", "a"),
        "is not NAME=REVISION[:SHARE]",
    ),
    (
        ("experiment", "create", "search/hello", "faster", "--arm", "a=b:half"),
        "is not NAME=REVISION[:SHARE]",
    ),
    (("feedback", "send", "req-1"), "no metric or label was given"),
    (("feedback", "send", "req-1", "rating=good"), "Pass text with --label"),
    (("feedback", "send", "req-1", "rating=true"), "is not a number"),
    (("feedback", "send", "req-unknown", "rating=1"), "X-Request-Id"),
]


def test_what_is_wrong_is_told_with_what_to_do(shell: Shell) -> None:
    for words, said in WRONG:
        assert said in shell.failed(*words)


def test_feedback_is_sent_once(shell: Shell) -> None:
    shell.call()
    assert (
        shell.run("feedback", "send", "req-1", "rating=4", "--label", "good").stdout.strip()
        == "req-1: recorded"
    )
    assert (
        shell.run("feedback", "send", "req-1", "rating=4").stdout.strip()
        == "req-1: already recorded"
    )
    assert "on 'rating': 4.0" in shell.failed("feedback", "send", "req-1", "rating=5")


def test_feedback_from_python(shell: Shell) -> None:
    shell.call()
    with shell.platform.client() as client:
        assert client.feedback("req-1", label="good", metrics={"rating": 4.5}) == {
            "request_id": "req-1",
            "replayed": False,
            "waiting": False,
        }
        with pytest.raises(Conflict):
            client.feedback("req-1", label="bad")
        with pytest.raises(NotFound):
            client.feedback("req-unknown", label="bad")


async def test_a_submitted_call_takes_feedback_on_itself(shell: Shell) -> None:
    shell.call()
    with shell.platform.client() as client, sessions.use_profile(client.profile):
        call = FunctionCall.from_id("req-1")
        call.feedback(label="good")
        await call.feedback.aio(rating=4.0)
        async with AsyncClient(client.profile) as asynchronous:
            assert (await asynchronous.feedback("req-1", label="good", metrics={"rating": 4.0}))[
                "replayed"
            ]
    sessions.close()

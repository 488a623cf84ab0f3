"""`pilotlight schedule …`, `webhook …`, `call list` and `call redrive` against the real control
plane."""

from __future__ import annotations

import pytest

from pilotlight.controller.deployments import app_registry
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.protocol import CallRecord
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.fakes.served_controller import ServedController
from tests.fakes.shell import Typist
from tests.functions.controller.parts import spec

HOOK = "https://alerts.invalid/here"


class Shell(Typist):
    """Types commands as the operator of an app with a schedule."""

    def __init__(self, platform: ServedController) -> None:
        self.platform = platform
        with platform.client() as client:
            self.tenant = str(client.whoami()["tenant"]["id"])
        place = AppRef(tenant=self.tenant, uid=None, environment="main", app="search", actor="k-1")
        with platform.store.write() as write:
            app_registry.deploy(
                write,
                place,
                specs=[
                    from_json(
                        FunctionSpec, spec(schedules=[{"cron": "0 6 * * *"}, {"period_s": 90}])
                    )
                ],
            )

    def environment(self, key: str | None) -> dict[str, str]:
        return self.platform.environ(key)

    def bury(self, call: str = "req-1", app: str = "search") -> None:
        record = CallRecord(
            id=call,
            tenant=self.tenant,
            environment="main",
            app=app,
            function="hello",
            method="",
            state="FAILED",
            sequence=3,
            submitted_at=self.platform.now,
            expires_at=self.platform.now + 600,
            status=500,
            attempt=4,
            is_dead=True,
        )
        with self.platform.store.write() as write:
            submitted_calls.put(write, [record], payloads={call: {"body": "e30=", "key": "k-1"}})


@pytest.fixture(name="shell")
def _shell(served: ServedController) -> Shell:
    return Shell(served)


def test_schedules_are_listed_with_their_next_times(shell: Shell) -> None:
    listed = shell.good("schedule", "list")
    for word in ("search/hello", "0 6 * * *", "every 90 s", "active", "UTC"):
        assert word in listed
    assert [row["number"] for row in shell.json("schedule", "list")] == [0, 1]
    assert "No schedules" in shell.good("schedule", "list", "--app", "other")


def test_a_schedule_is_paused_resumed_and_run_at_once(shell: Shell) -> None:
    assert "is paused" in shell.good("schedule", "pause", "search/hello", "--number", "1")
    assert [row["is_paused"] for row in shell.json("schedule", "list")] == [False, True]
    assert "next 20" in shell.good("schedule", "resume", "search/hello", "-n", "1")
    call_id = shell.good("schedule", "run-now", "search/hello").strip()
    assert shell.json("call", "list", "--state", "queued")[0]["id"] == call_id


def test_a_schedule_that_is_not_there_is_said_with_the_next_step(shell: Shell) -> None:
    assert "no schedule 7" in shell.failed("schedule", "pause", "search/hello", "-n", "7")
    assert "schedule list" in shell.failed("schedule", "pause", "hello")
    assert "names a method" in shell.failed("schedule", "pause", "search/Embedder.embed")


def test_a_webhook_is_set_listed_and_deleted_and_its_secret_shown_once(shell: Shell) -> None:
    done = shell.run("webhook", "set", "ops", HOOK, "--event", "slo.*", "--event", "call.finished")
    assert done.exit_code == 0, done.output
    assert "ops receives slo.*, call.finished" in done.stdout
    assert "whsec_" in done.stderr
    assert "whsec_" not in shell.run("webhook", "set", "ops", HOOK).output
    assert "calls that name it" in shell.good("webhook", "list")
    assert shell.json("webhook", "deliveries", "ops") == []
    assert "is deleted" in shell.good("webhook", "delete", "ops", "--yes")
    assert "No webhooks" in shell.good("webhook", "list")


def test_a_receiver_that_cannot_be_reached_fails_the_test_and_says_why(shell: Shell) -> None:
    shell.good("webhook", "set", "ops", HOOK)
    done = shell.run("webhook", "test", "ops")
    assert (done.exit_code, "no response" in done.stdout, "webhook-signature" in done.stdout) == (
        1,
        True,
        True,
    )


def test_dead_letters_are_listed_and_sent_again_one_by_one_or_together(shell: Shell) -> None:
    for number, app in enumerate(("search", "search", "other")):
        shell.bury(f"req-{number}", app)
    listed = shell.run("call", "list", "--state", "dead")
    assert "DEAD" not in listed.stdout
    assert "FAILED" in listed.stdout
    assert "(dead letter)" in listed.stdout
    assert shell.run("call", "get", "req-0").stdout.startswith("FAILED · search/")
    assert "redrive" in listed.stderr
    assert "req-0 is retried" in shell.good("call", "redrive", "req-0")
    assert shell.json("call", "redrive", "--all", "--app", "search", "--yes") == {
        "calls": ["req-1"]
    }
    assert [call["id"] for call in shell.json("call", "list", "--state", "dead")] == ["req-2"]
    assert [call["state"] for call in shell.json("call", "list", "--app", "search")] == [
        "QUEUED",
        "QUEUED",
    ]


def test_what_is_no_dead_letter_or_not_clear_is_said_with_the_next_step(shell: Shell) -> None:
    assert "there is no call" in shell.failed("call", "redrive", "req-9")
    assert "--all" in shell.failed("call", "redrive")
    assert "QUEUED" in shell.failed("call", "list", "--state", "dreaming")
    shell.bury()
    shell.good("call", "redrive", "req-1")
    assert "call list --state dead" in shell.failed("call", "redrive", "req-1")


def test_all_dead_letters_are_not_sent_again_without_being_asked(shell: Shell) -> None:
    shell.bury()
    assert shell.run("call", "redrive", "--all").exit_code != 0
    assert len(shell.json("call", "list", "--state", "dead")) == 1

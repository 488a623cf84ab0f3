"""An experiment on a whole platform: arms on answers, exposures in the ledger, feedback at the
edge, and the kill switch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
USERS = [f"user-{number}" for number in range(32)]
APP = """
import pilotlight

app = pilotlight.App("trial")


@app.function(cpu=0.25, memory="256MiB", max_instances=1)
def greet() -> str:
    return "{word}"
"""


@pytest.fixture(scope="module")
def revisions(
    platform: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """`trial/greet` in two revisions, which say `old` and `new`; the second one serves."""
    file: Path = tmp_path_factory.mktemp("trial") / "trial.py"
    made = []
    for word in ("old", "new"):
        file.write_text(APP.format(word=word))
        platform.cli("deploy", str(file), "--no-wait")
        made.append(wait_for(partial(revision_that_says, platform, word), f"{word} to answer"))
    yield made
    platform.cli("app", "delete", "trial", "--yes")


def test_callers_are_split_told_counted_and_let_go(
    platform: PlatformUnderTest, revisions: list[str]
) -> None:
    old, new = revisions
    arms_wanted = ("--arm", f"control={old}", "--arm", f"bold={new}")
    platform.cli(
        "experiment",
        "create",
        "trial/greet",
        "words",
        *arms_wanted,
        "--unit",
        "header:x-user",
        "--start",
    )
    wait_for(lambda: "pilotlight-arm" in ask(platform, "user-0").headers, "the arms to answer")
    arms = {user: ask(platform, user) for user in USERS}
    for user, first in arms.items():
        again = ask(platform, user)
        arm = first.headers["pilotlight-arm"]
        assert again.headers["pilotlight-arm"] == arm, "a unit stays in its arm"
        expected = {"control": (old, '"old"'), "bold": (new, '"new"')}[arm]
        assert (again.headers["pilotlight-revision"], again.text) == expected
    split = {
        name: sum(answer.headers["pilotlight-arm"] == name for answer in arms.values())
        for name in ("control", "bold")
    }
    assert all(split.values()), f"32 users in one arm happen once in two billion salts: {split}"

    call = arms["user-3"].headers["x-request-id"]
    told = httpx.post(
        f"{platform.url}/v1/feedback",
        json={"request_id": call, "metrics": {"rating": 5}},
        headers=platform.headers,
        timeout=60,
    )
    assert told.status_code in (200, 202), told.text
    wait_for(lambda: units(platform) == split, "the exposures to be in the report")
    report = shown(platform)
    assert (report["valid"], [arm["mistagged"] for arm in report["arms"]]) == (True, [0, 0])
    rating = {"request_id": call, "metrics": {"rating": 4}}
    wait_for(
        lambda: (
            httpx.post(
                f"{platform.url}/v1/feedback", json=rating, headers=platform.headers, timeout=60
            ).status_code
            == 409
        ),
        "409",
    )

    platform.cli("experiment", "stop", "words", "--reason", "enough")
    wait_for(
        lambda: all("pilotlight-arm" not in ask(platform, user).headers for user in USERS),
        "everybody to be let go",
    )
    assert {ask(platform, user).text for user in USERS} == {'"new"'}


def revision_that_says(platform: PlatformUnderTest, word: str) -> str:
    answer = platform.post("trial/greet")
    return answer.headers["pilotlight-revision"] if answer.text == f'"{word}"' else ""


def ask(platform: PlatformUnderTest, user: str) -> httpx.Response:
    answer = platform.post("trial/greet", headers={**platform.headers, "x-user": user})
    assert answer.status_code == 200, answer.text
    return answer


def shown(platform: PlatformUnderTest) -> dict[str, Any]:
    with platform.client() as client:
        return client.experiment_report(client.experiments(app="trial")[0]["id"])


def units(platform: PlatformUnderTest) -> dict[str, int]:
    return {arm["name"]: arm["units"] for arm in shown(platform)["arms"]}

"""The page of releases: what it shows of a rollout that goes on, of one that is over, and to
whom."""

from __future__ import annotations

import re

import pytest

from pilotlight.controller.dashboard.pages.functions import releases
from pilotlight.controller.rollouts.loop import RolloutController
from tests.functions.controller.conftest import Controller
from tests.functions.controller.rollouts.test_api import deployed, see
from tests.functions.controller.test_dashboard import sign_in


async def test_a_rollout_is_shown_with_numbers_steps_and_reasons(controller: Controller) -> None:
    done = await deployed(controller)
    rollout = (await controller.http.get(f"/v1/rollouts/{done['rollout']}")).json()
    await see(controller, rollout, rollout["candidate"], 50, sequence=1, failed=1)
    await see(controller, rollout, rollout["stable"], 950, sequence=2)
    session = await sign_in(controller, controller.key)
    client = controller.client(None)
    page = await client.get("/dashboard/releases", headers=session)
    assert page.status_code == 200
    for said in (
        "search/hello",
        rollout["candidate"],
        "Errors",
        "2.0 %",
        "too little data",
        "Rollout holds",
        "50 of 100 samples",
        "data-again",
    ):
        assert said in page.text, said
    assert 'aria-current="step"' in page.text
    assert "style=" not in page.text
    detail = await client.get(f"/dashboard/releases/{rollout['id']}", headers=session)
    for said in ("started by", "False alarms", "weight 5", "14.4"):
        assert said in detail.text, said
    assert not re.findall(r'(?:src|href|action)="(?!/)(?!#main")', detail.text)


async def test_one_that_was_taken_back_says_why_and_stays_in_the_history(
    controller: Controller,
) -> None:
    done = await deployed(controller)
    rollout = (await controller.http.get(f"/v1/rollouts/{done['rollout']}")).json()
    await see(controller, rollout, rollout["candidate"], 50, sequence=1, failed=25)
    await see(controller, rollout, rollout["stable"], 950, sequence=2)
    assert RolloutController(store=controller.context.store, clock=controller.clock).round() == 1
    session = await sign_in(controller, controller.key)
    page = await controller.client(None).get("/dashboard/releases", headers=session)
    for said in ("rolled back", "burn-rate alarm", "History"):
        assert said in page.text, said
    assert "data-again" not in page.text
    detail = await controller.client(None).get(
        f"/dashboard/releases/{rollout['id']}", headers=session
    )
    assert "ended here" in detail.text
    assert "is rolled back" in detail.text


async def test_an_empty_page_says_how_to_begin(controller: Controller) -> None:
    page = await controller.client(None).get(
        "/dashboard/releases", headers=await sign_in(controller, controller.key)
    )
    assert "--canary 5,25,50,100" in page.text


async def test_who_may_not_deploy_does_not_see_releases_and_strangers_see_no_rollout(
    controller: Controller,
) -> None:
    rollout = (await deployed(controller))["rollout"]
    biller = await sign_in(controller, await controller.new_key(scope="read-billing"))
    page = await controller.client(None).get("/dashboard/releases", headers=biller)
    assert page.status_code == 403
    assert "Releases</a>" not in page.text
    stranger = await sign_in(controller, await controller.other_tenant())
    assert (
        await controller.client(None).get(f"/dashboard/releases/{rollout}", headers=stranger)
    ).status_code == 404


@pytest.mark.parametrize(
    "metric,words",
    [
        ("error_ratio", "Errors"),
        ("latency_p99", "Warm latency p99"),
        ("cold_p95", "Cold start p95"),
        ("first_byte_p50", "First token p50"),
        ("feedback:score", "Feedback: score"),
    ],
)
def test_gates_have_names_for_people(metric: str, words: str) -> None:
    assert releases.metric_words(metric) == words


def test_steps_know_what_became_of_them() -> None:
    body = {"steps": [5, 50, 100], "step": 1, "elapsed_s": 30, "every_s": 60}
    assert [(s.state, s.share) for s in releases.stations({**body, "state": "running"})] == [
        ("passed", 1),
        ("here", 0.5),
        ("", 0),
    ]
    assert [s.state for s in releases.stations({**body, "state": "rolled_back"})] == [
        "passed",
        "left",
        "",
    ]
    assert [s.state for s in releases.stations({**body, "step": 2, "state": "done"})] == [
        "passed"
    ] * 3

"""The next step of a Service, as a pure function; conditions, differences and statuses."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.controller.kubernetes.conditions import ready_of
from pilotlight.controller.kubernetes.function_status import (
    FunctionStatus,
    FunctionStatuses,
    Phase,
    status_from_error,
)
from pilotlight.controller.kubernetes.rollout_step import ServiceStep, next_step
from pilotlight.kubernetes.errors import (
    ClusterUnreachable,
    FieldProblem,
    Forbidden,
    Invalid,
    NamespaceEnding,
)
from pilotlight.kubernetes.manifests.difference import differences
from pilotlight.kubernetes.manifests.knative_service import revision_names
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.policies import RolloutTerms
from tests.fakes.fed_platform import ACME, document_of, spec

RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
TENANCY = Tenancy.of(
    ACME,
    environment="main",
    settings=ClusterSettings(runtime_image=RUNTIME),
    platform="p-0123456789abcdef",
)
ONE, TWO = "search-embed-v1-000001", "search-embed-v2-000002"
SPECS = {"v1-000001": spec(), "v2-000002": spec(env={"NEW": "1"})}


def route(**how: Any) -> FunctionRoute:
    return FunctionRoute.from_json(document_of(SPECS, **how)[1])


def step_of(wanted: FunctionRoute, tenancy: Tenancy, **there: Any) -> ServiceStep:
    named = [RevisionOf.of(wanted, tenancy, name) for name in revision_names(wanted)]
    return next_step(wanted, tenancy, named=named, **there)


def revision(name: str, ready: str = "True", reason: str = "") -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": "because"}
    return {
        "metadata": {"name": name, "generation": 1},
        "status": {"observedGeneration": 1, "conditions": [condition]},
    }


def live(traffic: list[dict[str, Any]], template: str = ONE, **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "search-embed", "annotations": annotations},
        "spec": {
            "template": {"metadata": {"name": template}, "spec": {"by": "knative"}},
            "traffic": traffic,
        },
    }


def split(step: ServiceStep) -> list[tuple[str, int, str]]:
    assert step.service is not None
    return [
        (each["revisionName"], each["percent"], each.get("tag", ""))
        for each in step.service["spec"]["traffic"]
    ]


def test_the_first_revision_comes_with_all_of_the_traffic() -> None:
    step = step_of(
        FunctionRoute.from_json(document_of(spec())[1]), TENANCY, live=None, there={}, now=0
    )
    assert split(step) == [(ONE, 100, "")]
    assert step.waits_for == ONE


def test_a_missing_revision_comes_in_without_traffic_and_the_rest_stays() -> None:
    now = live([{"revisionName": ONE, "latestRevision": False, "percent": 100, "url": "http://x"}])
    step = step_of(
        route(weights={"v2-000002": 100}), TENANCY, live=now, there={ONE: revision(ONE)}, now=0
    )
    assert split(step) == [(ONE, 100, ""), (TWO, 0, "v2-000002")]
    assert step.service is not None
    assert step.service["spec"]["template"]["metadata"]["name"] == TWO
    assert "url" not in step.service["spec"]["traffic"][0]


def test_who_answers_until_the_new_one_runs_stays_reachable_and_is_kept_after_it() -> None:
    there = {ONE: revision(ONE), TWO: revision(TWO)}
    kept = {**SPECS, "v2-000002": spec(rollout=RolloutTerms(keep_previous_s=600.0))}
    waiting = FunctionRoute.from_json(
        document_of(
            kept,
            weights={"v2-000002": 100},
            previous={"v1-000001": 100},
            awaited=("v2-000002",),
        )[1]
    )
    one = {"revisionName": ONE, "latestRevision": False, "percent": 100}
    step = step_of(waiting, TENANCY, live=live([one]), there=there, now=1000)
    assert split(step) == [(TWO, 100, ""), (ONE, 0, "v1-000001")]
    assert step.service is not None
    now = live(step.service["spec"]["traffic"], TWO, **step.service["metadata"]["annotations"])
    over = FunctionRoute.from_json(document_of(kept, weights={"v2-000002": 100})[1])
    step = step_of(over, TENANCY, live=now, there=there, now=1100)
    assert split(step) == [(TWO, 100, ""), (ONE, 0, "previous")]
    assert step.again_s == 500
    assert split(step_of(over, TENANCY, live=now, there=there, now=1700)) == [(TWO, 100, "")]


def test_while_knative_makes_it_nothing_is_written() -> None:
    now = live(
        [
            {"revisionName": ONE, "percent": 100},
            {"revisionName": TWO, "percent": 0, "tag": "v2-000002"},
        ],
        template=TWO,
    )
    step = step_of(
        route(weights={"v2-000002": 100}), TENANCY, live=now, there={ONE: revision(ONE)}, now=0
    )
    assert step == ServiceStep(service=None, waits_for=TWO)


@pytest.mark.parametrize("ready, reason", [("Unknown", ""), ("False", "ImagePullBackOff")])
def test_one_that_is_not_ready_is_waited_for(ready: str, reason: str) -> None:
    now = live([{"revisionName": ONE, "percent": 100}], template=TWO)
    there = {ONE: revision(ONE), TWO: revision(TWO, ready, reason)}
    step = step_of(route(weights={"v2-000002": 100}), TENANCY, live=now, there=there, now=0)
    assert (step.service, step.waits_for) == (None, TWO)
    assert step.condition is not None
    assert step.condition.reason == reason


def test_one_that_serves_already_and_fails_does_not_hold_up_the_way_back() -> None:
    now = live(
        [
            {"revisionName": TWO, "percent": 100},
            {"revisionName": ONE, "percent": 0, "tag": "v1-000001"},
        ],
        template=TWO,
    )
    there = {ONE: revision(ONE), TWO: revision(TWO, "False", "Crashed")}
    step = step_of(
        route(weights={"v1-000001": 50, "v2-000002": 50}), TENANCY, live=now, there=there, now=0
    )
    assert split(step) == [(ONE, 50, ""), (TWO, 50, "")]


def test_the_template_that_stands_is_kept() -> None:
    now = live([{"revisionName": ONE, "percent": 100}], template=TWO)
    step = step_of(
        route(weights={"v1-000001": 100}),
        TENANCY,
        live=now,
        there={ONE: revision(ONE), TWO: revision(TWO)},
        now=0,
    )
    assert step.service is not None
    assert step.service["spec"]["template"] == now["spec"]["template"]


def test_a_condition_of_an_earlier_generation_says_nothing() -> None:
    item = revision(ONE)
    item["metadata"]["generation"] = 2
    assert ready_of(item).status is None
    assert ready_of({"metadata": {}}).status is None


def test_a_revision_that_is_not_ready_has_the_reason_of_what_keeps_it_down() -> None:
    item = revision(ONE, "False")
    item["status"]["conditions"].append(
        {
            "type": "ContainerHealthy",
            "status": "False",
            "reason": "ExitCode1",
            "message": "it ended",
        }
    )
    assert (ready_of(item).reason, ready_of(item).message) == ("ExitCode1", "it ended")


@pytest.mark.parametrize(
    "wanted, there, paths",
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}, ["a.b"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2, "c": 3}]}, ["a[0].b"]),
        ({"a": {}, "b": []}, {}, []),
        ({"a": 1}, {}, ["a"]),
        ({"a": {"b": 1}}, {"a": 5}, ["a"]),
    ],
)
def test_differences_are_what_is_wanted_and_not_so(
    wanted: Any, there: Any, paths: list[str]
) -> None:
    assert list(differences(wanted, there)) == paths


def test_what_passes_by_itself_is_pending_and_what_does_not_has_failed() -> None:
    assert status_from_error(NamespaceEnding("gone soon")).phase is Phase.PENDING
    assert status_from_error(ClusterUnreachable("away")).phase is Phase.PENDING
    assert status_from_error(Forbidden("no")).phase is Phase.FAILED
    refused = status_from_error(
        Invalid("no", problems=[FieldProblem("spec.x", "is wrong", "Write y.")])
    )
    assert refused.reason == "Refused"
    assert "Write y." in refused.message


def test_a_status_keeps_its_time_as_long_as_it_says_the_same() -> None:
    statuses = FunctionStatuses()
    assert statuses.get("f-1") is None
    statuses.is_kept = True
    assert statuses.get("f-1") == FunctionStatus(phase=Phase.PENDING, reason="NotSeen")
    statuses.set("f-1", FunctionStatus(phase=Phase.READY), now=10)
    statuses.set("f-1", FunctionStatus(phase=Phase.READY, generation=2), now=20)
    assert (statuses.known()["f-1"].since, statuses.known()["f-1"].generation) == (10, 2)
    statuses.set("f-1", FunctionStatus(phase=Phase.FAILED, reason="X"), now=30)
    assert statuses.known()["f-1"].since == 30
    assert repr(statuses) == "<FunctionStatuses 0 ready, 0 pending, 1 failed>"
    statuses.drop("f-1")
    assert statuses.known() == {}

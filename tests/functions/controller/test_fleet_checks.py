"""What a cluster cannot do is refused when it is deployed, with the option's name; the same terms
in platform.yaml's plans are refused when the controller starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.deployments.fleet_checks import (
    check_cluster,
    check_sandboxes,
    settled,
)
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import PlatformSettings, SettingsInvalid
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, WeightsSpec
from pilotlight.spec.identifiers import Isolation
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.quotas import Plan
from pilotlight.spec.sandboxes import ENTRY
from tests.fakes.fed_platform import spec
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused
from tests.functions.controller.parts import spec as json_spec

PLAN = Plan(name="standard")
KPA, OURS = ClusterSettings(), ClusterSettings(autoscaler="pilotlight")
RESERVED = ClusterSettings(reserved_priority_class="reserved")


SANDBOX: dict[str, Any] = {"module": ENTRY[0], "qualname": ENTRY[1], "sandbox": True}


def engine(**changes: object) -> EngineSpec:
    return EngineSpec(model="model", max_model_len=1024, **changes)  # type: ignore[arg-type]


def llm(**changes: object) -> object:
    return spec(
        kind=FunctionKind.ENGINE,
        weights=(WeightsSpec(name="model", manifest="3f" * 32),),
        engine=engine(**changes),
    )


@pytest.mark.parametrize(
    "declared, plan, settings, parameter",
    [
        (spec(scaling=Scaling(keep_asleep_s=30)), PLAN, KPA, "keep_asleep"),
        (spec(scaling=Scaling(waiting_cost=3.0)), PLAN, KPA, "waiting_cost"),
        (llm(sleep_level=1), PLAN, KPA, "sleep_level"),
        (spec(**SANDBOX), PLAN, OURS, "sandbox"),
        (
            spec(),
            replace(PLAN, isolation=Isolation.DEDICATED),
            replace(KPA, dedicated_key=None),
            "isolation",
        ),
        (spec(), replace(PLAN, isolation=Isolation.RESERVED), KPA, "isolation"),
        (
            spec(),
            replace(PLAN, isolation=Isolation.RESERVED, reserved_memory_bytes=1),
            RESERVED,
            "reserved_memory_bytes",
        ),
    ],
)
def test_what_pods_cannot_do_is_refused_by_name(
    declared: object, plan: Plan, settings: ClusterSettings, parameter: str
) -> None:
    with pytest.raises(InvalidInput, match=f"{parameter}.*on a cluster") as caught:
        check_cluster([spec(), declared], plan, settings)  # type: ignore[list-item]
    assert caught.value.detail["parameter"] == parameter
    assert caught.value.detail["hint"]


def test_what_pods_can_do_is_not_refused() -> None:
    check_cluster([spec(scaling=Scaling(waiting_cost=3.0))], PLAN, OURS)
    check_cluster([spec(), llm()], replace(PLAN, isolation=Isolation.DEDICATED), KPA)  # type: ignore[list-item]
    check_cluster([spec()], replace(PLAN, isolation=Isolation.RESERVED), RESERVED)


def test_a_sandbox_needs_a_platform_that_separates_slots() -> None:
    sandbox = spec(**SANDBOX)
    check_sandboxes([spec(), sandbox], uid=20_000)
    check_sandboxes([spec()], uid=None)
    with pytest.raises(InvalidInput, match="does not run as root") as caught:
        check_sandboxes([spec(), sandbox], uid=None)
    assert caught.value.detail["parameter"] == "sandbox"


async def test_a_deploy_to_a_cluster_is_refused_and_one_to_this_machine_is_not(
    controller: Controller,
) -> None:
    body = {"functions": [json_spec(scaling={"keep_asleep_s": 30})]}
    assert (await controller.http.post("/v1/apps/search/deploy", json=body)).status_code == 200
    there = replace(controller.context.config, platform=PlatformSettings(fleet="knative"))
    object.__setattr__(controller.context, "config", there)
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    assert "on a cluster (platform.fleet: knative)" in refused(answer, 400)
    assert answer.json()["parameter"] == "keep_asleep"


@pytest.mark.parametrize(
    "fleet, autoscaler, said, stored",
    [
        ("local", "kpa", {}, (60, None)),
        ("knative", "pilotlight", {}, (60, None)),
        ("knative", "kpa", {}, (60, None)),
        ("local", "kpa", {"scaledown_window_s": 60.0}, (60, None)),
        ("local", "kpa", {"waiting_cost": 3.0}, (3600, 3)),
    ],
)
async def test_a_function_that_says_no_window_gets_one_when_it_is_deployed(
    controller: Controller,
    fleet: str,
    autoscaler: str,
    said: dict[str, float],
    stored: tuple[float, float | None],
) -> None:
    config = replace(
        controller.context.config,
        platform=PlatformSettings(fleet=fleet),
        cluster=ClusterSettings(autoscaler=autoscaler),
    )
    object.__setattr__(controller.context, "config", config)
    body = {"functions": [json_spec(scaling={"max_inputs": 2, **said})]}
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    assert answer.status_code == 200, answer.text
    (function,) = (await controller.http.get("/v1/apps/search")).json()["functions"]
    scaling = function["spec"]["scaling"]
    assert (scaling["scaledown_window_s"], scaling["waiting_cost"]) == stored
    again = (await controller.http.post("/v1/apps/search/deploy", json=body)).json()
    assert again["functions"][0]["revision"] == answer.json()["functions"][0]["revision"]


def test_an_automatic_window_can_be_the_default_where_pauses_are_predicted(
    controller: Controller,
) -> None:
    config = controller.context.config
    for fleet, autoscaler, window in (
        ("local", "kpa", (3600, 10)),
        ("knative", "pilotlight", (3600, 10)),
        ("knative", "kpa", (60, None)),
    ):
        there = replace(
            config,
            platform=PlatformSettings(fleet=fleet),
            cluster=ClusterSettings(autoscaler=autoscaler),
        )
        (made,) = settled([spec()], there, is_auto=True)
        assert (made.scaling.scaledown_window_s, made.scaling.waiting_cost) == window


async def test_a_scaling_schedule_is_checked_when_it_is_deployed(controller: Controller) -> None:
    for changes, told in (
        ({"cron": "0 8 31 2 *"}, "never matches"),
        ({"cron": "0 8 * * someday"}, "as in crontab"),
        ({"timezone": "Mars/Olympus_Mons"}, "unknown time zone"),
    ):
        schedule = {"cron": "0 8 * * *", "duration_s": 3600, "min_instances": 1, **changes}
        body = {"functions": [json_spec(scaling={"schedules": [schedule]})]}
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert told in refused(answer, 400)
        assert answer.json()["parameter"] == "scaling_schedule"


@pytest.mark.parametrize(
    "plan, said",
    [
        ("isolation: reserved", "plans.partner.isolation = reserved: on a cluster"),
        ("log_bytes: 1000", "plans.partner.log_bytes = 1000: on a cluster"),
    ],
)
def test_a_plan_that_a_cluster_cannot_keep_is_refused_at_the_start(
    tmp_path: Path, plan: str, said: str
) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(f"plans: {{partner: {{{plan}}}}}\nplatform: {{fleet: local}}\n")
    ControllerConfig.read(file)
    file.write_text(f"plans: {{partner: {{{plan}}}}}\nplatform: {{fleet: knative}}\n")
    with pytest.raises(SettingsInvalid, match=said):
        ControllerConfig.read(file)

"""What a cluster cannot do is refused when it is deployed, with the option's name; the same terms
in platform.yaml's plans are refused when the controller starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import PlatformSettings, SettingsInvalid
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, Scaling, WeightsSpec
from pilotlight.spec.identifiers import Isolation
from pilotlight.spec.quotas import Plan
from tests.fakes.fed_platform import spec
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused
from tests.functions.controller.parts import spec as json_spec

PLAN = Plan(name="standard")
KPA, OURS = ClusterSettings(), ClusterSettings(autoscaler="pilotlight")
RESERVED = ClusterSettings(reserved_priority_class="reserved")


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

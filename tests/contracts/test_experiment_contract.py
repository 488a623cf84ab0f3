"""Exposures, evidence and feedback: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

import pytest
import sqlalchemy as sa

from pilotlight.controller.analytics import feedback
from pilotlight.controller.analytics.feedback import FeedbackWindow
from pilotlight.controller.billing import usage_ingestion
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.experiments import report
from pilotlight.controller.experiments.design import Design, Guardrail
from pilotlight.controller.experiments.evidence import ArmExposure, ExperimentEvidence, contrasts
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.statistics.estimates import Estimate, Moments, ratio
from pilotlight.protocol import UsageRecord
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.record_json import canonical_json
from pilotlight.spec.traffic import Arm
from tests.functions.controller.parts import ManualClock, usage

DESIGN = Design(
    unit="key",
    percent=100.0,
    salt="s",
    guardrails=(Guardrail.parse("error_ratio +0.02"),),
    arms=(
        Arm(name="control", revision="v1", share=50.0),
        Arm(name="bold", revision="v2", share=50.0),
    ),
)


@pytest.fixture
def tenant(store: Store) -> str:
    with store.write() as write:
        return tenants.create(
            write, name=f"t{uuid.uuid4().hex[:8]}", uid_base=None, actor="platform"
        ).id


@pytest.fixture
def experiment(store: Store, tenant: str) -> str:
    """Runs on a function of the tenant."""
    number = uuid.uuid4().hex[:8]
    with store.write() as write:
        now = write.now
        app = {"tenant": tenant, "environment": "main", "created_at": now}
        write.sql.execute(
            sa.insert(tables.apps).values(
                **app, name="search", version=1, stopped=False, updated_at=now
            )
        )
        write.sql.execute(
            sa.insert(tables.functions).values(
                **app, id=f"f-{number}", app="search", name="embed", revisions=2
            )
        )
        row = {
            "id": f"x-{number}",
            "tenant": tenant,
            "function": f"f-{number}",
            "name": "faster",
            "state": "RUNNING",
            "reason": "",
        }
        text = canonical_json(DESIGN.to_json()).decode()
        write.sql.execute(
            sa.insert(tables.experiments).values(
                **row, document=text, created_by="k-1", created_at=now, began_at=now
            )
        )
    return f"x-{number}"


def records(experiment: str, tenant: str, units: int = 25) -> list[UsageRecord]:
    """Unit u of each arm calls u % 3 + 1 times; every fifth unit of `bold` fails once, and `bold`
    is slower and dearer."""
    out = []
    for arm, revision, ms, cost in (
        ("control", "v1", 10, "0.000000001000"),
        ("bold", "v2", 40, "0.000000003000"),
    ):
        for unit in range(units):
            for call in range(unit % 3 + 1):
                name = f"{experiment}-{arm}-{unit}-{call}"
                bad = arm == "bold" and unit % 5 == 0 and call == 0
                place = {
                    "tenant": tenant,
                    "experiment": experiment,
                    "arm": arm,
                    "unit": f"{arm}{unit}",
                    "revision": revision,
                }
                spent = {
                    "queued_ms": 0,
                    "start_ms": 0,
                    "exec_ms": ms,
                    "cost": cost,
                    "tokens_in": 1,
                    "tokens_out": 3,
                }
                out.append(usage(f"{name}/1", **place, **spent, status=500 if bad else 200))
    return out


def take(store: Store, batch: Sequence[UsageRecord]) -> None:
    with store.write() as write:
        usage_ingestion.ingest_usage(write, [record.to_json() for record in batch])


def test_sums_per_unit_are_those_of_the_records_however_they_come(
    store: Store, tenant: str, experiment: str
) -> None:
    every = records(experiment, tenant)
    for batch in (every[:7], every[5:40], every, every[-3:]):
        take(store, batch)
    with store.read() as sql:
        evidence = ExperimentEvidence(sql, experiment, DESIGN)
        assert evidence.met() == {
            "control": ArmExposure(units=25, units_before=25, calls=49, mistagged=0),
            "bold": ArmExposure(units=25, units_before=25, calls=49, mistagged=0),
        }
        assert evidence.crossed() == 0
        found = evidence.estimates("error_ratio")["bold"]
        wanted = ratio(
            Moments.of([(unit % 3 + 1, float(unit % 5 == 0)) for unit in range(25)]), is_share=True
        )
        assert wanted is not None
        assert (found.value, found.variance, found.calls) == pytest.approx(
            (5 / 49, wanted.variance, 49)
        )
        assert evidence.estimates("latency_mean")["control"] == Estimate(
            value=10.0, variance=0.0, calls=49
        )
        assert evidence.estimates("cost_per_1k_tokens")["bold"].value == pytest.approx(
            3e-9 / 4 * 1000
        )
        assert contrasts(evidence, "cost_per_call", first="control", arms=["bold"], alpha=0.05)[
            "bold"
        ].value == pytest.approx(2e-9)


def test_percentiles_come_with_bounds_that_know_the_units(
    store: Store, tenant: str, experiment: str
) -> None:
    take(store, records(experiment, tenant, units=300))
    with store.read() as sql:
        found = ExperimentEvidence(sql, experiment, DESIGN).intervals("latency_p50", alpha=0.05)
    assert found["control"].low < 10 <= found["control"].value < 11
    assert found["bold"].low < 40 <= found["bold"].value < 44
    with store.read() as sql:
        watched = report.check_guardrails(ExperimentEvidence(sql, experiment, DESIGN), DESIGN)
    assert [(one.arm, one.state) for one in watched] == [("bold", report.BREACHED)]


def test_an_experiment_that_is_not_there_stops_no_record(
    store: Store, tenant: str, experiment: str
) -> None:
    lost = usage("req-lost/1", tenant=tenant, experiment="x-gone", arm="a", unit="u")
    take(store, [lost, *records(experiment, tenant)])
    with store.read() as sql:
        assert ExperimentEvidence(sql, experiment, DESIGN).met()["bold"].units == 25
        assert (
            sql.execute(
                sa.select(tables.usage.c.id).where(tables.usage.c.id == "req-lost/1")
            ).scalar()
            == "req-lost/1"
        )


def test_feedback_is_joined_summed_and_windowed(
    store: Store, tenant: str, experiment: str, clock: ManualClock
) -> None:
    every = records(experiment, tenant)
    caller = Principal(
        tenant=tenant,
        tenant_name="t",
        uid=None,
        key="k",
        scope=Scope.INVOKE,
        environment="main",
        bound_environment=None,
    )
    early = f"req-{int(clock.now * 1000):012x}{uuid.uuid4().hex[:20]}"
    take(store, every)
    with store.write() as write:
        for record in every:
            told = feedback.parse_feedback(
                "good" if record.arm == "bold" else "bad",
                {"rating": 5.0 if record.arm == "bold" else 3.0},
            )
            feedback.record_feedback(write, caller, call=record.call, feedback=told, window_days=30)
        feedback.record_feedback(
            write,
            caller,
            call=early,
            feedback=feedback.parse_feedback(None, {"rating": 1.0}),
            window_days=30,
        )
        assert feedback.is_anything_waiting(write.sql)
        assert feedback.join_to_calls(write) == 0
    take(store, [usage(f"{early}/1", tenant=tenant, function_id="f-early")])
    with store.write() as write:
        assert feedback.join_to_calls(write) == 1
    with store.read() as sql:
        evidence = ExperimentEvidence(sql, experiment, DESIGN)
        assert evidence.feedback_metrics() == [
            "feedback:rating",
            "feedback:label=bad",
            "feedback:label=good",
        ]
        assert evidence.estimates("feedback:rating")["bold"].value == 5.0
        assert evidence.estimates("feedback:label=good")["control"].value == 0.0
        joined = feedback.window(
            sql,
            function_id="f-early",
            revision=None,
            metric="rating",
            since_s=0.0,
            until_s=math.inf,
        )
        assert joined == FeedbackWindow(1, 1.0, 0.0)
        assert (
            feedback.window(
                sql, function_id="f-1", metric="label=good", revision="v2", since_s=0.0, until_s=2e9
            ).mean
            == 1.0
        )


def test_a_unit_counts_for_the_arm_that_it_met_first(
    store: Store, tenant: str, experiment: str
) -> None:
    at = 1_800_000_000.0
    first = usage(
        "req-a/1",
        tenant=tenant,
        experiment=experiment,
        arm="bold",
        unit="u",
        revision="v2",
        started_at=at,
    )
    second = usage(
        "req-b/1",
        tenant=tenant,
        experiment=experiment,
        arm="control",
        unit="u",
        revision="v1",
        started_at=at + 1,
    )
    take(store, [second])
    take(store, [first])
    with store.read() as sql:
        evidence = ExperimentEvidence(sql, experiment, DESIGN)
        assert {arm: met.units for arm, met in evidence.met().items() if met.units} == {"bold": 1}
        assert evidence.crossed() == 1

"""Observations of a rollout's two revisions, from reports of activators and feedback of callers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.analytics import feedback
from pilotlight.controller.database import tables
from pilotlight.controller.drift import labels, sketch_store
from pilotlight.controller.drift.targets import monitor_of
from pilotlight.controller.rollouts.abort_conditions import HOUR_S, RECENT_S
from pilotlight.controller.rollouts.baseline import subtract
from pilotlight.controller.rollouts.plan import FEEDBACK, PREDICTION_KS, QUALITY, RolloutPlan
from pilotlight.controller.rollouts.records import RevisionEvidence
from pilotlight.controller.rollouts.repository import Rollout
from pilotlight.controller.slo import observations
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.spec.monitor import PREDICTION
from pilotlight.spec.observations import COUNTS, UNCOUNTED_ARMS, Observation, sum_observations
from pilotlight.spec.pricing import Footprint, Rates, dearest_gpu, rate_per_s
from pilotlight.spec.sketches import Sketch
from pilotlight.spec.traffic import WHOLE

MINUTE_S = 60.0


def gather(
    sql: sa.Connection,
    rollout: Rollout,
    baseline: Mapping[str, Observation],
    *,
    now: float,
    rates: Rates | None = None,
) -> tuple[RevisionEvidence, RevisionEvidence]:
    """Evidence of the candidate and of stable, over the same minutes.

    In the last step stable gets no calls, so its evidence covers the whole rollout. `rates`: prices
    of instances."""
    is_last = rollout.weight == WHOLE
    # a wall clock that was set back can make the step begin before the rollout
    began_at = min(rollout.created_at, rollout.step_began_at)
    step = _seen(sql, rollout, since_s=rollout.step_began_at, now=now)
    recent = _counts(sql, rollout, since_s=max(now - RECENT_S, began_at), now=now)
    hour = _counts(sql, rollout, since_s=max(now - HOUR_S, began_at), now=now)
    prices = _prices(sql, rollout, rates) if rates is not None else {}
    whole = _seen(sql, rollout, since_s=began_at, now=now) if is_last else step

    def of(
        revision: str,
        seen: Mapping[str, Observation],
        *,
        since_s: float,
        before: Observation | None,
    ) -> RevisionEvidence:
        answers = _feedback(sql, rollout, revision, since_s=since_s, now=now)
        quality, predictions = _predictions(sql, rollout, revision, since_s=began_at, now=now)
        price = prices.get(revision, 0.0)
        return RevisionEvidence(
            step=subtract(seen[revision], before),
            recent=recent[revision],
            hour=hour[revision],
            feedback=answers,
            price=price,
            quality=quality,
            predictions=predictions,
        )

    candidate = of(
        rollout.candidate,
        step,
        since_s=rollout.step_began_at,
        before=baseline.get(rollout.candidate),
    )
    if is_last:
        return candidate, of(rollout.stable, whole, since_s=began_at, before=None)
    return candidate, of(
        rollout.stable, step, since_s=rollout.step_began_at, before=baseline.get(rollout.stable)
    )


def this_minute(
    sql: sa.Connection, *, tenant: str, function_id: str, revisions: tuple[str, str], now: float
) -> dict[str, Observation]:
    """Observations of each revision since the start of the current minute: the baseline of a step
    that begins now."""
    return of_revisions(
        sql, tenant=tenant, function_id=function_id, revisions=revisions, since_s=now, now=now
    )


def of_revisions(
    sql: sa.Connection,
    *,
    tenant: str,
    function_id: str,
    revisions: tuple[str, str],
    since_s: float,
    now: float,
) -> dict[str, Observation]:
    """Sums over whole minutes, starting with the minute of `since_s`, over all arms but
    UNCOUNTED_ARMS. A revision without observations has an empty Observation."""
    first_s = since_s // MINUTE_S * MINUTE_S
    found = observations.window(sql, function_id=function_id, since_s=first_s, until_s=now + 1)
    return {
        revision: sum_observations(
            seen
            for (name, arm), seen in found.items()
            if name == revision and arm not in UNCOUNTED_ARMS
        )
        or Observation(
            tenant=tenant,
            function_id=function_id,
            revision=revision,
            minute=int(first_s // MINUTE_S),
        )
        for revision in revisions
    }


def _seen(
    sql: sa.Connection, rollout: Rollout, *, since_s: float, now: float
) -> dict[str, Observation]:
    revisions = (rollout.candidate, rollout.stable)
    return of_revisions(
        sql,
        tenant=rollout.tenant,
        function_id=rollout.function_id,
        revisions=revisions,
        since_s=since_s,
        now=now,
    )


def _counts(
    sql: sa.Connection, rollout: Rollout, *, since_s: float, now: float
) -> dict[str, Observation]:
    """The same without histograms, which have a hundred times as many rows: alarms need only
    counts."""
    table, revisions = tables.observation_minutes, (rollout.candidate, rollout.stable)
    first, end = int(since_s // MINUTE_S), int(now // MINUTE_S) + 1
    where = (
        table.c.function_id == rollout.function_id,
        table.c.minute >= first,
        table.c.minute < end,
        table.c.arm.not_in(UNCOUNTED_ARMS),
    )
    sums = [sa.func.sum(table.c[name]).label(name) for name in COUNTS]
    query = (
        sa.select(table.c.revision, *sums)
        .where(*where, table.c.revision.in_(revisions))
        .group_by(table.c.revision)
    )
    counted: dict[str, dict[str, Any]] = {
        row.revision: {name: int(getattr(row, name)) for name in COUNTS}
        for row in sql.execute(query)
    }
    tenant, function_id = rollout.tenant, rollout.function_id
    return {
        revision: Observation(
            tenant=tenant,
            function_id=function_id,
            revision=revision,
            minute=first,
            **counted.get(revision, {}),
        )
        for revision in revisions
    }


def _prices(sql: sa.Connection, rollout: Rollout, rates: Rates) -> dict[str, float]:
    """Revision → price of one second of its instance, on the dearest GPU that it accepts; without
    revisions that accept one without a price."""
    table = tables.revisions
    where = (
        table.c.function == rollout.function_id,
        table.c.name.in_((rollout.candidate, rollout.stable)),
    )
    out = {}
    for row in sql.execute(sa.select(table.c.name, table.c.spec).where(*where)):
        resources = json.loads(row.spec)["resources"]
        try:
            gpu = dearest_gpu(resources["gpu"], rates)
        except KeyError:
            continue
        footprint = Footprint(
            cpu=resources["cpu"],
            memory_bytes=resources["memory_bytes"],
            gpu=gpu,
            gpu_count=resources["gpu_count"],
        )
        out[row.name] = float(rate_per_s(footprint, rates))
    return out


def _feedback(
    sql: sa.Connection, rollout: Rollout, revision: str, *, since_s: float, now: float
) -> dict[str, Sample]:
    out = {}
    for metric in gate_metrics(rollout.plan, FEEDBACK):
        answers = feedback.window(
            sql,
            function_id=rollout.function_id,
            revision=revision,
            metric=metric,
            since_s=since_s,
            until_s=now + 1,
        )
        out[metric] = (
            Sample(n=answers.n, mean=answers.mean, variance=answers.variance)
            if answers.n
            else Sample(n=0, mean=0.0, variance=0.0)
        )
    return out


def _predictions(
    sql: sa.Connection, rollout: Rollout, revision: str, *, since_s: float, now: float
) -> tuple[dict[str, Sample], Sketch | None]:
    """Quality and distribution of a revision's predictions, as far as gates use them."""
    names = gate_metrics(rollout.plan, QUALITY)
    quality: dict[str, Sample] = {}
    if names:
        spec = sa.select(tables.revisions.c.spec).where(
            tables.revisions.c.function == rollout.function_id,
            tables.revisions.c.name == rollout.candidate,
        )
        terms = monitor_of(sql.execute(spec).scalar_one())
        found = (
            labels.labelled_predictions(
                sql,
                rollout.function_id,
                terms,
                since_s=since_s,
                until_s=now + 1,
                now=now,
                revision=revision,
            )
            if terms is not None
            else []
        )
        quality = {name: labels.sample_of(found, name) for name in names}
    if all(gate.metric != PREDICTION_KS for gate in rollout.plan.gates):
        return quality, None
    counted = sketch_store.window(
        sql,
        rollout.function_id,
        since_h=int(max(since_s, now - sketch_store.KEEP_S) // HOUR_S),
        until_h=int(now // HOUR_S) + 1,
        now=now,
        revision=revision,
        only=PREDICTION,
    )
    return quality, counted.features.get(PREDICTION)


def gate_metrics(plan: RolloutPlan, kind: str) -> tuple[str, ...]:
    """Names of the metrics of one kind (`feedback:`, `quality:`) that the plan's gates use."""
    named = {
        name for gate in plan.gates for name in (gate.metric, gate.paid_by) if name.startswith(kind)
    }
    return tuple(sorted(name.removeprefix(kind) for name in named))

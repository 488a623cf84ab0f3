"""Tables of releases and their observation: rollouts, observations, experiments, schedules,
webhooks, traces."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole
from pilotlight.spec.observations import COUNTS


def _partial(name: str, *columns: str, where: str) -> sa.Index:
    """Define a partial index of the few pending rows, however many finished ones are kept."""
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


ACTIVE_ROLLOUT_STATES = ("running", "paused")
"""States of a rollout that still changes the traffic; a function has at most one such rollout."""
rollouts = sa.Table(
    "rollouts",
    metadata,
    text("id", key=True),
    text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(text(name) for name in ("candidate", "stable", "plan", "state", "reason", "created_by")),
    whole("step"),
    time("step_began_at", null=True),
    time("created_at"),
    time("updated_at"),
    time("finished_at", null=True),
    sa.Index("ix_rollouts_function", "function", "created_at"),
    sa.Index("ix_rollouts_tenant", "tenant", "created_at"),
)

rollout_decisions = sa.Table(
    "rollout_decisions",
    metadata,
    sa.Column("rollout", sa.Text, sa.ForeignKey("rollouts.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    time("at"),
    whole("step"),
    *(text(name) for name in ("verdict", "action", "reasons", "evidence")),
)


def _observed(name: str, unit: str) -> sa.Table:
    """Define a table of counts of calls; function and time come first, because queries select by
    them."""
    return sa.Table(
        name,
        metadata,
        text("function_id", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(text(part, key=True) for part in ("revision", "arm")),
        text("tenant"),
        *(whole(count) for count in COUNTS),
        sa.Index(f"ix_{name}_{unit}", unit),
    )


def _buckets(name: str, unit: str) -> sa.Table:
    """Define histograms of observed clocks (`clock` of `pilotlight.spec.observations.CLOCKS`), and
    of stages' overruns as `over:<stage>`, bucket 0."""
    return sa.Table(
        name,
        metadata,
        text("function_id", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(text(part, key=True) for part in ("revision", "arm", "clock")),
        sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
        whole("calls"),
        sa.Index(f"ix_{name}_{unit}", unit),
    )


observation_minutes = _observed("observation_minutes", "minute")
"""Sums of activators' observations (`pilotlight.spec.observations`); kept for some days."""
observation_hours = _observed("observation_hours", "hour")
observation_minute_buckets = _buckets("observation_minute_buckets", "minute")
observation_hour_buckets = _buckets("observation_hour_buckets", "hour")

observers = sa.Table(
    "observers", metadata, text("activator", key=True), text("life"), whole("sequence"), time("at")
)
"""The last post of each activator, so that a repeated post counts once."""

slo_alerts = sa.Table(
    "slo_alerts",
    metadata,
    text("id", key=True),
    text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(text(name) for name in ("sli", "severity", "window", "document")),
    time("began_at"),
    time("ended_at", null=True),
    sa.Index("ix_slo_alerts_function", "function", "began_at"),
    sa.Index("ix_slo_alerts_tenant", "tenant", "began_at"),
)

experiments = sa.Table(
    "experiments",
    metadata,
    text("id", key=True),
    text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(text(name) for name in ("name", "document", "state", "reason", "created_by")),
    time("created_at"),
    time("began_at", null=True),
    time("ended_at", null=True),
    sa.UniqueConstraint("function", "name"),
)

EXPOSURE_COUNTS = (
    "calls",
    "errors",
    "degraded",
    "mistagged",
    "cold",
    "warm",
    "warm_ms",
    "exec_ms",
    "cost_picos",
    "tokens_in",
    "tokens_out",
)
exposures = sa.Table(
    "exposures",
    metadata,
    sa.Column("experiment", sa.Text, sa.ForeignKey("experiments.id"), primary_key=True),
    text("unit", key=True),
    text("arm", key=True),
    time("first_at"),
    *(whole(name) for name in EXPOSURE_COUNTS),
)
"""First exposure of a unit to an experiment. More than one arm for a unit is a defect of the
assignment, and counted as one."""

exposure_latency = sa.Table(
    "exposure_latency",
    metadata,
    sa.Column("experiment", sa.Text, sa.ForeignKey("experiments.id"), primary_key=True),
    *(text(name, key=True) for name in ("arm", "unit")),
    sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
    whole("calls"),
)
"""A histogram of each unit's warm calls (`pilotlight.spec.observations.latency_bucket`), for
percentiles whose confidence intervals take the units into account."""

feedback = sa.Table(
    "feedback",
    metadata,
    text("tenant", key=True),
    text("call", key=True),
    text("metric", key=True),
    sa.Column("value", sa.Double, nullable=True),
    text("label"),
    *(text(name) for name in ("function_id", "revision", "experiment", "arm", "unit")),
    time("called_at"),
    time("at"),
    sa.Column("reach", sa.Text, nullable=False, server_default="{}"),
    sa.Index("ix_feedback_function_id", "function_id", "metric", "called_at"),
    sa.Index("ix_feedback_at", "function_id", "metric", "at"),
    sa.Index("ix_feedback_experiment", "experiment", "metric"),
)
"""`called_at` 0 and `function_id` "": the call's record has not arrived yet; `reach` is what the
reporting key may access."""

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    text("tenant"),
    text("document"),
    sa.Column("is_paused", sa.Boolean, nullable=False),
    time("next_at", null=True),
    time("last_at", null=True),
    time("updated_at"),
    sa.Index("ix_schedules_next_at", "next_at"),
)

due_calls = sa.Table(
    "due_calls",
    metadata,
    text("id", key=True),
    text("tenant"),
    text("document"),
    time("due_at"),
    text("claimed_by", null=True),
    time("claimed_until", null=True),
    time("cancel_at", null=True),
    sa.Index("ix_due_calls_due_at", "due_at"),
    _partial("ix_due_calls_cancel", "claimed_by", "cancel_at", where="cancel_at IS NOT NULL"),
    _partial(
        "ix_due_calls_free",
        "tenant",
        "due_at",
        "id",
        "claimed_by",
        "claimed_until",
        where="claimed_by IS NULL OR claimed_until IS NOT NULL",
    ),
)
"""Submitted calls that the control plane created, until an activator has them in its journal.
`cancel_at`: when that activator is asked next to cancel the call; null = it is not cancelled."""

ended_sessions = sa.Table(
    "ended_sessions",
    metadata,
    text("id", key=True),
    text("key"),
    time("until"),
    sa.Index("ix_ended_sessions_key_until", "key", "until"),
    sa.Index("ix_ended_sessions_until", "until"),
)
"""Dashboard sessions that were signed out of, until they would have expired. `key`: id of the API
key that started the session."""
idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    text("tenant", key=True),
    text("key", key=True),
    *(text(name) for name in ("request_hash", "content_type", "answer")),
    whole("status"),
    time("created_at"),
    time("expires_at"),
    sa.Column("kept_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_idempotency_keys_expires_at", "expires_at"),
    sa.Index("ix_idempotency_keys_tenant", "tenant", "created_at", "kept_bytes"),
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    text("tenant", key=True),
    text("environment", key=True),
    text("name", key=True),
    *(text(name) for name in ("url", "sealed_secret", "events", "created_by")),
    time("created_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    text("id", key=True),
    *(text(name) for name in ("tenant", "environment", "webhook", "event", "body")),
    time("at"),
    time("delivered_at", null=True),
    time("next_attempt_at", null=True),
    whole("attempts"),
    text("error", null=True),
    sa.Index("ix_deliveries_next_attempt_at", "next_attempt_at"),
    sa.Index("ix_deliveries_tenant", "tenant", "at"),
    _partial(
        "ix_deliveries_waiting",
        "tenant",
        "next_attempt_at",
        "id",
        where="next_attempt_at IS NOT NULL",
    ),
)

traces = sa.Table(
    "traces",
    metadata,
    text("tenant", key=True),
    text("id", key=True),
    text("call", key=True),
    *(
        text(name)
        for name in (
            "environment",
            "app",
            "function",
            "revision",
            "arm",
            "start_kind",
            "kept_for",
            "document",
        )
    ),
    whole("status"),
    sa.Column("duration_ms", sa.Double, nullable=False),
    time("at"),
    sa.Index("ix_traces_tenant_at", "tenant", "at"),
    sa.Index("ix_traces_tenant_call", "tenant", "call"),
)

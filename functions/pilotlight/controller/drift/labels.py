"""Predictions with the feedback on their calls, by slice and by revision."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa

from pilotlight.controller.analytics.feedback import LABEL
from pilotlight.controller.database import tables
from pilotlight.controller.drift.report import SliceQuality, slice_quality
from pilotlight.controller.drift.targets import MonitoredFunction
from pilotlight.controller.statistics.estimates import MIN_UNITS
from pilotlight.controller.statistics.quality import Outcome, losses, measure
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.spec.monitor import MonitorSpec

MAX_JOINED: Final = 20_000
"""Predictions with labels that one report reads, the newest."""
MAX_VALUES: Final = 10
"""Values of a slice that a report has, the most frequent."""
MIN_LABELS: Final = 50
"""Of a slice: with fewer, its quality is not reported."""
assert MIN_LABELS >= MIN_UNITS


class LabelledPrediction(NamedTuple):
    """A prediction with its truth."""

    outcome: Outcome
    slices: Sequence[str]


def labelled_predictions(
    sql: sa.Connection,
    function_id: str,
    terms: MonitorSpec,
    *,
    since_s: float,
    until_s: float,
    now: float,
    revision: str | None = None,
    by_arrival: bool = False,
) -> list[LabelledPrediction]:
    """Return the predictions with labels of calls in [`since_s`, `until_s`), the newest of more
    than MAX_JOINED. `by_arrival`: those whose labels arrived then."""
    if not terms.label:
        return []
    scores, feedback = tables.drift_scores, tables.feedback
    same = (feedback.c.tenant == scores.c.tenant) & (feedback.c.call == scores.c.call)
    at = feedback.c.at if by_arrival else feedback.c.called_at
    query = (
        sa.select(
            scores.c.score,
            scores.c.label.label("predicted"),
            scores.c.slices,
            feedback.c.label,
            feedback.c.value,
        )
        .join(feedback, same & (feedback.c.metric == terms.label))
        .where(
            feedback.c.function_id == function_id,
            at >= since_s,
            at < until_s,
            scores.c.expires_at > now,
        )
        .order_by(at.desc())
        .limit(MAX_JOINED)
    )
    if revision is not None:
        query = query.where(scores.c.revision == revision)
    found = []
    for row in sql.execute(query):
        outcome = _outcome(terms, row.score, row.predicted, row.label, row.value)
        if outcome is not None:
            found.append(LabelledPrediction(outcome, json.loads(row.slices)))
    return found


def quality_of(
    target: MonitoredFunction, found: Sequence[LabelledPrediction]
) -> list[SliceQuality]:
    """Measure all predictions, and those of each slice with enough labels."""
    terms = target.terms
    groups: list[tuple[str, list[Outcome]]] = [("", [one.outcome for one in found])]
    for at, path in enumerate(terms.slices):
        counts = Counter(one.slices[at] for one in found if at < len(one.slices))
        for value, _ in counts.most_common(MAX_VALUES):
            inside = [one.outcome for one in found if one.slices[at : at + 1] == [value]]
            groups.append((f"{path}={value}", inside))
    groups = [(name, inside) for name, inside in groups if len(inside) >= MIN_LABELS]
    comparisons = len(groups) * len(terms.quality)
    return [
        slice_quality(terms, name, measure(inside), comparisons=comparisons)
        for name, inside in groups
    ]


def sample_of(found: Iterable[LabelledPrediction], name: str) -> Sample:
    """Return count, mean and variance of one measure, for a rollout."""
    values = [loss[name] for one in found if name in (loss := losses(one.outcome))]
    if not values:
        return Sample(n=0, mean=0.0, variance=0.0)
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return Sample(n=len(values), mean=mean, variance=squares / max(1, len(values) - 1))


def _outcome(
    terms: MonitorSpec,
    score: float | None,
    predicted: str | None,
    label: str,
    value: float | None,
) -> Outcome | None:
    """Return a prediction and its truth; None if the two are of different kinds."""
    if terms.label != LABEL:
        return None if score is None or value is None else Outcome(score, value)
    if terms.positive:
        return None if score is None else Outcome(score, label == terms.positive)
    return Outcome(predicted if predicted is not None else score or 0.0, label)

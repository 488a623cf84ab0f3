"""Tables of drift: sketches by revision and hour, references, and predictions to compare with
labels. Sketches and predictions count in their tenant's `stored_bytes`.

A sketch belongs to a file of rows, and is counted once, in the transaction that marks the file:
one of a file that is unknown, deleted or counted before changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.predictions.files import PredictionFile
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import InvalidInput
from pilotlight.spec.monitor import MAX_FEATURES, MAX_SLICES
from pilotlight.spec.prediction_log import DAY_S, HOUR_S
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import canonical_json
from pilotlight.spec.sketches import MAX_CATEGORY_CHARS, Sketch

MAX_BYTES: Final = 2 * 1024**2
"""Of one sketch, which a process of the platform made."""
MAX_REVISIONS: Final = 8
MAX_SCORES: Final = 5_000
KEEP_S: Final = 21 * DAY_S
"""Of sketches, unless the log is kept for less: three of the longest windows."""
SCORE_BYTES: Final = 128
"""What the row of a prediction counts."""
SUFFIX: Final = ".sketch"
_MAX_ID_CHARS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCounts:
    """Rows that were counted together, and the sketch of each feature."""

    rows: int = 0
    features: Mapping[str, Sketch] = field(default_factory=dict)

    def merged(self, other: FeatureCounts) -> FeatureCounts:
        """Return both together."""
        names = {**self.features, **other.features}
        return FeatureCounts(
            rows=self.rows + other.rows,
            features={
                name: self.features.get(name, Sketch()).merged(other.features.get(name, Sketch()))
                for name in names
            },
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: one.to_json() for name, one in self.features.items()}

    @classmethod
    def from_json(cls, rows: Any, features: Any) -> FeatureCounts:
        """The reverse of `to_json`. Raises InvalidInput."""
        if type(rows) is not int or rows < 0 or not isinstance(features, Mapping):
            raise InvalidInput("drift: not a sketch of rows")
        if len(features) > MAX_FEATURES + 1:
            raise InvalidInput(f"drift: {len(features)} features, at most {MAX_FEATURES + 1}")
        try:
            found = {str(name): Sketch.from_json(one) for name, one in features.items()}
        except ValueError as e:
            raise InvalidInput(f"drift: {e}") from e
        return cls(rows=rows, features=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The prediction of one call: a number, or a label."""

    call: str
    revision: str
    at: float
    score: float | None
    label: str | None
    slices: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchFile:
    """What was counted in one file of rows: revision → counts, and its predictions."""

    revisions: Mapping[str, FeatureCounts]
    scores: Sequence[Score]

    @classmethod
    def parse(cls, data: bytes) -> SketchFile:
        """Parse a sketch of the writer. Raises InvalidInput."""
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"drift: a sketch of {len(data)} bytes, at most {MAX_BYTES}")
        try:
            body = json.loads(data)
            revisions = {
                str(name): FeatureCounts.from_json(one["rows"], one["features"])
                for name, one in body["revisions"].items()
            }
            scores = [_score(*one) for one in body["scores"]]
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError) as e:
            raise InvalidInput(f"drift: not a sketch of rows: {e!r}") from e
        except ValueError as e:
            raise InvalidInput(f"drift: not a sketch of rows: {e!r}") from e
        if len(revisions) > MAX_REVISIONS or len(scores) > MAX_SCORES:
            raise InvalidInput("drift: too many revisions or predictions in one sketch")
        return cls(revisions=revisions, scores=scores)


def ingest(
    write: Write, file: PredictionFile, found: SketchFile, *, plans: Mapping[str, Plan]
) -> bool:
    """Count a sketch. Returns False if its file is unknown, deleted, or was counted before. Raises
    StorageQuotaExceeded."""
    table = tables.prediction_files
    of_file = sa.update(table).where(
        table.c.id == file.id,
        table.c.tenant == file.tenant,
        table.c.function_id == file.function,
        table.c.expires_at > write.now,
        table.c.is_sketched.is_(sa.false()),
    )
    if not write.sql.execute(of_file.values(is_sketched=True)).rowcount:
        return False
    more = sum(
        _count(write, file, revision, counted) for revision, counted in found.revisions.items()
    )
    more += SCORE_BYTES * _insert_scores(write, file, found.scores)
    plan = storage_usage.plan_of(write.sql, plans, tenant=file.tenant)
    storage_usage.require_room(write.sql, plan, tenant=file.tenant, more_bytes=max(0, more))
    stored_bytes.count(write, tenant=file.tenant, more_bytes=more)
    return True


def window(
    sql: sa.Connection,
    function_id: str,
    *,
    since_h: int,
    until_h: int,
    now: float,
    revision: str | None = None,
    only: str | None = None,
) -> FeatureCounts:
    """Return what was counted from hour `since_h` to before `until_h` (since the epoch). `revision`
    None: of all; `only`: a single feature."""
    table = tables.drift_sketches
    query = sa.select(table.c.rows, table.c.features).where(
        table.c.function_id == function_id,
        table.c.hour >= since_h,
        table.c.hour < until_h,
        table.c.expires_at > now,
    )
    if revision is not None:
        query = query.where(table.c.revision == revision)
    found = FeatureCounts()
    for row in sql.execute(query.order_by(table.c.hour, table.c.revision)):
        features = json.loads(row.features)
        if only is not None:
            features = {name: one for name, one in features.items() if name == only}
        found = found.merged(FeatureCounts.from_json(row.rows, features))
    return found


def functions_since(sql: sa.Connection, hour: int) -> list[str]:
    """Return the functions with sketches of this hour or later."""
    table = tables.drift_sketches
    query = sa.select(table.c.function_id).where(table.c.hour >= hour).distinct()
    return sorted(sql.execute(query).scalars())


def reference_of(sql: sa.Connection, function_id: str) -> FeatureCounts | None:
    """Return the stored reference of a function; None = it has none."""
    table = tables.drift_references
    row = sql.execute(sa.select(table).where(table.c.function_id == function_id)).first()
    return None if row is None else FeatureCounts.from_json(row.rows, json.loads(row.features))


def set_reference(
    write: Write,
    function_id: str,
    counted: FeatureCounts,
    *,
    tenant: str,
    source: str,
    actor: str,
) -> None:
    """Replace the reference of a function."""
    table = tables.drift_references
    features = canonical_json(counted.to_json()).decode()
    write.sql.execute(sa.delete(table).where(table.c.function_id == function_id))
    write.sql.execute(
        sa.insert(table).values(
            function_id=function_id,
            tenant=tenant,
            rows=counted.rows,
            features=features,
            source=source,
            created_by=actor,
            created_at=write.now,
        )
    )


def end(write: Write, function_id: str, *, tenant: str, until: float) -> None:
    """End the retention of what was counted in hours that begin before `until`: it is read no
    longer, and `delete_expired` deletes it. Deletes the reports on these hours."""
    sketches, scores = tables.drift_sketches, tables.drift_scores
    until_h = math.ceil(min(until, write.now + DAY_S) / HOUR_S)
    for table, is_before in (
        (sketches, sketches.c.hour < until_h),
        (scores, scores.c.at < until_h * HOUR_S),
    ):
        of_it = (table.c.function_id == function_id, table.c.tenant == tenant)
        write.sql.execute(sa.update(table).where(*of_it, is_before).values(expires_at=write.now))
    reports = tables.drift_reports
    write.sql.execute(
        sa.delete(reports).where(
            reports.c.function_id == function_id,
            reports.c.tenant == tenant,
            reports.c.until <= until_h,
        )
    )


def delete_expired(write: Write, *, limit: int) -> int:
    """Delete sketches and predictions whose window is over; returns how many rows."""
    deleted = 0
    sketches, scores = tables.drift_sketches, tables.drift_scores
    key = (sketches.c.function_id, sketches.c.revision, sketches.c.hour)
    due = sa.select(*key).where(sketches.c.expires_at <= write.now).limit(limit)
    gone = write.sql.execute(
        sa.delete(sketches)
        .where(sa.tuple_(*key).in_(due))
        .returning(sketches.c.tenant, sa.func.length(sketches.c.features))
    ).all()
    keys = (scores.c.tenant, scores.c.call)
    due_scores = sa.select(*keys).where(scores.c.expires_at <= write.now).limit(limit)
    gone_scores = write.sql.execute(
        sa.delete(scores).where(sa.tuple_(*keys).in_(due_scores)).returning(scores.c.tenant)
    ).all()
    freed: dict[str, int] = {}
    for tenant, size in [*gone, *((one.tenant, SCORE_BYTES) for one in gone_scores)]:
        freed[tenant] = freed.get(tenant, 0) + int(size)
        deleted += 1
    for tenant, size in freed.items():
        stored_bytes.count(write, tenant=tenant, more_bytes=-size)
    return deleted


def _count(write: Write, file: PredictionFile, revision: str, counted: FeatureCounts) -> int:
    """Add counts to their hour; returns by how many bytes it grew."""
    table, hour = tables.drift_sketches, file.hour // HOUR_S
    of_it = (
        table.c.function_id == file.function,
        table.c.revision == revision,
        table.c.hour == hour,
    )
    row = write.sql.execute(
        sa.delete(table).where(*of_it).returning(table.c.rows, table.c.features, table.c.expires_at)
    ).first()
    if row is not None and row.expires_at > write.now:
        counted = FeatureCounts.from_json(row.rows, json.loads(row.features)).merged(counted)
    features = canonical_json(counted.to_json()).decode()
    write.sql.execute(
        sa.insert(table).values(
            function_id=file.function,
            revision=revision,
            hour=hour,
            tenant=file.tenant,
            rows=counted.rows,
            features=features,
            expires_at=min(file.expires_at, float(file.hour + HOUR_S + KEEP_S)),
        )
    )
    return len(features) - (len(row.features) if row is not None else 0)


def _insert_scores(write: Write, file: PredictionFile, scores: Sequence[Score]) -> int:
    if not scores:
        return 0
    rows = [
        {
            "tenant": file.tenant,
            "call": one.call,
            "function_id": file.function,
            "revision": one.revision,
            "at": one.at,
            "score": one.score,
            "label": one.label,
            "slices": canonical_json(list(one.slices)).decode(),
            "expires_at": file.expires_at,
        }
        for one in scores
    ]
    insert = write.insert(tables.drift_scores).on_conflict_do_nothing()
    return len(write.sql.execute(insert.returning(tables.drift_scores.c.call), rows).all())


def _score(call: str, revision: str, at: float, predicted: Any, slices: Sequence[str]) -> Score:
    texts = [call, revision, *slices]
    if len(slices) > MAX_SLICES or not all(
        isinstance(one, str) and len(one) <= _MAX_ID_CHARS for one in texts
    ):
        raise ValueError("not a prediction")
    score = label = None
    if isinstance(predicted, bool):
        label = "true" if predicted else "false"
    elif isinstance(predicted, str):
        label = predicted[:MAX_CATEGORY_CHARS]
        texts.append(label)
    else:
        score = float(predicted)
        if not math.isfinite(score):
            raise ValueError("not a number")
    if b"\0" in "".join(texts).encode():  # which has no half of a surrogate pair
        raise ValueError("not text")
    return Score(
        call=call, revision=revision, at=float(at), score=score, label=label, slices=slices
    )

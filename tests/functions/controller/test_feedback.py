"""Outcomes of calls: at most once, late within the window, before the record, and only of one's
own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.analytics import feedback
from pilotlight.controller.analytics.feedback import FeedbackResult, FeedbackWindow
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import Conflict, Forbidden, InvalidInput, NotFound
from pilotlight.spec.identifiers import Scope
from tests.functions.controller.parts import ManualClock, usage

DAY_S = 86_400.0


def principal(tenant: str = "t-1", **bounds: Any) -> Principal:
    values = {"bound_environment": None, **bounds}
    return Principal(
        tenant=tenant,
        tenant_name=tenant,
        uid=None,
        key="k-1",
        scope=Scope.INVOKE,
        environment="main",
        **values,
    )


def add(store: Store, call: str = "req-1", **changes: Any) -> None:
    with store.write() as write:
        ledger.add(write, [usage(f"{call}/{changes.get('attempt', 1)}", **changes)])


def give(
    store: Store,
    *,
    call: str = "req-1",
    caller: Principal | None = None,
    label: str | None = None,
    **metrics: float,
) -> FeedbackResult:
    with store.write() as write:
        told = feedback.parse_feedback(label, metrics)
        return feedback.record_feedback(
            write, caller or principal(), call=call, feedback=told, window_days=30
        )


def told(store: Store, call: str = "req-1", tenant: str = "t-1") -> dict[str, Any]:
    with store.read() as sql:
        return {
            row["metric"]: row["label"] or row["value"]
            for row in sql.execute(
                sa.select(tables.feedback).where(
                    tables.feedback.c.tenant == tenant, tables.feedback.c.call == call
                )
            ).mappings()
        }


def window(store: Store, metric: str, **changes: Any) -> FeedbackWindow:
    wanted = {
        "function_id": "f-1",
        "revision": None,
        "since_s": 0.0,
        "until_s": math.inf,
        **changes,
    }
    with store.read() as sql:
        return feedback.window(sql, metric=metric, **wanted)


def fresh(clock: ManualClock, number: int = 0) -> str:
    """The id of a call that was made now."""
    return f"req-{int(clock.now * 1000):012x}{number:020x}"


def join(store: Store) -> int:
    with store.write() as write:
        return feedback.join_to_calls(write)


def test_the_same_word_twice_counts_once_and_another_is_refused(store: Store) -> None:
    add(store)
    assert give(store, rating=4.0) == FeedbackResult(is_replayed=False, is_waiting=False)
    assert give(store, rating=4.0) == FeedbackResult(is_replayed=True, is_waiting=False)
    with pytest.raises(Conflict, match=r"already has feedback on 'rating': 4\.0"):
        give(store, rating=5.0)
    assert give(store, label="good") == FeedbackResult(is_replayed=False, is_waiting=False)
    assert told(store) == {"rating": 4.0, "label": "good"}


def test_of_several_metrics_all_are_kept_or_none(store: Store) -> None:
    add(store)
    give(store, rating=4.0)
    with pytest.raises(Conflict):
        give(store, accuracy=1.0, rating=5.0)
    assert told(store) == {"rating": 4.0}


def test_feedback_is_late_until_the_window_ends(store: Store, clock: ManualClock) -> None:
    add(store, started_at=clock.now)
    clock.now += 30 * DAY_S
    assert not give(store, rating=4.0).is_replayed
    clock.now += 1
    with pytest.raises(Conflict, match="more than 30 days ago"):
        give(store, accuracy=1.0)


@pytest.mark.parametrize("call", ["nonsense", "req-1", f"req-{0:032x}", "", "x" * 500])
def test_what_never_was_is_not_there(store: Store, call: str) -> None:
    with pytest.raises(NotFound):
        give(store, call=call, rating=4.0)


def test_another_tenants_call_is_not_there_but_a_guest_tells_of_its_own(store: Store) -> None:
    add(store, "req-1")
    add(store, "req-2", caller="t-guest")
    guest = principal("t-guest")
    with pytest.raises(NotFound):
        give(store, call="req-1", caller=guest, rating=1.0)
    give(store, call="req-2", caller=guest, rating=1.0)
    assert told(store, "req-2") == {"rating": 1.0}, "it is the owner's function"
    assert give(store, call="req-2", rating=1.0).is_replayed, (
        "the owner's word on the same call is the same word"
    )


def test_a_bound_key_reaches_the_calls_of_its_function_only(store: Store) -> None:
    add(store)
    add(store, "req-2", caller="t-1", tenant="t-other", function_id="f-2")
    with pytest.raises(Forbidden):
        give(store, caller=principal(bound_app="search", bound_function="rank"), rating=1.0)
    with pytest.raises(NotFound):
        give(store, caller=principal(bound_environment="staging"), rating=1.0)
    with pytest.raises(NotFound):
        give(store, call="req-2", caller=principal(bound_app="search"), rating=1.0)
    assert not give(
        store, caller=principal(bound_app="search", bound_function="embed"), rating=1.0
    ).is_replayed


def test_feedback_that_is_quicker_than_the_record_waits_for_it(
    store: Store, clock: ManualClock
) -> None:
    call = fresh(clock)
    assert give(store, call=call, rating=4.0) == FeedbackResult(is_replayed=False, is_waiting=True)
    assert give(store, call=call, rating=4.0) == FeedbackResult(is_replayed=True, is_waiting=True)
    with pytest.raises(Conflict):
        give(store, call=call, rating=5.0)
    assert (join(store), window(store, "rating").n) == (0, 0)
    add(store, call, started_at=clock.now, experiment="x-1", arm="b", unit="u", attempt=2)
    assert (join(store), window(store, "rating")) == (1, FeedbackWindow(1, 4.0, 0.0))
    assert give(store, call=call, rating=4.0) == FeedbackResult(is_replayed=True, is_waiting=False)


def test_a_guests_quick_word_waits_too(store: Store, clock: ManualClock) -> None:
    call = fresh(clock)
    give(store, call=call, caller=principal("t-guest"), rating=4.0)
    add(store, call, started_at=clock.now, caller="t-guest")
    assert (join(store), told(store, call)) == (1, {"rating": 4.0})
    assert told(store, call, tenant="t-guest") == {}


def test_what_waits_for_anothers_call_is_dropped_in_the_end(
    store: Store, clock: ManualClock
) -> None:
    call = fresh(clock)
    give(store, call=call, caller=principal("t-thief"), rating=4.0)
    add(store, call, started_at=clock.now)
    assert (join(store), told(store, call, tenant="t-thief"), window(store, "rating").n) == (
        0,
        {"rating": 4.0},
        0,
    )
    clock.now += feedback.EXPECTED_S + 1
    assert (join(store), told(store, call, tenant="t-thief"), window(store, "rating").n) == (
        0,
        {},
        0,
    )


def test_what_a_bound_key_told_too_early_is_dropped_when_it_was_out_of_its_reach(
    store: Store, clock: ManualClock
) -> None:
    call = fresh(clock)
    give(store, call=call, caller=principal(bound_app="search", bound_function="rank"), rating=4.0)
    add(store, call, started_at=clock.now)
    assert (join(store), told(store, call)) == (1, {})


def test_no_tenant_fills_the_table_with_what_waits(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MAX_WAITING", 2)
    for number in range(2):
        give(store, call=fresh(clock, number), rating=4.0)
    with pytest.raises(NotFound, match="feedback on 2 others is pending"):
        give(store, call=fresh(clock, 3), rating=4.0)
    assert give(store, call=fresh(clock, 3), caller=principal("t-2"), rating=4.0).is_waiting


def test_a_window_is_cut_by_the_calls_time_and_revision(store: Store) -> None:
    for number, (revision, at, value) in enumerate(
        [("v1", 10.0, 1.0), ("v1", 20.0, 2.0), ("v2", 20.0, 6.0), ("v1", 30.0, 9.0)]
    ):
        add(store, f"req-{number}", revision=revision, started_at=1_800_000_000 + at)
        give(store, call=f"req-{number}", label="good" if value > 5 else "bad", rating=value)
    cut = {"since_s": 1_800_000_010.0, "until_s": 1_800_000_030.0}
    assert window(store, "rating", revision="v1", **cut) == FeedbackWindow(2, 1.5, 0.5)
    assert window(store, "rating", **cut) == FeedbackWindow(3, 3.0, 7.0)
    assert window(store, "label=good").mean == 0.5
    nothing = window(store, "rating", function_id="f-2")
    assert nothing.n == 0
    assert math.isnan(nothing.mean)


@pytest.mark.parametrize(
    "label, metrics",
    [
        (None, {}),
        ("", {}),
        ("x" * 65, {}),
        ("a\nb", {}),
        (None, {"label": 1.0}),
        (None, {"9": 1.0}),
        (None, {"a": math.nan}),
        (None, {"a": math.inf}),
        (None, {"a": 1.7e308}),
        (None, {"a": -1e16}),
        (None, {f"m{n}": 1.0 for n in range(17)}),
    ],
)
def test_what_is_no_feedback_is_refused(label: str | None, metrics: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        feedback.parse_feedback(label, metrics)

"""Pure parts: what all activators say together, what a PodAutoscaler says, how many pods that
makes, and its conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.autoscaler.kpa import ACTIVATION_BUFFER_S
from activator.knative.autoscaler import conditions
from activator.knative.autoscaler.conditions import Seen, status_of
from activator.knative.autoscaler.load_aggregation import GONE_S, SILENT_S, Members, RevisionLoad
from activator.knative.autoscaler.load_report import Load, StoredReport
from activator.knative.autoscaler.podautoscalers import (
    PROGRESS_DEADLINE_S,
    Scalable,
    parsed,
    seconds,
)
from activator.knative.autoscaler.scaling import Decision, RevisionScale, RevisionStatus, spec_of
from activator.knative.autoscaler.write_cache import Latest
from pilotlight.kubernetes.kinds import POD_AUTOSCALER
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.routes import spec_of as function_spec

SCALABLE = Scalable(
    namespace="n",
    name="r",
    uid="u",
    key="k",
    tenant="t",
    target="r-deployment",
    max_scale=8,
    initial_scale=0,
    is_initialised=True,
)
KEY = "k"


def posted(load: Load | None = None, *, age_s: float = 0.0) -> StoredReport:
    return StoredReport(statement={} if load is None else {KEY: load}, age_s=age_s)


# -- together --------------------------------------------------------------------------------------
def test_loads_claims_and_asks_add_up() -> None:
    roll = Members()
    one = Load(concurrency=1.5, in_flight=1, asked=2, held={"p": 1}, promised=1, start_s=2.0)
    other = Load(concurrency=0.5, waiting=3, held={"q": 0}, promoted={"i": 1}, start_s=3.0)
    roll.record({"a": posted(one), "b": posted(other)}, 10.0)
    merged = roll.merged(KEY, 10.0)
    assert merged == RevisionLoad(
        concurrency=2.0,
        in_flight=1,
        waiting=3,
        asked=2,
        held={"p": 1, "q": 0},
        promoted={"i": 1},
        promised=1,
        start_s=3.0,
    )
    assert merged.floor == 4
    assert repr(roll) == "<Members a, b>"


def test_an_activator_that_lives_and_reports_nothing_is_silent() -> None:
    roll = Members()
    roll.record({"a": posted()}, 0.0, living=("a", "b"))
    assert roll.merged(KEY, 0.0).concurrency is None
    roll.record({"a": posted()}, 1.0, living=("a",))
    assert roll.merged(KEY, 1.0).concurrency == 0.0


def test_a_pod_that_two_claim_for_a_moment_counts_once() -> None:
    roll = Members()
    roll.record({"a": posted(Load(held={"p": 1})), "b": posted(Load(held={"p": 4}))}, 0.0)
    assert roll.merged(KEY, 0.0).held == {"p": 4}


def test_a_member_that_says_nothing_of_a_revision_has_nothing_there_one_that_says_nothing_at_all_is_silent() -> (
    None
):
    roll = Members()
    assert roll.merged(KEY, 0.0).concurrency is None
    roll.record({"a": posted()}, 0.0)
    assert roll.merged(KEY, 0.0).concurrency == 0.0
    assert roll.merged(KEY, SILENT_S + 0.1).concurrency is None


def test_a_silent_member_still_has_what_it_had_until_it_is_gone() -> None:
    roll = Members()
    roll.record({"a": posted(Load(held={"p": 1}, asked=1)), "b": posted()}, 0.0)
    roll.record({"b": posted()}, 10.0)
    roll.drop_gone(10.0)
    assert (roll.merged(KEY, 10.0).floor, roll.merged(KEY, 10.0).concurrency) == (2, None)
    roll.record({"a": posted(age_s=GONE_S + 1), "b": posted()}, GONE_S + 1)
    roll.drop_gone(GONE_S + 1)
    assert (roll.merged(KEY, GONE_S + 1).floor, roll.merged(KEY, GONE_S + 1).concurrency) == (
        0,
        0.0,
    )


# -- what it says ----------------------------------------------------------------------------------
def autoscaler(**annotations: str) -> dict[str, Any]:
    given = {
        f"autoscaling.knative.dev/{name.replace('_', '-')}": value
        for name, value in annotations.items()
    }
    return {
        "metadata": {"name": "r", "namespace": "n", "uid": "u", "annotations": given},
        "spec": {},
    }


def test_annotations_are_read_with_knatives_defaults() -> None:
    plain = parsed(autoscaler())
    assert (
        plain.min_scale,
        plain.max_scale,
        plain.initial_scale,
        plain.reachable,
        plain.target,
    ) == (0, 0, 1, True, "r-deployment")
    told = parsed(
        autoscaler(min_scale="1", max_scale="4", initial_scale="2", scale_down_delay="1m30s")
    )
    assert (told.min_scale, told.max_scale, told.initial_scale, told.scale_down_delay_s) == (
        1,
        4,
        2,
        90.0,
    )
    assert parsed(autoscaler(minScale="3")).min_scale == 3
    assert parsed(autoscaler(min_scale="many")).min_scale == 0


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("90s", 90.0),
        ("1h2m3.5s", 3723.5),
        ("250ms", 0.25),
        ("soon", 600.0),
        ("", 600.0),
        (None, 600.0),
        ("5", 600.0),
    ],
)
def test_durations_are_those_of_go(text: str | None, wanted: float) -> None:
    assert seconds(text, PROGRESS_DEADLINE_S) == wanted


# -- how many --------------------------------------------------------------------------------------
def decided(
    merged: RevisionLoad,
    status: RevisionStatus,
    *,
    scalable: Scalable = SCALABLE,
    after_s: int = 0,
    may_shrink: bool = True,
) -> Decision:
    """After so many seconds of the same; one second at least."""
    scale = RevisionScale(
        spec_of(scalable, function_spec(scaling=Scaling(scaledown_window_s=10.0))), 0.0, ready=0
    )
    decision = Decision(wanted=-1, why="")
    for second in range(after_s + 1):
        scale.record(float(second), merged.concurrency)
        decision = scale.decide(float(second), scalable, merged, status, may_shrink=may_shrink)
    return decision


HEARD = RevisionLoad(concurrency=0.0)


def test_what_is_claimed_or_asked_for_is_the_floor() -> None:
    assert decided(replace(HEARD, asked=3), RevisionStatus(replicas=0, ready=0)).wanted == 3
    assert (
        decided(
            replace(HEARD, asked=1, held={"p": 0, "q": 1}), RevisionStatus(replicas=2, ready=2)
        ).wanted
        == 3
    )


def test_pods_that_start_for_what_is_asked_are_not_asked_for_twice() -> None:
    merged = RevisionLoad(concurrency=3.0, waiting=3, asked=3)
    assert decided(merged, RevisionStatus(replicas=3, ready=0), after_s=4).wanted == 3


def test_a_load_that_lasts_asks_for_more_than_activators_do() -> None:
    merged = RevisionLoad(concurrency=5.0, in_flight=5, held={"p": 5})
    assert decided(merged, RevisionStatus(replicas=1, ready=1), after_s=4).wanted == 5


def test_a_pod_that_starts_for_nobody_goes_when_the_load_is_over() -> None:
    assert decided(HEARD, RevisionStatus(replicas=2, ready=0), after_s=30).wanted == 0


def test_without_all_words_it_may_grow_and_never_shrinks() -> None:
    deaf = RevisionLoad(concurrency=None, asked=1)
    assert decided(deaf, RevisionStatus(replicas=4, ready=4), after_s=100) == Decision(
        wanted=4, why="no_data"
    )
    assert decided(replace(deaf, asked=6), RevisionStatus(replicas=4, ready=4)).wanted == 6
    assert (
        decided(HEARD, RevisionStatus(replicas=4, ready=4), after_s=100, may_shrink=False).wanted
        == 4
    )


def test_bounds_are_the_pod_autoscalers() -> None:
    assert decided(replace(HEARD, asked=50), RevisionStatus(replicas=0, ready=0)) == Decision(
        wanted=8, why="max"
    )
    kept = replace(SCALABLE, min_scale=2)
    assert (
        decided(HEARD, RevisionStatus(replicas=2, ready=2), scalable=kept, after_s=60).wanted == 2
    )
    fresh = replace(SCALABLE, initial_scale=3, is_initialised=False)
    assert decided(HEARD, RevisionStatus(replicas=0, ready=0), scalable=fresh) == Decision(
        wanted=3, why="initial"
    )
    gone = replace(kept, reachable=False)
    assert decided(HEARD, RevisionStatus(replicas=2, ready=2), scalable=gone, after_s=2).wanted == 0


def test_what_activators_use_is_not_given_up_because_kubernetes_has_not_noticed() -> None:
    soon = replace(SCALABLE, progress_deadline_s=10.0)
    late_s = int(10 + ACTIVATION_BUFFER_S) + 5
    assert decided(
        replace(HEARD, asked=1), RevisionStatus(replicas=1, ready=0), scalable=soon, after_s=late_s
    ) == Decision(wanted=0, why="timed_out", has_timed_out=True)
    assert (
        decided(
            replace(HEARD, held={"p": 1}),
            RevisionStatus(replicas=1, ready=0),
            scalable=soon,
            after_s=late_s,
        ).wanted
        == 1
    )


def test_without_a_route_the_pod_autoscaler_says_enough() -> None:
    spec = spec_of(replace(SCALABLE, concurrency=4, max_scale=0, min_scale=1), None)
    assert (spec.max_inputs, spec.min_instances) == (4, 1)


@given(st.data())
def test_never_below_what_activators_have_nor_out_of_bounds(data: st.DataObject) -> None:
    held, asked, replicas, ready, least = (
        data.draw(st.integers(0, most)) for most in (6, 6, 12, 12, 3)
    )
    load, may_shrink = data.draw(st.floats(0, 40) | st.none()), data.draw(st.booleans())
    merged = RevisionLoad(
        concurrency=load,
        asked=asked,
        held={f"p{n}": n % 2 for n in range(held)},
        in_flight=held // 2,
    )
    status = RevisionStatus(replicas=replicas, ready=min(ready, replicas))
    decision = decided(
        merged,
        status,
        scalable=replace(SCALABLE, min_scale=least),
        after_s=3,
        may_shrink=may_shrink,
    )
    assert least <= decision.wanted <= 8
    assert decision.wanted >= min(8, held + asked)
    if load is None or not may_shrink:
        assert decision.wanted >= min(8, replicas)


# -- what Knative is told --------------------------------------------------------------------------
SERVED = {
    "status": {
        "serviceName": "r",
        "privateServiceName": "r-private",
        "conditions": [{"type": "Ready", "status": "True"}],
    }
}


def told(
    seen: Seen, *, scalable: Scalable = SCALABLE, sks: dict[str, Any] | None = None
) -> dict[str, tuple[str, str]]:
    status = status_of(scalable, autoscaler(), SERVED if sks is None else sks, seen, now="T1")
    return {one["type"]: (one["status"], one.get("reason", "")) for one in status["conditions"]}


@pytest.mark.parametrize(
    "wanted, ready, active",
    [
        (0, 0, ("False", "NoTraffic")),
        (2, 0, ("Unknown", "Queued")),
        (2, 1, ("True", "")),
        (0, 3, ("False", "NoTraffic")),
    ],
)
def test_active_follows_from_what_is_wanted_and_what_is_there(
    wanted: int, ready: int, active: tuple[str, str]
) -> None:
    found = told(Seen(wanted=wanted, ready=ready))
    assert found["Active"] == active
    assert found["Ready"] == active


def test_nothing_is_initialised_before_its_services_are_there() -> None:
    fresh = replace(SCALABLE, is_initialised=False)
    assert (
        told(Seen(wanted=0, ready=0), scalable=fresh, sks={})["ScaleTargetInitialized"][0]
        == "Unknown"
    )
    assert told(Seen(wanted=0, ready=0), scalable=fresh)["ScaleTargetInitialized"][0] == "True"
    assert told(Seen(wanted=1, ready=1), scalable=fresh, sks={})["SKSReady"] == (
        "Unknown",
        "NotReady",
    )


def test_a_time_changes_only_with_the_state_that_it_is_of() -> None:
    item = autoscaler()
    first = status_of(SCALABLE, item, SERVED, Seen(wanted=1, ready=0), now="T1")
    again = status_of(
        SCALABLE, {**item, "status": first}, SERVED, Seen(wanted=1, ready=0), now="T2"
    )
    assert again == first
    later = status_of(
        SCALABLE, {**item, "status": first}, SERVED, Seen(wanted=1, ready=1), now="T3"
    )
    times = {one["type"]: one["lastTransitionTime"] for one in later["conditions"]}
    assert times == {
        "Active": "T3",
        "Ready": "T3",
        "SKSReady": "T1",
        "ScaleTargetInitialized": "T1",
    }


def test_given_up_and_not_owned_are_said() -> None:
    assert told(Seen(wanted=0, ready=0, has_timed_out=True))["Active"] == ("False", "TimedOut")
    assert told(Seen(wanted=1, ready=1, not_owned=True), sks={})["Active"] == ("False", "NotOwned")
    assert conditions.__doc__


def test_what_was_written_counts_until_the_watch_tells_something_newer() -> None:
    latest, place = Latest(), ("n", "r")

    def at(version: str) -> dict[str, Any]:
        return {"metadata": {"namespace": "n", "name": "r", "resourceVersion": version}}

    latest.store(POD_AUTOSCALER, at("1"), at("2"))
    assert latest.get(POD_AUTOSCALER, place, at("1")) == at("2")
    assert latest.get(POD_AUTOSCALER, place, at("3")) == at("3")
    assert latest.get(POD_AUTOSCALER, place, at("1")) == at("1"), "told once, it is forgotten"
    latest.store(POD_AUTOSCALER, None, at("2"))
    assert latest.get(POD_AUTOSCALER, place, None) == at("2")
    latest.delete(place)
    assert latest.get(POD_AUTOSCALER, place, None) is None


# -- promoted pods ---------------------------------------------------------------------------------
def _scaled(merged: RevisionLoad, *, replicas: int = 0, ready: int = 0) -> Decision:
    """A decision for a revision whose load was the same for a while."""
    spec = spec_of(SCALABLE, function_spec(scaling=Scaling(max_inputs=1, max_instances=8)))
    scale = RevisionScale(spec, 0.0, ready=ready)
    for second in range(10):
        scale.record(float(second), merged.concurrency)
    status = RevisionStatus(replicas=replicas, ready=ready)
    return scale.decide(9.0, SCALABLE, merged, status, may_shrink=True)


def test_instances_in_promoted_pods_count_as_pods_while_they_bridge() -> None:
    load = RevisionLoad(concurrency=2.0, in_flight=2, promoted={"i-1": 1, "i-2": 1})
    assert (load.floor, load.bridging) == (0, 2)
    assert _scaled(load).wanted == 0


def test_no_own_pod_is_made_for_a_start_that_waits_for_a_promoted_pod() -> None:
    load = RevisionLoad(concurrency=1.0, waiting=1, promised=1)
    assert _scaled(load).wanted == 0
    assert _scaled(replace(load, promised=0)).wanted == 1
    assert _scaled(replace(load, promised=0, asked=1)).wanted == 1
    assert _scaled(replace(load, concurrency=3.0, waiting=3)).wanted == 2


def test_what_promoted_pods_do_not_carry_gets_own_pods() -> None:
    load = RevisionLoad(concurrency=3.0, in_flight=1, waiting=2, promoted={"i": 1})
    assert _scaled(load).wanted == 2


def test_for_load_that_lasts_own_pods_come_first_and_stay_when_promoted_ones_go() -> None:
    load = RevisionLoad(concurrency=1.0, in_flight=1, promoted={"i": 1}, asked=1)
    assert _scaled(load).wanted == 1
    # it is not claimed yet, and where there is no room for both not asked for any longer
    assert _scaled(replace(load, asked=0), replicas=1, ready=0).wanted == 1
    assert _scaled(replace(load, asked=0), replicas=1, ready=1).wanted == 1
    both = RevisionLoad(concurrency=1.0, in_flight=1, promoted={"i": 1}, held={"own": 0})
    assert _scaled(both, replicas=1, ready=1).wanted == 1
    own = RevisionLoad(concurrency=1.0, in_flight=1, held={"own": 1})
    assert _scaled(own, replicas=1, ready=1).wanted == 1


def test_an_own_pod_that_was_made_goes_with_the_load() -> None:
    idle = RevisionLoad(concurrency=0.0)
    assert _scaled(idle, replicas=1, ready=1).wanted == 0

"""Whose instances are released for a start that lacks GPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.fairness.gpu_preemption import GpuShortfall, gpu_victims
from activator.fairness.preemption import SPARE_S, TURN_S, PreemptionCandidate, TenantUsage
from pilotlight.spec.identifiers import Priority
from tests.fakes import fake_nvml
from tests.fakes.fake_nvml import H100, L4, inventory_of

BATCH, STANDARD, REALTIME = Priority.BATCH, Priority.STANDARD, Priority.REALTIME


def tenure(
    id: str,
    tenant: str,
    *,
    idle_s: float | None = 0.1,
    gpus: int = 1,
    model: str = H100,
    is_spare: bool = True,
    is_asleep: bool = False,
    value: float = 0.0,
    priority: Priority = STANDARD,
) -> PreemptionCandidate:
    return PreemptionCandidate(
        id=id,
        tenant=tenant,
        key=id,
        function=id,
        memory_bytes=1,
        gpus=gpus,
        devices=inventory_of(*fake_nvml.gpus(*(model,) * gpus)).devices,
        idle_s=None if idle_s is None else 1e9 if is_asleep else idle_s,
        in_flight=int(idle_s is None),
        is_spare=is_spare,
        is_asleep=is_asleep,
        value=value,
        priority=priority,
    )


def balance_of(
    tenures: Sequence[PreemptionCandidate],
    *,
    kind: str = "any",
    weights: dict[str, int] | None = None,
    reserved: str = "",
    total: int | None = None,
) -> TenantUsage:
    """All GPUs of the kind are held, unless `total` says otherwise."""
    use: Counter[str] = Counter()
    for one in tenures:
        use[one.tenant] += one.gpus_of([kind])
    floors = {tenant: use[tenant] for tenant in reserved}
    return TenantUsage(
        use=use, weights=weights or {}, floors=floors, total=total or max(1, use.total())
    )


def need_of(
    tenant: str,
    lacking: int = 1,
    *,
    kind: str = "any",
    priority: Priority = STANDARD,
    waited_s: float = 0.0,
) -> GpuShortfall:
    return GpuShortfall(
        tenant=tenant,
        kind=kind,
        asked=lacking,
        lacking=lacking,
        priority=priority,
        waited_s=waited_s,
    )


def chosen(
    tenures: Sequence[PreemptionCandidate], need: GpuShortfall, balance: TenantUsage | None = None
) -> list[str]:
    balance = balance or balance_of(tenures, kind=need.kind)
    return [victim.id for victim in gpu_victims(tenures, need, balance)]


def test_idle_ones_of_tenants_over_their_share_go_before_lower_priorities_and_those_before_others() -> (
    None
):
    held = [
        tenure("forgotten", "b", idle_s=SPARE_S + 1, is_asleep=True),
        tenure("batch", "b", priority=BATCH),
        tenure("own", "c", value=9.0),
        *(tenure(f"a{n}", "a", idle_s=None if n < 4 else 0.1) for n in range(6)),
    ]
    assert chosen(held, need_of("c", 2)) == ["a4", "a5"]
    assert chosen(held, need_of("c", 3)) == ["a4", "a5", "batch"]
    assert chosen(held, need_of("c", 5)) == ["batch", "forgotten", "own"], (
        "c would be over its own share of three, as far as a is"
    )
    held = [one for one in held if one.id not in ("a4", "a5")]
    assert chosen(held, need_of("c", 1)) == ["batch"]


def test_the_tenant_furthest_over_its_share_loses_first_until_another_is_further_over() -> None:
    held = [tenure(f"a{n}", "a", idle_s=n / 10) for n in range(5)] + [
        tenure(f"b{n}", "b") for n in range(3)
    ]
    assert chosen(held, need_of("c", 2)) == ["a4", "a3"]
    assert chosen(held, need_of("c"), balance_of(held, weights={"a": 8})) == ["b0"]


def test_a_share_of_two_and_a_half_gpus_is_three() -> None:
    held = [tenure(f"a{n}", "a") for n in range(3)]
    assert chosen(held, need_of("b"), balance_of(held, total=5)) == []
    assert chosen(held, need_of("b"), balance_of(held, total=4)) == ["a0"]


def test_an_idle_one_of_a_tenant_within_its_share_stays_until_it_had_no_call_for_a_while() -> None:
    held = [tenure("a0", "a"), tenure("b0", "b", idle_s=SPARE_S - 0.1)]
    assert chosen(held, need_of("a")) == ["a0"], "its own is always open to it"
    assert chosen(held[1:], need_of("a"), balance_of(held)) == []
    late = [replace(held[1], idle_s=SPARE_S)]
    assert chosen(late, need_of("a"), balance_of(held)) == ["b0"]


def test_an_instance_on_another_kind_of_gpu_or_none_is_left_alone() -> None:
    held = [
        tenure("l4", "a", idle_s=99, gpus=2, model=L4),
        tenure("h100", "a", idle_s=1),
        tenure("cpu", "a", idle_s=99, gpus=0),
    ]
    assert chosen(held, need_of("a", kind="H100")) == ["h100"]
    assert chosen(held, need_of("a", kind="L4")) == ["l4"]


def test_of_equals_sleeping_ones_go_first_then_those_whose_loss_costs_least_per_byte() -> None:
    values = {"dear": 3.0, "cheap": 1.0, "unknown": 0.0, "asleep": 9.0}
    held = [
        tenure(name, "a", idle_s=99 - n, value=value, is_asleep=name == "asleep")
        for n, (name, value) in enumerate(values.items())
    ]
    assert chosen(held, need_of("a", 4)) == ["asleep", "unknown", "cheap", "dear"]
    same = [tenure("short", "a", idle_s=1), tenure("long", "a", idle_s=2)]
    assert chosen(same, need_of("a")) == ["long"]


def test_busy_ones_of_a_tenant_over_its_share_finish_for_one_within_that_waited_its_turn() -> None:
    held = [tenure(f"a{n}", "a", idle_s=None) for n in range(4)]
    assert chosen(held, need_of("b", waited_s=TURN_S / 2)) == []
    assert chosen(held, need_of("b", waited_s=TURN_S)) == ["a0"]
    assert chosen(held, replace(need_of("b", waited_s=TURN_S), may_take_busy=False)) == []
    assert chosen(held, need_of("b", 3, waited_s=TURN_S)) == [], "b would be over its share of two"
    assert chosen(held, need_of("a", waited_s=TURN_S)) == []
    assert chosen(held[:1], need_of("b", 2, waited_s=TURN_S), balance_of(held)) == [], (
        "one is not enough, so none is drained"
    )


@pytest.mark.parametrize(
    "asking, running, expected",
    [
        (REALTIME, BATCH, ["a0"]),
        (STANDARD, BATCH, ["a0"]),
        (STANDARD, STANDARD, []),
        (BATCH, STANDARD, []),
    ],
)
def test_on_a_single_gpu_a_busy_function_finishes_only_for_a_higher_priority(
    asking: Priority, running: Priority, expected: list[str]
) -> None:
    held = [tenure("a0", "a", idle_s=None, priority=running)]
    assert chosen(held, need_of("b", priority=asking, waited_s=TURN_S)) == expected


def test_a_tenant_with_a_reservation_keeps_its_instances_from_others_and_may_use_its_own() -> None:
    held = [tenure(f"a{n}", "a", idle_s=99, priority=BATCH) for n in range(4)]
    reserved = balance_of(held, reserved="a")
    assert chosen(held, need_of("b", priority=REALTIME, waited_s=TURN_S), reserved) == []
    assert chosen(held, need_of("a"), reserved) == ["a0"]


_held = st.lists(
    st.builds(
        tenure,
        st.uuids().map(str),
        st.sampled_from("abc"),
        idle_s=st.none() | st.floats(0, 10),
        gpus=st.integers(0, 3),
        model=st.sampled_from([H100, L4]),
        is_spare=st.booleans(),
        is_asleep=st.booleans(),
        value=st.floats(0, 1),
        priority=st.sampled_from(Priority),
    ),
    max_size=12,
)


_needs = st.builds(
    need_of,
    st.just("a"),
    st.integers(1, 6),
    kind=st.sampled_from(["any", "H100", "L4"]),
    priority=st.sampled_from(Priority),
    waited_s=st.sampled_from([0.0, TURN_S]),
)


@given(
    held=_held,
    need=_needs,
    reserved=st.sampled_from(["", "b", "bc"]),
    weights=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)),
)
def test_whatever_is_chosen_may_be_taken_goes_in_order_and_is_no_more_than_needed(
    held: list[PreemptionCandidate], need: GpuShortfall, reserved: str, weights: dict[str, int]
) -> None:
    kind, lacking = need.kind, need.lacking
    balance = balance_of(held, kind=kind, reserved=reserved, weights=weights)
    out = gpu_victims(held, need, balance)
    shares = {name: math.ceil(share) for name, share in balance.shares("a").items()}
    use, freed, was_busy, worst = Counter(balance.use), 0, False, 0
    own = (use["a"] + lacking) / shares["a"]
    for victim in out:
        count, over = victim.gpus_of([kind]), use[victim.tenant] / shares.get(victim.tenant, 1)
        is_lower = victim.priority.rank > need.priority.rank
        assert victim.is_spare
        assert count
        assert victim.tenant not in reserved
        assert freed < lacking, "no more is released than is needed"
        if victim.idle_s is None:
            was_busy = True
            assert need.waited_s >= TURN_S
            assert own <= 1
            assert is_lower or (over > 1 and victim.tenant != "a")
        else:
            assert not was_busy, "idle ones go first"
            is_over = victim.tenant != "a" and over > max(1.0, own)
            is_open = victim.tenant == "a" or victim.idle_s >= SPARE_S
            assert is_over or is_lower or is_open
            step = 0 if is_over else 1 if is_lower else 2
            assert step >= worst, "the shares decide first, then priorities"
            worst = step
        freed += count
        use[victim.tenant] -= count
    assert len({victim.id for victim in out}) == len(out)
    assert not was_busy or freed >= lacking, "busy ones are drained only if that is enough"
    if freed < lacking:
        left = {one.id: one for one in held}.keys() - {one.id for one in out}
        for one in held:
            if one.id in left and one.is_spare and one.tenant == "a" and one.idle_s is not None:
                assert not one.gpus_of([kind]), "all room is made before the start is refused"

"""Whose instances make room for a start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from activator.fairness.preemption import (
    SPARE_S,
    TURN_S,
    PreemptionCandidate,
    ResourceShortfall,
    TenantUsage,
    pick_within_quota,
    value_per_byte,
    victims,
)
from snapshotter.types import GpuDevice


def tenure(
    id: str,
    tenant: str,
    *,
    idle_s: float | None = 0.1,
    size: int = 100,
    key: str = "r",
    is_spare: bool = True,
    gpus: int = 0,
) -> PreemptionCandidate:
    return PreemptionCandidate(
        id=id,
        tenant=tenant,
        key=key,
        function=key,
        memory_bytes=size,
        gpus=gpus,
        idle_s=idle_s,
        in_flight=int(idle_s is None),
        is_spare=is_spare,
    )


def balance_of(
    tenures: list[PreemptionCandidate],
    *,
    total: int = 1000,
    weights: dict[str, int] | None = None,
    **floors: int,
) -> TenantUsage:
    use: Counter[str] = Counter()
    for one in tenures:
        use[one.tenant] += one.memory_bytes
    return TenantUsage(use=use, weights=weights or {}, floors=floors, total=total)


def need_of(
    tenant: str, lacking: int = 100, *, waited_s: float = 0.0, asked: int = 100
) -> ResourceShortfall:
    return ResourceShortfall(
        tenant=tenant, asked_bytes=asked, lacking_bytes=lacking, waited_s=waited_s
    )


def chosen(
    tenures: list[PreemptionCandidate], need: ResourceShortfall, balance: TenantUsage | None = None
) -> list[str]:
    return [victim.id for victim in victims(tenures, need, balance or balance_of(tenures))]


def test_idle_instances_of_the_tenant_furthest_over_its_share_go_first_the_idlest_before_others() -> (
    None
):
    held = [tenure(f"a{n}", "a", idle_s=n / 10) for n in range(6)] + [
        tenure(f"b{n}", "b", idle_s=9) for n in range(4)
    ]
    assert chosen(held, need_of("new")) == ["a5"]
    assert chosen(held, need_of("new", 300, asked=300)) == ["a5", "a4", "b0"], (
        "by then b is the furthest over"
    )


def test_a_heavier_tenant_may_hold_more() -> None:
    held = [tenure(f"a{n}", "a") for n in range(6)] + [tenure(f"b{n}", "b") for n in range(4)]
    assert chosen(held, need_of("new"), balance_of(held, weights={"a": 8, "b": 1})) == ["b0"]


def test_who_would_be_over_its_share_itself_takes_nothing_from_those_within() -> None:
    held = [tenure(f"a{n}", "a", idle_s=None) for n in range(6)] + [
        tenure(f"b{n}", "b") for n in range(4)
    ]
    assert chosen(held, need_of("a")) == []
    held.append(tenure("mine", "a"))
    assert chosen(held, need_of("a")) == ["mine"], "its own is always open to it"


def test_what_nobody_called_for_a_while_goes_to_anybody_but_never_below_a_floor() -> None:
    held = [tenure("b0", "b", idle_s=SPARE_S), tenure("b1", "b", idle_s=SPARE_S)]
    assert chosen(held, need_of("a", 200, asked=900)) == ["b0", "b1"]
    assert chosen(held, need_of("a", asked=900), balance_of(held, b=200)) == []
    assert chosen(held, need_of("a", asked=900), balance_of(held, b=150)) == []
    assert chosen(held, need_of("a", asked=900), balance_of(held, b=100)) == ["b0"]


def test_what_min_instances_keeps_stays() -> None:
    assert chosen([tenure("a0", "a", idle_s=99, is_spare=False)], need_of("b")) == []


def test_busy_instances_of_tenants_over_their_share_finish_for_one_within_that_waited_its_turn() -> (
    None
):
    held = [tenure(f"a{n}", "a", idle_s=None) for n in range(10)]
    assert chosen(held, need_of("b", waited_s=TURN_S / 2)) == []
    assert chosen(held, need_of("b", waited_s=TURN_S)) == ["a0"]
    assert chosen(held, replace(need_of("b", waited_s=TURN_S), may_take_busy=False)) == [], (
        "one is on its way out already"
    )
    assert chosen(held, need_of("b", waited_s=TURN_S, asked=600)) == [], (
        "b would be over its own share"
    )
    assert chosen(held, need_of("a", waited_s=TURN_S)) == []


def test_nothing_is_given_up_where_it_does_not_suffice() -> None:
    held = [tenure("a0", "a", idle_s=SPARE_S), tenure("a1", "a", idle_s=None)]
    assert chosen(held, need_of("b", 300, asked=300)) == []


_held = st.lists(
    st.builds(
        tenure,
        st.uuids().map(str),
        st.sampled_from("abc"),
        idle_s=st.none() | st.floats(0, 10),
        size=st.integers(1, 50),
        is_spare=st.booleans(),
    ),
    max_size=25,
)


@given(
    _held,
    st.integers(1, 120),
    st.integers(0, 200),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 200)),
)
def test_whatever_is_chosen_suffices_is_open_and_spares_floors(
    held: list[PreemptionCandidate], lacking: int, waited: int, floors: dict[str, int]
) -> None:
    balance = replace(balance_of(held, total=500), floors=floors)
    out = victims(
        held, need_of("a", lacking, waited_s=waited / 50, asked=max(lacking, 20)), balance
    )
    left = Counter(balance.use)
    for victim in out:
        left[victim.tenant] -= victim.memory_bytes
        assert victim.is_spare
        assert not (victim.tenant == "a" and victim.idle_s is None)
    assert not out or sum(victim.memory_bytes for victim in out) >= lacking
    for tenant in "bc":
        assert left[tenant] == balance.use.get(tenant, 0) or left[tenant] >= floors.get(tenant, 0)
    if any(victim.idle_s is None for victim in out):
        assert waited / 50 >= TURN_S


def test_within_a_quota_the_idlest_goes_and_a_busy_one_only_for_a_revision_without_any_after_its_turn() -> (
    None
):
    busy = [
        tenure("x0", "a", key="x", idle_s=None),
        tenure("y0", "a", key="y", idle_s=None),
        tenure("y1", "a", key="y", idle_s=None),
    ]
    idle = [tenure("x1", "a", key="x", idle_s=1), tenure("y2", "a", key="y", idle_s=2)]

    def of(
        tenures: list[PreemptionCandidate],
        key: str,
        waited_s: float = 0.0,
        *,
        needs_gpu: bool = False,
    ) -> str | None:
        found = pick_within_quota(tenures, key, waited_s=waited_s, needs_gpu=needs_gpu)
        return found.id if found is not None else None

    assert of(busy + idle, "z") == "y2"
    assert of(busy, "z", TURN_S / 2) is None
    assert of(busy, "z", TURN_S) == "y0"
    assert of(busy, "x", TURN_S) is None, "it has one"
    assert of([*busy, *idle, tenure("g", "a", key="g", gpus=1)], "z", needs_gpu=True) == "g"
    assert of([], "z", TURN_S) is None


def test_value_per_byte_is_the_wait_that_a_second_costs_for_each_byte() -> None:
    one = GpuDevice(uuid="GPU-1", kind="H100", memory_bytes=10)
    other = GpuDevice(uuid="GPU-2", kind="H100", memory_bytes=30)
    assert value_per_byte([one, other], calls=40, lived_s=20.0, start_s=60.0) == 3.0
    assert value_per_byte([one], calls=0, lived_s=20.0, start_s=60.0) == 0.0
    for unknown in (
        value_per_byte([], calls=1, lived_s=1.0, start_s=1.0),
        value_per_byte([one], calls=1, lived_s=0.0, start_s=1.0),
        value_per_byte([one], calls=1, lived_s=1.0, start_s=None),
    ):
        assert unknown == 0.0

"""Who gives its place: batch, then who is over its share, then standard, then realtime."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from activator.balancing.global_queue import SheddingIndex, level
from activator.fairness.queue_priority import QueuePriority
from pilotlight.spec.identifiers import Priority

BATCH, STANDARD, REALTIME = Priority.BATCH, Priority.STANDARD, Priority.REALTIME


class Held:
    """A call that waits."""

    def __init__(self, tenant: str, priority: Priority = STANDARD, weight: int = 1) -> None:
        self.rank = QueuePriority(priority=priority, tenant=tenant, weight=weight)

    def __repr__(self) -> str:
        return f"<{self.rank.priority} of {self.rank.tenant}>"


def crowd_of(*held: Held) -> SheddingIndex:
    crowd = SheddingIndex()
    for one in held:
        crowd.add(one)
    return crowd


def test_the_order_is_batch_over_share_standard_realtime() -> None:
    ranks = [
        level(BATCH, is_over=True),
        level(BATCH, is_over=False),
        level(STANDARD, is_over=True),
        level(REALTIME, is_over=True),
        level(STANDARD, is_over=False),
        level(REALTIME, is_over=False),
    ]
    assert ranks == sorted(set(ranks))


def test_a_full_house_gives_places_in_that_order() -> None:
    """Tenant `flood` has four of seven places, where its share is less than two; realtime calls of
    newcomers come in one by one."""
    crowd = crowd_of(
        *(Held("flood", REALTIME), Held("flood"), Held("flood"), Held("flood", BATCH)),
        *(Held("a"), Held("a", REALTIME), Held("b", BATCH)),
    )
    gone: list[Held] = []
    for n in range(5):
        newcomer = Held(f"new {n}", REALTIME)
        victim = crowd.victim(newcomer.rank, limit=7)
        assert isinstance(victim, Held)
        gone.append(victim)
        crowd.remove(victim)
        crowd.add(newcomer)

    told = [(held.rank.tenant, held.rank.priority) for held in gone]
    assert told == [
        ("flood", BATCH),
        ("b", BATCH),
        ("flood", STANDARD),
        ("flood", STANDARD),
        ("a", STANDARD),
    ]
    assert crowd.victim(Held("late", REALTIME).rank, limit=7) is None, (
        "all that are left are realtime, and nobody is over its share"
    )


def test_among_tenants_within_their_shares_standard_goes_before_realtime() -> None:
    crowd = crowd_of(Held("a"), Held("b", REALTIME), Held("c"))
    victim = crowd.victim(Held("new", REALTIME).rank, limit=3)
    assert victim is not None
    assert victim.rank.priority is STANDARD
    assert crowd.victim(Held("new").rank, limit=3) is None


def test_the_newest_of_a_line_goes() -> None:
    old, new = Held("a", BATCH), Held("a", BATCH)
    assert crowd_of(old, new).victim(Held("b").rank, limit=2) is new


def test_the_tenant_furthest_over_its_share_gives() -> None:
    crowd = crowd_of(
        *(Held("some") for _ in range(4)),
        *(Held("most") for _ in range(6)),
        *(Held("heavy", weight=16) for _ in range(8)),
    )
    victim = crowd.victim(Held("new").rank, limit=18)
    assert victim is not None
    assert victim.rank.tenant == "most"


def test_who_is_over_its_share_itself_is_turned_away_by_those_within() -> None:
    crowd = crowd_of(
        *(Held("flood", REALTIME) for _ in range(5)), *(Held("small") for _ in range(5))
    )
    assert crowd.victim(Held("flood", REALTIME).rank, limit=10) is None
    assert crowd.victim(Held("flood").rank, limit=10) is None


def test_a_tenants_realtime_call_takes_the_place_of_its_own_standard_one() -> None:
    crowd = crowd_of(Held("a"), Held("a"))
    assert crowd.victim(Held("a", REALTIME).rank, limit=2) is not None
    assert crowd.victim(Held("a").rank, limit=2) is None


def test_a_house_without_places_has_nobody_to_send_away() -> None:
    assert SheddingIndex().victim(Held("a", REALTIME).rank, limit=0) is None


def test_who_left_is_not_here_any_more() -> None:
    one, two = Held("a", weight=3), Held("a", weight=4)
    crowd = crowd_of(one, two)
    assert (crowd.of_tenant("a"), repr(crowd)) == (2, "<SheddingIndex 2 of 1 tenants>")
    assert (crowd.remove(one), crowd.remove(one), crowd.remove(two)) == (True, False, True)
    assert (len(crowd), repr(crowd)) == (0, "<SheddingIndex 0 of 0 tenants>")


_calls = st.builds(Held, st.sampled_from("abcd"), st.sampled_from(list(Priority)))


@given(st.lists(_calls, min_size=1, max_size=30), _calls)
def test_who_gives_its_place_always_ranks_below_who_gets_it(
    held: list[Held], arriving: Held
) -> None:
    crowd, limit = crowd_of(*held), len(held)
    victim = crowd.victim(arriving.rank, limit)
    tenants = {h.rank.tenant for h in held} | {arriving.rank.tenant}
    share = max(1.0, limit / len(tenants))

    def level_of(call: Held) -> int:
        places = crowd.of_tenant(call.rank.tenant) + (call.rank.tenant == arriving.rank.tenant)
        return level(call.rank.priority, is_over=places > share + 1e-9)

    lowest = min(level_of(call) for call in held)
    if victim is None:
        assert lowest >= level_of(arriving)
    else:
        assert isinstance(victim, Held)
        assert level_of(victim) == lowest < level_of(arriving)


@given(st.lists(_calls, min_size=4, max_size=40))
def test_a_tenant_within_its_share_never_loses_a_standard_place_to_one_over_it(
    calls: list[Held],
) -> None:
    """All arrive at a house of twelve: whoever is shed was over its share, or below the priority of
    who came."""
    crowd, limit = SheddingIndex(), 12
    for call in calls:
        if len(crowd) < limit:
            crowd.add(call)
            continue
        victim = crowd.victim(call.rank, limit)
        if victim is None:
            continue
        tenants = {tenant for tenant in "abcd" if crowd.of_tenant(tenant)} | {call.rank.tenant}
        is_over = (
            crowd.of_tenant(victim.rank.tenant) + (victim.rank.tenant == call.rank.tenant)
            > limit / len(tenants) - 1e-9
        )
        assert is_over or victim.rank.priority.rank > call.rank.priority.rank
        crowd.remove(victim)
        crowd.add(call)
        assert len(crowd) == limit


def test_a_crowd_is_counted_by_tenant_and_priority() -> None:
    crowd = crowd_of(
        Held("a", Priority.BATCH), Held("a", Priority.BATCH), Held("b", Priority.REALTIME)
    )

    assert crowd.counts() == {("a", "batch"): 2, ("b", "realtime"): 1}

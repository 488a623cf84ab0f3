"""The order of those who wait: priorities, turns by weight, first in first out; nobody is lost."""

from __future__ import annotations

import pickle
from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from activator.fairness.fair_queue import Entry, FairQueue
from activator.fairness.queue_priority import DEFAULT_RANK, QueuePriority
from pilotlight.spec.identifiers import Priority


def rank_of(tenant: str, weight: int = 1, priority: Priority = Priority.STANDARD) -> QueuePriority:
    return QueuePriority(priority=priority, tenant=tenant, weight=weight)


def drained(queue: FairQueue[str], count: int | None = None) -> list[str]:
    """The next ones, all by default."""
    return [
        item
        for _ in range(len(queue) if count is None else count)
        if (item := queue.pop()) is not None
    ]


def test_a_queue_of_one_tenant_is_first_in_first_out() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, DEFAULT_RANK)

    assert repr(queue) == "<FairQueue 3 standard>"
    assert (queue.oldest(), queue.first()) == ("a", "a")
    assert drained(queue) == ["a", "b", "c"]
    assert (queue.pop(), queue.oldest(), queue.first(), repr(queue)) == (
        None,
        None,
        None,
        "<FairQueue empty>",
    )


def test_one_call_of_a_tenant_waits_for_one_turn_of_another_with_a_thousand() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(1000):
        queue.push(f"flood {n}", rank_of("flood"))
    queue.push("small", rank_of("small"))

    assert drained(queue, 2) == ["flood 0", "small"]


def test_a_higher_priority_goes_first_whoever_has_waited_longer() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (
        ("batch", Priority.BATCH),
        ("standard", Priority.STANDARD),
        ("realtime", Priority.REALTIME),
    ):
        queue.push(name, rank_of("t", priority=priority))

    assert queue.oldest() == "batch"
    assert drained(queue) == ["realtime", "standard", "batch"]


def test_tenants_get_what_their_weights_say_while_all_wait() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, weight in (("one", 1), ("three", 3), ("six", 6)):
        for _ in range(100):
            queue.push(tenant, rank_of(tenant, weight))

    assert Counter(drained(queue, 100)) == {"one": 10, "three": 30, "six": 60}


def test_what_costs_more_comes_less_often() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(40):
        queue.push("large", rank_of("large"), cost=4.0)
        queue.push("small", rank_of("small"), cost=1.0)

    assert Counter(drained(queue, 50)) == {"large": 10, "small": 40}


def test_a_tenant_that_had_nothing_to_ask_for_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", rank_of("a", 100))
    assert queue.pop() == "a"
    for _ in range(3):
        queue.push("a", rank_of("a"))
        queue.push("b", rank_of("b"))

    assert drained(queue) == ["a", "b"] * 3


def test_who_comes_with_little_goes_before_those_who_wait_already() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("flood", rank_of("flood", 16), cost=1.0)
    assert drained(queue, 20) == ["flood"] * 20
    for _ in range(2):
        queue.push("large", rank_of("new"), cost=8.0)
    assert drained(queue, 4) == ["large", "flood", "flood", "flood"], (
        "the second one waits for its turn"
    )


def test_who_comes_again_and_again_has_no_more_than_its_share() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant in ("a", "b", "c"):
        for _ in range(200):
            queue.push(tenant, rank_of(tenant))
    drained(queue, 3)
    served: Counter[str] = Counter()
    last = "sly"
    for _ in range(300):
        if last == "sly":
            queue.push("sly", rank_of("sly"))
        (last,) = drained(queue, 1)
        served[last] += 1
    assert served["sly"] <= 2 * min(served[tenant] for tenant in "abc")


def test_a_queue_keeps_nothing_of_tenants_who_went() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(100):
        queue.push("x", rank_of(f"t-{n}"))
    drained(queue, 99)
    queue.push("y", rank_of("t-99"))
    assert drained(queue) == ["x", "y"]
    fresh: FairQueue[str] = FairQueue()
    for one in (queue, fresh):
        one.push("z", rank_of("t-1"))
    assert len(pickle.dumps(queue)) == len(pickle.dumps(fresh))


def test_who_cannot_be_served_now_is_passed_over_and_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("large", rank_of("a"))
    queue.push("behind it", rank_of("a"))
    queue.push("small", rank_of("b"))

    assert queue.pop(lambda item: item == "small") == "small"
    assert queue.pop(lambda item: item == "behind it") is None, "within a tenant nobody overtakes"
    assert drained(queue) == ["large", "behind it"]


def test_a_place_that_was_given_up_is_not_handed_out() -> None:
    queue: FairQueue[str] = FairQueue()
    place = queue.push("a", DEFAULT_RANK)
    queue.push("b", DEFAULT_RANK)

    assert (queue.remove(place), queue.remove(place)) == (True, False)
    assert drained(queue) == ["b"]
    assert queue.remove(place) is False


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=2), st.integers(1, 8)
)
def test_over_whole_rounds_every_share_is_the_weights(weights: dict[str, int], rounds: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, weight in weights.items():
        for _ in range(weight * rounds):
            queue.push(tenant, rank_of(tenant, weight))

    served: Counter[str] = Counter()
    for _ in range(rounds):
        served.update(drained(queue, sum(weights.values())))
        done = served[next(iter(weights))] // weights[next(iter(weights))]
        assert served == {tenant: weight * done for tenant, weight in weights.items()}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.1, 10)), min_size=2, max_size=200))
def test_costs_served_differ_by_less_than_two_of_the_largest_while_both_wait(
    items: list[tuple[str, float]],
) -> None:
    """The fairness bound of the paper (Lemma 2, for equal weights): |served a - served b| stays
    below 3 times the largest cost."""
    queue: FairQueue[tuple[str, float]] = FairQueue()
    left = Counter(tenant for tenant, _ in items)
    for tenant, cost in items:
        queue.push((tenant, cost), rank_of(tenant), cost=cost)

    largest, served = max(cost for _, cost in items), {"a": 0.0, "b": 0.0}
    while left["a"] and left["b"]:
        item = queue.pop()
        assert item is not None
        served[item[0]] += item[1]
        left[item[0]] -= 1
        assert abs(served["a"] - served["b"]) < 3 * largest + 1e-6


class Model(RuleBasedStateMachine):
    """Against plain lists: whoever came in goes out once, in its tenant's order, and no priority
    overtakes a higher one."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.lines: dict[tuple[int, str], deque[int]] = {}
        self.places: dict[int, tuple[Entry[int], tuple[int, str]]] = {}
        self.count = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(list(Priority)),
        weight=st.integers(1, 5),
        cost=st.sampled_from([0.5, 1, 7]),
    )
    def push(self, tenant: str, priority: Priority, weight: int, cost: float) -> None:
        self.count += 1
        line = priority.rank, tenant
        self.places[self.count] = (
            self.queue.push(self.count, rank_of(tenant, weight, priority), cost=cost),
            line,
        )
        self.lines.setdefault(line, deque()).append(self.count)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.places)))
        place, line = self.places.pop(item)
        self.lines[line].remove(item)
        assert self.queue.remove(place)
        assert not self.queue.remove(place)

    @rule(blocked=st.sets(st.sampled_from("abc"), max_size=2))
    def pop(self, blocked: set[str]) -> None:
        item = self.queue.pop(lambda candidate: self.places[candidate][1][1] not in blocked)
        open_lines = sorted(
            (rank, tenant)
            for (rank, tenant), line in self.lines.items()
            if line and tenant not in blocked
        )
        if item is None:
            assert not open_lines
            return
        _, line = self.places.pop(item)
        assert line[0] == open_lines[0][0], "a lower priority overtook a higher one"
        assert self.lines[line].popleft() == item, "not first in, first out within a tenant"

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.places) == sum(map(len, self.lines.values()))
        assert sorted(self.queue) == sorted(self.places)
        assert self.queue.oldest() == min(self.places, default=None)


TestModel = Model.TestCase

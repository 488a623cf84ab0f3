"""Any order of claims, arrivals, leases and releases keeps the budget, and never takes what
somebody holds or awaits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tests.hypothesis_profiles import examples
from weight_cache.errors import StoreFull
from weight_cache.store.catalog import Catalog, EvictionPlan, Files
from weight_cache.types import Lease

SIZES = {f"f{i}": 10 + i for i in range(8)}
BUDGET = 60


def hold(manifest: str, *, at: float) -> Lease:
    return Lease(id=f"l-{manifest}", manifest=manifest, holder="slot", acquired_at=at)


def bring(catalogue: Catalog, name: str, files: Files, *, now: float) -> EvictionPlan:
    removal = catalogue.claim(name, files)
    for digest, size in files.items():
        catalogue.file_arrived(digest, size)
    catalogue.model_arrived(name, now=now)
    return removal


def test_least_recently_used_goes_first_and_its_shared_file_stays() -> None:
    catalogue = Catalog(30)
    bring(catalogue, "old", {"a": 10, "shared": 5}, now=1)
    bring(catalogue, "young", {"b": 10, "shared": 5}, now=2)
    removal = bring(catalogue, "new", {"c": 10}, now=3)
    assert removal == EvictionPlan(models=("old",), files=("a",), size_bytes=10)
    assert [m.manifest for m in catalogue.models()] == ["young", "new"]


def test_last_use_is_the_release_not_the_lease() -> None:
    catalogue = Catalog(20)
    bring(catalogue, "first", {"a": 10}, now=1)
    bring(catalogue, "second", {"b": 10}, now=2)
    catalogue.lease(hold("first", at=3), now=3)
    catalogue.release("l-first", now=9)
    assert bring(catalogue, "third", {"c": 10}, now=10).models == ("second",)


def test_full_of_leases_says_so_and_changes_nothing() -> None:
    catalogue = Catalog(20)
    bring(catalogue, "held", {"a": 15}, now=1)
    catalogue.lease(hold("held", at=1), now=1)
    with pytest.raises(StoreFull, match="15 of 20 bytes are used and only 0 can be evicted"):
        catalogue.claim("new", {"b": 10})
    assert repr(catalogue) == "<Catalog 15/20 bytes models=1 arriving=0 leases=1>"


def test_files_of_nobody_go_before_any_model() -> None:
    catalogue = Catalog(25)
    catalogue.file_arrived("leftover", 10)
    bring(catalogue, "kept", {"a": 10}, now=1)
    assert catalogue.claim("new", {"b": 10}) == EvictionPlan(files=("leftover",), size_bytes=10)


def test_models_go_when_the_disk_is_short_of_inodes() -> None:
    free = 0
    catalogue = Catalog(1000, shortage=lambda _, files: (0, max(0, files - free)))
    free = 100
    bring(catalogue, "old", {"a": 10, "b": 10}, now=1)
    bring(catalogue, "young", {"c": 10}, now=2)
    catalogue.partial_left("half", 5)
    free = 0
    assert catalogue.claim("new", {"d": 10, "e": 10}) == EvictionPlan(
        models=("old",), files=("a", "b"), partials=("half",), size_bytes=25
    )
    with pytest.raises(
        StoreFull,
        match=r"0 more bytes and 6 more inodes must be free on the disk .* only \d+ bytes in \d files",
    ):
        catalogue.claim("many", {f"m{n}": 1 for n in range(4)})
    assert catalogue.is_here("young"), "nothing went"


def test_directories_count_as_inodes_and_go_with_their_model() -> None:
    free = 10_000
    catalogue = Catalog(1000, shortage=lambda _, files: (0, max(0, files - free)))
    bring(catalogue, "plain", {"a": 10}, now=1)
    catalogue.lease(hold("plain", at=1), now=1)
    with pytest.raises(StoreFull, match="1 more inodes must be free on the disk"):
        catalogue.claim("deep", {"empty": 0}, folders=10_000)
    catalogue.claim("deep", {"empty": 0}, folders=9_999)
    catalogue.file_arrived("empty", 0)
    catalogue.model_arrived("deep", now=2)
    free = 0
    assert catalogue.claim("new", {"empty": 0, "b": 10}) == EvictionPlan(
        models=("deep",), folders=9_999
    ), "though it frees no bytes"
    with pytest.raises(StoreFull, match="51 more inodes"):
        catalogue.claim("linked", {"a": 10}, folders=50)


def test_a_model_of_many_directories_and_few_bytes_goes_first_where_inodes_are_short() -> None:
    free = 1000
    catalogue = Catalog(1000, shortage=lambda _, files: (0, max(0, files - free)))
    bring(catalogue, "plain", {"a": 10}, now=1)
    catalogue.claim("deep", {"empty": 0}, folders=900)
    catalogue.file_arrived("empty", 0)
    catalogue.model_arrived("deep", now=2)
    free = 0
    assert catalogue.claim("new", {"b": 10}).models == ("deep",)


def test_lease_on_a_condemned_model_holds_again_when_it_is_back() -> None:
    catalogue = Catalog(100)
    bring(catalogue, "m", {"a": 10, "b": 10}, now=1)
    bring(catalogue, "n", {"b": 10}, now=1)
    catalogue.lease(hold("m", at=1), now=1)
    assert catalogue.quarantine({"b"}) == ("m", "n")
    assert not catalogue.is_here("m")
    bring(catalogue, "m", {"a": 10, "b": 10}, now=2)
    assert [m.leases for m in catalogue.models()] == [1]


def test_what_was_found_at_start_up_goes_in_the_order_of_last_use_whatever_its_size() -> None:
    catalogue = Catalog(1_500, reload_s=lambda size: 1 + size / 100)
    catalogue.adopt("small and old", {"a": 1}, last_used_at=1)
    catalogue.adopt("large and young", {"b": 1_000}, last_used_at=3)
    catalogue.adopt("middle", {"c": 100}, last_used_at=2)
    catalogue.adopt("empty", {"e": 0}, last_used_at=0)
    catalogue.rank_adopted()
    assert bring(catalogue, "new", {"d": 450}, now=4).models == ("small and old", "middle")


def test_pins_leave_half_of_the_budget_to_starts() -> None:
    catalogue = Catalog(40)
    for name, size in (("a", 12), ("b", 12), ("c", 8)):
        bring(catalogue, name, {name: size}, now=1)
    catalogue.pin("a")
    with pytest.raises(StoreFull, match="24 bytes would be pinned, but at most 20"):
        catalogue.pin("b")
    catalogue.pin("a")
    catalogue.pin("c")
    assert (catalogue.pins(), catalogue.pinned_bytes) == ({"a", "c"}, 20)


def test_pinned_model_is_no_victim() -> None:
    catalogue = Catalog(30)
    bring(catalogue, "pinned", {"a": 10}, now=1)
    bring(catalogue, "other", {"b": 10}, now=2)
    catalogue.pin("pinned")
    assert bring(catalogue, "new", {"c": 15}, now=3).models == ("other",)
    assert [(m.manifest, m.is_pinned) for m in catalogue.models()] == [
        ("pinned", True),
        ("new", False),
    ]
    assert catalogue.pinned_bytes == 10
    assert catalogue.unpin("pinned")
    assert not catalogue.unpin("pinned")


def test_half_files_count_with_what_is_there_and_claimed_ones_in_full() -> None:
    catalogue = Catalog(100)
    catalogue.partial_left("a", 30)
    assert (catalogue.used_bytes, catalogue.partial_bytes) == (30, 30)
    catalogue.claim("m", {"a": 90})
    assert catalogue.used_bytes == 90
    assert catalogue.missing("m") == 60
    with pytest.raises(StoreFull, match="only 0 can be evicted"):
        catalogue.claim("n", {"b": 20})
    catalogue.abandon("m")
    assert catalogue.claim("n", {"b": 80}) == EvictionPlan(partials=("a",), size_bytes=30)
    assert catalogue.missing("m") == 90


def test_files_of_the_most_recent_models_are_remembered() -> None:
    catalogue = Catalog(10_000)
    for i in range(300):
        catalogue.know(f"m{i}", {f"f{i}": 1})
    assert (catalogue.missing("m0"), catalogue.missing("m299")) == (None, 1)


class AnyOrder(RuleBasedStateMachine):
    """A model of the disk beside the catalogue: what it says must go is taken away, and must not be
    missed."""

    arriving: Bundle[str] = Bundle("arriving")

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalog(BUDGET)
        self.disk: set[str] = set()
        self.claims: dict[str, Files] = {}
        self.models: dict[str, Files] = {}
        self.held: set[str] = set()
        self.pinned: set[str] = set()
        self.half: dict[str, int] = {}
        self.now = 0.0

    @rule(
        name=st.sampled_from("ABCDE"),
        files=st.sets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4),
    )
    def claim(self, name: str, files: set[str]) -> None:
        if name in self.claims or name in self.models:
            return
        sized = {f: SIZES[f] for f in files}
        try:
            removal = self.catalogue.claim(name, sized)
        except StoreFull:
            return
        assert not set(removal.models) & (self.held | self.pinned)
        assert not set(removal.partials) & {
            f for claim in [*self.claims.values(), sized] for f in claim
        }
        self.remove(removal)
        self.claims[name] = sized

    def remove(self, removal: EvictionPlan) -> None:
        """As the store does: names go at once."""
        assert set(removal.models) <= set(self.models)
        assert removal.size_bytes == sum(SIZES[f] for f in removal.files) + sum(
            self.half[f] for f in removal.partials
        )
        for gone in removal.partials:
            del self.half[gone]
        for gone in removal.models:
            del self.models[gone]
        assert set(removal.files) <= self.disk
        self.disk -= set(removal.files)

    @rule(data=st.data())
    def file_arrives(self, data: st.DataObject) -> None:
        missing = sorted({f for files in self.claims.values() for f in files} - self.disk)
        if missing:
            digest = data.draw(st.sampled_from(missing))
            self.disk.add(digest)
            self.half.pop(digest, None)
            self.catalogue.file_arrived(digest, SIZES[digest])

    @rule(data=st.data())
    def fetch_fails_half_way(self, data: st.DataObject) -> None:
        missing = sorted({f for files in self.claims.values() for f in files} - self.disk)
        if missing:
            digest = data.draw(st.sampled_from(missing))
            self.half[digest] = SIZES[digest] // 2
            self.catalogue.partial_left(digest, self.half[digest])

    @rule(name=st.sampled_from("ABCDE"))
    def pin_or_unpin(self, name: str) -> None:
        if name in self.pinned:
            assert self.catalogue.unpin(name)
            self.pinned.discard(name)
        elif name in self.models:
            present = [self.models[n] for n in {*self.pinned, name} & self.models.keys()]
            wanted = sum(SIZES[f] for f in {f for files in present for f in files})
            if wanted > BUDGET // 2:
                with pytest.raises(StoreFull, match=f"{wanted} bytes would be pinned"):
                    self.catalogue.pin(name)
                return
            self.catalogue.pin(name)
            self.pinned.add(name)

    @rule(name=st.sampled_from("ABCDE"))
    def drop(self, name: str) -> None:
        removal = self.catalogue.drop(name)
        if removal is not None:
            assert name not in self.held | self.pinned | set(self.claims)
            self.remove(removal)

    @rule(digest=st.sampled_from(sorted(SIZES)))
    def quarantine(self, digest: str) -> None:
        """A file that is corrupt: its models are gone; leases wait for them (which this model of
        the store does not follow)."""
        if digest in self.disk and not any(digest in self.models[name] for name in self.held):
            for name in self.catalogue.quarantine({digest}):
                del self.models[name]
            self.disk.discard(digest)

    @rule()
    def complete_models_arrive(self) -> None:
        for name in [n for n, files in self.claims.items() if files.keys() <= self.disk]:
            self.now += 1
            self.models[name] = self.claims.pop(name)
            self.catalogue.model_arrived(name, now=self.now)

    @rule(name=st.sampled_from("ABCDE"))
    def abandon(self, name: str) -> None:
        if self.claims.pop(name, None) is not None:
            self.catalogue.abandon(name)

    @rule(name=st.sampled_from("ABCDE"))
    def lease(self, name: str) -> None:
        if name in self.models:
            self.now += 1
            self.held.add(name)
            self.catalogue.lease(hold(name, at=self.now), now=self.now)

    @rule(name=st.sampled_from("ABCDE"))
    def release(self, name: str) -> None:
        self.now += 1
        assert (self.catalogue.release(f"l-{name}", now=self.now) is not None) == (
            name in self.held
        )
        self.held.discard(name)

    @invariant()
    def budget_holds(self) -> None:
        assert (
            sum(SIZES[f] for f in self.disk) + sum(self.half.values())
            <= self.catalogue.used_bytes
            <= BUDGET
        )
        assert self.catalogue.partial_bytes == sum(self.half.values())

    @invariant()
    def files_of_every_model_are_on_the_disk(self) -> None:
        assert {m.manifest for m in self.catalogue.models()} == set(self.models)
        assert all(files.keys() <= self.disk for files in self.models.values())
        assert self.held <= set(self.models)


AnyOrder.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestAnyOrder = AnyOrder.TestCase


def test_of_models_that_are_not_here_few_files_are_remembered() -> None:
    catalogue = Catalog(10)
    for name in ("old", "young"):
        catalogue.know(name, {f"{name} {n}": 1 for n in range(150_000)})
    assert catalogue.missing("old") is None
    assert catalogue.missing("young") == 150_000

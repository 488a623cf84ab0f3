"""Memory that is there before it is needed, and gone before a dump."""

from __future__ import annotations

import gc
import itertools
import os
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.hypothesis_profiles import examples
from weight_cache.errors import PoolFull
from weight_cache.tensors.pool import (
    ALIGNMENT_BYTES,
    HUGE_BYTES,
    Pool,
    available_bytes,
    pools_in_use,
    release_pools,
)

MEBIBYTE = 1024**2


class Registry:
    """A driver that registers memory, or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}

    def register(self, address: int, length_bytes: int) -> bool:
        if not self.refuses:
            self.held[address] = length_bytes
        return not self.refuses

    def unregister(self, address: int) -> None:
        del self.held[address]


def is_mapped() -> bool:
    with open("/proc/self/maps") as maps:
        return "pilotlight-pool" in maps.read()


def resident_bytes() -> int:
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        return sum(
            int(next(row for row in lines if row.startswith("Rss:")).split()[1]) * 1024
            for line in lines
            if "pilotlight-pool" in line
        )


def test_every_page_is_in_place_before_anything_is_taken() -> None:
    with Pool(4 * MEBIBYTE) as pool:
        assert pool.size_bytes == 4 * MEBIBYTE
        assert resident_bytes() >= 4 * MEBIBYTE
    assert not is_mapped()


def test_sizes_are_whole_huge_pages() -> None:
    with Pool(1) as pool:
        assert pool.size_bytes == HUGE_BYTES
        assert repr(pool) == f"<Pool 0 of {HUGE_BYTES} bytes taken, {pool.pages}>"


def test_what_is_taken_is_apart_and_aligned_and_comes_back_when_its_tensor_dies() -> None:
    with Pool(4 * MEBIBYTE) as pool:
        one, two = pool.take(1000), pool.take(2 * MEBIBYTE)
        one.fill_(1)
        two.fill_(2)
        assert (int(one.min()), int(one.max())) == (1, 1)
        assert [t.data_ptr() % ALIGNMENT_BYTES for t in (one, two)] == [0, 0]
        assert pool.used_bytes == 1000 + 2 * MEBIBYTE
        part = two[100:200].view(torch.int32)
        del two, one
        assert pool.used_bytes == 2 * MEBIBYTE  # `part` is on it
        first = pool.take(10)
        del part
        assert pool.used_bytes == 10
        rest = pool.take(4 * MEBIBYTE - ALIGNMENT_BYTES)
        assert rest.data_ptr() == first.data_ptr() + ALIGNMENT_BYTES
        del first, rest


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with Pool(2 * MEBIBYTE) as pool:
        kept = pool.take(MEBIBYTE)
        with pytest.raises(
            PoolFull,
            match=f"{2 * MEBIBYTE} bytes do not fit into a pool of {2 * MEBIBYTE} bytes, "
            f"of which {MEBIBYTE} are taken",
        ):
            pool.take(2 * MEBIBYTE)
        del kept
        assert pool.take(2 * MEBIBYTE).numel() == 2 * MEBIBYTE


def test_a_pool_larger_than_the_memory_is_refused_with_both_numbers() -> None:
    available = available_bytes()
    assert available is not None
    with pytest.raises(
        PoolFull, match=rf"a pool of {1 << 46} bytes: this machine has \d+ available"
    ):
        Pool(1 << 46)


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_no_size(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool(size)
    with Pool(1) as pool, pytest.raises(ValueError, match="at least 1"):
        pool.take(size)


def test_a_closed_pool_lives_until_its_last_tensor_dies() -> None:
    pool = Pool(MEBIBYTE)
    tensor = pool.take(100).fill_(7)
    pool.close()
    assert tensor.sum() == 700
    assert is_mapped()
    with pytest.raises(ValueError, match="closed"):
        pool.take(1)
    del tensor
    assert not is_mapped()
    assert repr(pool).endswith("closed>")


def test_it_is_called_pinned_only_when_the_driver_took_it() -> None:
    driver, refusing = Registry(), Registry(refuses=True)
    with (
        Pool(MEBIBYTE, pin=driver) as pool,
        Pool(MEBIBYTE, pin=refusing) as other,
        Pool(MEBIBYTE) as third,
    ):
        assert (pool.is_pinned, other.is_pinned, third.is_pinned) == (True, False, False)
        assert list(driver.held.values()) == [pool.size_bytes]
        assert "pinned" in repr(pool)
        kept = pool.take(10)
    assert driver.held  # a tensor is on it
    del kept
    assert not driver.held


def test_memory_of_a_pool_that_nobody_closed_is_unregistered_too() -> None:
    driver = Registry()
    pool = Pool(MEBIBYTE, pin=driver)
    assert driver.held
    del pool
    gc.collect()
    assert not driver.held
    assert not is_mapped()


def test_before_a_dump_idle_pools_are_unmapped_and_map_themselves_again() -> None:
    driver = Registry()
    with Pool(MEBIBYTE, pin=driver) as idle, Pool(MEBIBYTE) as busy:
        kept = busy.take(10).fill_(3)
        assert pools_in_use() == [busy]
        assert release_pools() == [busy]
        assert (idle.is_mapped, busy.is_mapped, idle.is_pinned) == (False, True, False)
        assert not driver.held
        assert idle.take(100).numel() == 100
        assert (idle.is_mapped, idle.is_pinned) == (True, True)
        del kept
        assert release_pools() == []
        assert not is_mapped()
        assert pools_in_use() == []


def test_a_fork_lets_go_of_its_own_only() -> None:
    with Pool(MEBIBYTE) as pool:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if not release_pools() and not is_mapped() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert pool.is_mapped


def test_threads_take_what_does_not_overlap() -> None:
    taken: list[torch.Tensor] = []

    def take(pool: Pool) -> None:
        for _ in range(50):
            taken.append(pool.take(5000))
            pool.take(3000)  # and gives it back

    with Pool(4 * MEBIBYTE) as pool:
        threads = [threading.Thread(target=take, args=(pool,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        places = sorted(tensor.data_ptr() for tensor in taken)
        assert all(b - a >= 5000 for a, b in itertools.pairwise(places))
        taken.clear()
        assert pool.used_bytes == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of taking, giving back and letting go: what is taken keeps its bytes, and no room
    is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(2 * MEBIBYTE)
        self.held: list[tuple[torch.Tensor, int]] = []
        self.count = 0

    @rule(length_bytes=st.one_of(st.integers(1, 20_000), st.integers(500_000, 2_200_000)))
    def take(self, length_bytes: int) -> None:
        try:
            tensor = self.pool.take(length_bytes)
        except PoolFull:
            assert self.held or length_bytes > self.pool.size_bytes
            return
        assert tensor.numel() == length_bytes
        self.count = (self.count + 1) % 251
        tensor.fill_(self.count)
        self.held.append((tensor, self.count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule()
    def let_go(self) -> None:
        assert self.pool.let_go() == (not self.held)

    @invariant()
    def nobody_wrote_over_anybody(self) -> None:
        assert self.pool.used_bytes == sum(tensor.numel() for tensor, _ in self.held)
        assert all(int(tensor.min()) == int(tensor.max()) == value for tensor, value in self.held)

    def teardown(self) -> None:
        self.held.clear()
        assert self.pool.take(self.pool.size_bytes).numel() == self.pool.size_bytes
        self.pool.close()
        assert not self.pool.is_mapped


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(25), stateful_step_count=20, deadline=None
)

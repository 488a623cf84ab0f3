"""No order of opening, arriving, failing, ending and closing leaves a lease that nobody holds, or
loses one that somebody does."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.holdings import FakeHoldings
from tests.fakes.trees import remove_tree
from tests.hypothesis_profiles import examples
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.errors import OriginUnavailable
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.manager import LeaseManager
from weight_cache.types import Lease

MODELS, HOLDERS = ("a", "b"), ("s-1", "s-2")
STEPS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(MODELS), st.sampled_from(HOLDERS)),
    st.tuples(st.just("close"), st.sampled_from(MODELS), st.sampled_from(HOLDERS)),
    st.tuples(
        st.sampled_from(["arrive", "break", "mend", "corrupt"]),
        st.sampled_from(MODELS),
        st.just(""),
    ),
    st.tuples(st.just("turn"), st.just(""), st.just("")),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_any_order(steps: list[tuple[str, str, str]]) -> None:
    root = Path(tempfile.mkdtemp(prefix="pl"))
    try:
        asyncio.run(walk(root, steps))
    finally:
        remove_tree(root)


async def walk(root: Path, steps: list[tuple[str, str, str]]) -> None:
    store, speeds = FakeHoldings(root), TierBandwidths(origin="o")
    ahead = ReadAhead(max_bytes=10**6, observe=speeds.observe)
    leases = LeaseManager(store, bandwidths=speeds, ahead=ahead)
    wanted: set[str] = set()
    for step, model, holder in steps:
        lease_id = Lease.id_of(model, holder)
        if step == "open":
            opened = await leases.open(model, holder=holder)
            assert opened.lease_id == lease_id
            assert not opened.ready or lease_id in store.held
            wanted.add(lease_id)
        elif step == "close":
            await leases.close(lease_id)
            assert lease_id not in store.held
            wanted.discard(lease_id)
        elif step == "turn":
            await turns()
        else:
            happen(store, step, model)
        assert set(store.held) <= wanted
    for model in MODELS:
        happen(store, "mend", model)
        happen(store, "arrive", model)
    await turns()
    for model in MODELS:
        for holder in HOLDERS:
            if Lease.id_of(model, holder) in wanted:
                opened = await leases.open(model, holder=holder)
                assert (await leases.wait(opened.lease_id)).path == store.path(model)
    assert set(store.held) == wanted
    for lease_id in wanted:
        assert await leases.close(lease_id)
    assert (store.held, ahead.held_bytes, repr(leases)) == (
        {},
        0,
        "<LeaseManager 0 open, 0 of them arriving>",
    )
    await leases.aclose()
    await ahead.aclose()


def happen(store: FakeHoldings, step: str, model: str) -> None:
    if step == "arrive":
        store.coming[model].set()
    elif step == "break":
        store.broken[model] = OriginUnavailable("away")
    elif step == "mend":
        store.broken.pop(model, None)
    else:
        store.here.discard(model)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)

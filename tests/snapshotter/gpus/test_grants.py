"""Grants over the lives of starts, instances and slots, in any order: a device has one start at a
time, and is free again when nothing has it in its record."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snapshotter.errors import NoCapacity, Unsupported
from snapshotter.gpus.grants import GpuGrants
from snapshotter.types import GpuGrant, LaunchSpec, RevisionKey
from tests.fakes.fake_nvml import inventory_of, mixed_node
from tests.hypothesis_profiles import examples

LAUNCH = LaunchSpec(
    revision=RevisionKey("f-1@v1"),
    trust_domain="t",
    uid=None,
    bundle="b",
    image=None,
    entry={},
    memory_bytes=1,
    cpu=1.0,
    startup_timeout_s=1.0,
)
KINDS = ["H100", "L4", "any", "A100-MIG-1g.5gb", "A100-MIG-3g.20gb"]


@dataclass(eq=False)
class Start:
    """One start: its reservation, and what has its grant in a record."""

    grant: GpuGrant
    reservation: contextlib.ExitStack | None
    records: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.reservation is None and not self.records


class Lives(RuleBasedStateMachine):
    """Starts that come, get an instance and a slot, fail, end, and are found again."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[Start] = []
        self.inventory = inventory_of(*mixed_node())
        self.gpus = self.new_agent()

    def new_agent(self) -> GpuGrants:
        return GpuGrants(self.inventory, lambda: (s.grant for s in self.starts for _ in s.records))

    @rule(
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True),
        count=st.integers(1, 3),
    )
    def begin(self, kinds: list[str], count: int) -> None:
        launch = replace(LAUNCH, gpu=tuple(kinds), gpu_count=count)
        reservation = contextlib.ExitStack()
        try:
            grant = reservation.enter_context(self.gpus.reserved(launch))
        except (NoCapacity, Unsupported):
            return
        assert grant is not None
        self.starts.append(Start(grant, reservation))

    @precondition(lambda self: self.starts)
    @rule(data=st.data(), record=st.sampled_from(["instance", "slot"]))
    def get_a_record(self, data: st.DataObject, record: str) -> None:
        start = data.draw(st.sampled_from(self.starts))
        if start.reservation is not None:
            start.records.append(record)

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def lose_a_record(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(self.starts))
        if start.records:
            start.records.pop()

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def end_the_start(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(self.starts))
        if start.reservation is not None:
            start.reservation.close()
            start.reservation = None

    @rule()
    def restart_the_agent(self) -> None:
        """Starts in progress are gone; what has a record is found."""
        for start in self.starts:
            start.reservation = None
        self.gpus = self.new_agent()

    @invariant()
    def a_device_has_one_start(self) -> None:
        self.starts = [start for start in self.starts if not start.is_over]
        had = [uuid for start in self.starts for uuid in start.grant.uuids]
        assert len(had) == len(set(had))
        assert self.gpus.granted() == set(had)
        counts = self.gpus.count_by_kind().values()
        assert sum(used for _, used in counts) == len(had)
        assert all(used <= total for total, used in counts)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)

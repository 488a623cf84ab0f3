"""Time of granted GPUs by state, and how much of it ran calls. Pure.

From its grant on no other instance can use a GPU, so all of that time counts: starts, unpaid and
paid idle time, and sleep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.controller.analytics.rollup_queries import UsageCell
from pilotlight.spec.pricing import GPU_STATES, GpuState


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime:
    """GPU seconds by state: the time of each granted GPU."""

    seconds: Mapping[GpuState, float] = field(default_factory=dict)

    def of(self, state: str) -> float:
        """Return the GPU seconds in this state."""
        return self.seconds.get(GpuState(state), 0.0)

    @property
    def held_s(self) -> float:
        """GPU seconds from grant to release."""
        return sum(self.seconds.values())

    @property
    def paid_s(self) -> float:
        """GPU seconds of calls and of paid idle time."""
        return self.of(GpuState.BUSY) + self.of(GpuState.IDLE_PAID)

    @property
    def unused_s(self) -> float:
        """GPU seconds in which no call ran."""
        return self.held_s - self.of(GpuState.BUSY)

    @property
    def utilisation(self) -> float | None:
        """The share in which calls ran, 0 to 1; None without GPU time."""
        return self.of(GpuState.BUSY) / self.held_s if self.held_s else None

    def describe(self) -> str:
        """The shares of the states, largest first: `busy 12 %, idle, paid 80 %, starts 8 %`."""
        shares = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(
            f"{STATE_WORDS[state]} {100 * seconds / self.held_s:.0f} %"
            for state, seconds in shares
            if seconds
        )


STATE_WORDS: Mapping[GpuState, str] = {
    GpuState.BUSY: "busy",
    GpuState.START: "starting",
    GpuState.IDLE_FREE: "idle unpaid",
    GpuState.IDLE_PAID: "idle paid",
    GpuState.ASLEEP: "asleep",
}


def gpu_time(cells: Iterable[UsageCell]) -> GpuTime:
    """Return the GPU time of some cells."""
    seconds: dict[GpuState, float] = {}
    for cell in cells:
        state = GPU_STATES.get(cell.kind)
        if state is not None and cell.sums.gpu_s:
            seconds[state] = seconds.get(state, 0.0) + cell.sums.gpu_s
    return GpuTime(seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """GPU time of one owner on one kind of GPU."""

    owner: str
    gpu: str
    time: GpuTime


def by_owner_and_kind(cells: Iterable[UsageCell]) -> list[GpuRow]:
    """Return one row per function and kind of GPU, the most unused time first."""
    found: dict[tuple[str, str], list[UsageCell]] = {}
    for cell in cells:
        if cell.sums.gpu_s and cell.kind in GPU_STATES:
            found.setdefault((cell.name, cell.gpu), []).append(cell)
    rows = [GpuRow(owner=owner, gpu=gpu, time=gpu_time(own)) for (owner, gpu), own in found.items()]
    return sorted(rows, key=lambda row: (-row.time.unused_s, row.owner, row.gpu))

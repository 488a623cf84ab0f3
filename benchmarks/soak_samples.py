"""Samples of what must not grow during a soak run: memory and descriptors of the platform's
processes, files, and the time of a ledger query.

Sources: proc(5), `/proc/PID/status` (`RssAnon`: memory that nothing but the process explains) and
`/proc/PID/fd`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import stack
from benchmarks.harness import percentile
from pilotlight.errors import PilotlightError

MODULES = {
    "activator": "activator",
    "pilotlight.controller": "controller",
    "snapshotter": "agent",
    "weight_cache": "weight cache",
}
"""Process by the module that it runs (`python -m …`)."""
SHARE = 5
"""Growth is from the first to the last fifth of a stretch's samples, after what is still warming
up."""
FEWEST = 10
"""Samples of a process that say something about its growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process at one moment."""

    pid: int
    anonymous_kib: int
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The platform at one moment.

    Attributes:
        at_s: seconds since the run began.
        calls: calls answered until then.
        processes: by name; one that was just killed is absent.
        disk_bytes: allocated bytes below the home, by folder.
        ledger_ms: time of a usage report; None while the controller did not answer."""

    at_s: float
    calls: int
    processes: Mapping[str, ProcessSample]
    disk_bytes: Mapping[str, int]
    ledger_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A quantity at the beginning and at the end of a stretch (medians of a fifth of its samples
    each), `hours` apart."""

    begin: float
    end: float
    hours: float

    @property
    def per_hour(self) -> float:
        """Growth in an hour, of the quantity's unit."""
        return (self.end - self.begin) / self.hours

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Growth:
        """Of (seconds, quantity) pairs in the order of time. Raises ValueError for fewer than
        FEWEST."""
        if len(points) < FEWEST:
            raise ValueError(f"{len(points)} samples: growth needs {FEWEST} at least")
        n = len(points) // SHARE
        first, last = points[:n], points[-n:]
        return cls(
            begin=percentile([value for _, value in first], 50),
            end=percentile([value for _, value in last], 50),
            hours=(percentile([s for s, _ in last], 50) - percentile([s for s, _ in first], 50))
            / 3600,
        )


class Sampler(threading.Thread):
    """Takes a sample every `every_s` until it is stopped. Owner: itself; `samples` may be read
    once it has stopped."""

    def __init__(self, platform: stack.Stack, *, every_s: float, calls: Callable[[], int]) -> None:
        """`calls`: returns the number of calls answered so far."""
        super().__init__(name="soak-sampler", daemon=True)
        self.samples: list[Sample] = []
        self._platform, self._every_s, self._calls = platform, every_s, calls
        self._ending, self._began_s = threading.Event(), time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began_s

    def run(self) -> None:
        """Sample until stopped."""
        while not self._ending.wait(self._every_s):
            self.samples.append(self._sample())

    def stop(self) -> None:
        """End, after the sample that is being taken."""
        self._ending.set()
        self.join()

    def _sample(self) -> Sample:
        found = {}
        for name, pid in process_ids(self._platform).items():
            with contextlib.suppress(OSError):  # killed since
                found[name] = _process(pid)
        return Sample(
            at_s=self.elapsed_s,
            calls=self._calls(),
            processes=found,
            disk_bytes=_disk_bytes(self._platform.directory / "home"),
            ledger_ms=self._ledger_ms(),
        )

    def _ledger_ms(self) -> float | None:
        began = time.perf_counter()
        try:
            with self._platform.client as client:
                client.billing_report(by="function")
        except PilotlightError:  # of a controller that was killed
            return None
        return (time.perf_counter() - began) * 1000


def process_ids(platform: stack.Stack) -> dict[str, int]:
    """Pids of the platform's processes that run now, by name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(platform.config) in words and "-m" in words:
                name = MODULES.get(words[words.index("-m") + 1])
                if name is not None:
                    found[name] = int(folder.name)
    return found


def growth_of_process(samples: Sequence[Sample], name: str, quantity: str) -> Growth:
    """Growth of a quantity (a field of ProcessSample) while the process kept its pid, in the
    longest such stretch of `samples`. Raises ValueError when none is long enough."""
    stretches: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        if (process := sample.processes.get(name)) is not None:
            point = (sample.at_s, float(getattr(process, quantity)))
            stretches.setdefault(process.pid, []).append(point)
    return Growth.of(max(stretches.values(), key=len, default=[]))


def _process(pid: int) -> ProcessSample:
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    return ProcessSample(
        pid=pid,
        anonymous_kib=int(status["RssAnon"].split()[0]),
        descriptors=len(os.listdir(folder / "fd")),
    )


def _disk_bytes(home: Path) -> dict[str, int]:
    return {entry.name: _allocated_bytes(entry) for entry in sorted(home.iterdir())}


def _allocated_bytes(path: Path) -> int:
    total, folders = 0, [path]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
    return total

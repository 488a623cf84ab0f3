"""What every benchmark shares: its options, its statistics, its table and its JSON.

Percentiles are linear between the closest ranks. A ratio near 1 is taken from interleaved pairs:
the arms take turns, each round gives one ratio, and the median of these comes with a bootstrap
interval, because one server alone varied by 8 % on the machine where this was written."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import programs

ROOT = Path(__file__).parent.parent
BENCH_HOME = ROOT / ".bench"
"""Environments of peers and files that are made once; not in git."""

BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command line: `quick` keeps a run within a minute, `peers` installs and runs other
    servers."""

    quick: bool
    peers: bool
    json: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: `n` samples of something, in `unit`; `note` says what the numbers
    cannot."""

    name: str
    unit: str
    n: int
    p50: float
    p99: float
    note: str = ""

    @classmethod
    def of(cls, name: str, unit: str, samples: Sequence[float], note: str = "") -> Row:
        """Summarise `samples`. Raises ValueError when there are none."""
        return cls(
            name=name,
            unit=unit,
            n=len(samples),
            p50=percentile(samples, 50),
            p99=percentile(samples, 99),
            note=note,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(slots=True)
class Report:
    """Collects rows and ratios while a benchmark runs. Owner: the benchmark's main thread."""

    title: str
    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def ratio(self, key: str, value: float | Interval) -> None:
        """Record a ratio; an interval goes to the table only."""
        self.ratios[key] = value.value if isinstance(value, Interval) else value
        if isinstance(value, Interval):
            self.remarks.append(f"{key}: 95 % interval {value.low:.3g} to {value.high:.3g}")

    def missing(self, name: str, reason: str) -> None:
        """Say what could not be measured, and why: a missing line must not look like a good one."""
        self.remarks.append(f"{name}: not measured: {reason}")

    def to_json(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """The shape that tools read: machine, rows, ratios."""
        rows = [
            {key: value for key, value in asdict(row).items() if key != "note"} for row in self.rows
        ]
        return {"machine": dict(machine), "rows": rows, "ratios": dict(self.ratios)}

    def finish(self, options: Options) -> None:
        """Print the table and write the JSON file, if one was asked for."""
        machine = machine_facts()
        print(self.table(machine))
        if options.json is not None:
            options.json.write_text(json.dumps(self.to_json(machine), indent=2) + "\n")

    def table(self, machine: Mapping[str, Any]) -> str:
        """Everything as text."""
        cells = [("", "unit", "n", "p50", "p99", "")]
        cells += [
            (r.name, r.unit, str(r.n), _number(r.p50), _number(r.p99), r.note) for r in self.rows
        ]
        widths = [max(len(line[i]) for line in cells) for i in range(5)]
        lines = [
            f"== {self.title}",
            (
                f"   {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
                f"{machine['kernel']}, {machine['time'][:10]}"
            ),
        ]
        for name, unit, *numbers, note in cells:
            padded = "  ".join(
                number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)
            )
            lines.append(
                f"{name.ljust(widths[0])}  {unit.ljust(widths[1])}  {padded}  {note}".rstrip()
            )
        lines += [f"{key} = {value:.3g}" for key, value in self.ratios.items()]
        lines += [f"({remark})" for remark in self.remarks]
        return "\n".join(lines)


def options(
    description: str,
    argv: Sequence[str] | None = None,
    *,
    name: str = "",
    needs: Sequence[str] = (),
) -> Options:
    """Parse the command line that all benchmarks have, then check the external programs that this
    one needs.

    `name`: as `python -m` takes it; `needs`: names of `programs.INSTALLERS`, whatever the options
    are. Raises SystemExit with `programs.EXIT_STATUS`, after one line on stderr, when some are not
    installed.

    Without `argv` it is the process's own command line: SIGTERM then ends the benchmark as Ctrl-C
    does (KeyboardInterrupt), so that `timeout` leaves neither its platform nor its servers
    running."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}" if name else None, description=description
    )
    parser.add_argument(
        "--quick", action="store_true", help="at most a minute: fewer and shorter rounds"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="install other servers into environments of their own, and run them too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    given = parser.parse_args(argv)
    programs.require(name, needs)
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Options(quick=given.quick, peers=given.peers, json=given.json)


def percentile(samples: Sequence[float], q: float) -> float:
    """The `q`-th percentile, 0 to 100, linear between the closest ranks. Raises ValueError without
    samples."""
    if not samples:
        raise ValueError("no samples: there is no percentile of nothing")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def interleave(arms: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[Any]]:
    """Run every arm once per round, in alternating order, so that a drifting machine favours
    none."""
    results: dict[str, list[Any]] = {name: [] for name in arms}
    names = list(arms)
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            results[name].append(arms[name]())
            progress(f"round {i + 1}/{rounds}: {name}")
    return results


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Median of the ratios of pairs, with a 95 % bootstrap interval. Raises ValueError without
    pairs."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(1)  # the same data give the same interval
    medians = [
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_SAMPLES)
    ]
    return Interval(
        value=statistics.median(ratios),
        low=percentile(medians, 2.5),
        high=percentile(medians, 97.5),
    )


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def progress(text: str) -> None:
    """One line on stderr that the next one replaces; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Say on stderr what is going on, and how long it took."""
    progress(name)
    started = time.monotonic()
    yield
    progress("")
    print(f"[{time.monotonic() - started:6.1f} s] {name}", file=sys.stderr, flush=True)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"

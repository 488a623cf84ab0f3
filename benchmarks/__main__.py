"""Run the benchmarks one after the other, each in a process of its own; stop at the first that
fails.

The programs that any of them needs are checked before the first one starts. With --json
results.json each benchmark writes a file of its own: results-gateway.json and so on."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import Options, options

NAMES = (
    "gateway",
    "cold_start",
    "burst",
    "density",
    "weights",
    "tenancy",
    "traffic",
    "batching",
    "fleet",
    "autoscaler_sim",
)
"""In the order of their runs. Others run alone: llm needs an engine of 2.5 GB, the simulations
measure no part of the platform."""


def main(argv: Sequence[str] | None = None, *, names: Sequence[str] = NAMES) -> int:
    """Run `names`; the exit status of the first one that fails, else 0. Raises SystemExit when a
    program is missing."""
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    needs = dict.fromkeys(program for module in modules for program in getattr(module, "NEEDS", ()))
    given = options(__doc__ or "", argv, name="benchmarks", needs=tuple(needs))
    for name in names:
        status = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments(given, name)], check=False
        ).returncode
        if status != 0:
            return status
    return 0


def arguments(given: Options, name: str) -> list[str]:
    """Command line of benchmark `name` in a run of several, as `given` for all of them."""
    flags = [f"--{flag}" for flag in ("quick", "peers") if getattr(given, flag)]
    file = given.json and given.json.with_stem(f"{given.json.stem}-{name}")
    return [*flags, *(["--json", str(file)] if file else [])]


if __name__ == "__main__":
    sys.exit(main())

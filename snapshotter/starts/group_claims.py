"""Which node agents of this machine live, so that the next one removes the control groups that
killed ones left, and which no agent is going to take over.

An agent holds a lock (flock(2)) on `<claims>/<name of its base>` from before it creates the base
until it has exited, however it ends; the file says where the groups are. A base is removed only
under its lock: its agent has exited, and one that starts in the same directory waits. Agents that
cannot write the directory (they do not run as root) claim nothing and remove nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotter.linux.cgroups import base_name

CLAIMS = Path("/run/pilotlight-groups")
"""Empty after a boot of the machine, as the hierarchies are."""
_CLAIM_S = 1.0
"""Who removes groups holds a claim for milliseconds."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class GroupClaim:
    """The claim of a living agent to the base of its run directory."""

    descriptor: int
    path: Path
    run: Path

    def record(self, bases: Iterable[Path]) -> None:
        """Write where the base is: its directory in each hierarchy. Raises OSError."""
        body = {"run": str(self.run), "bases": sorted(map(str, set(bases)))}
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(body).encode(), 0)

    def release(self) -> None:
        """Give it up; also forget it if the base is gone."""
        if not any(base.is_dir() for base in _bases_of(self.descriptor, self.path.name)):
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def claim(run: Path, claims: Path = CLAIMS) -> GroupClaim | None:
    """Claim the base of an agent with this run directory, after the one that removes it now, if
    any; None where claims cannot be written, or another holds it. Blocks for `_CLAIM_S` at most."""
    path, until = claims / base_name(run), time.monotonic() + _CLAIM_S
    with contextlib.suppress(OSError):
        claims.mkdir(mode=0o700, exist_ok=True)
        while time.monotonic() < until and _is_ours(claims):
            descriptor = os.open(path, os.O_CREAT | _FLAGS, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    return GroupClaim(descriptor, path, run)
            except BlockingIOError:
                time.sleep(0.02)
            os.close(descriptor)  # it is being removed
    return None


def remove_abandoned(claims: Path = CLAIMS) -> int:
    """Remove the groups of agents that have exited, if no process is in them and no slot may be
    taken over by the next agent of their run directory. Returns how many bases. Blocks."""
    count = 0
    with contextlib.suppress(OSError):
        for path in sorted(claims.iterdir()) if _is_ours(claims) else ():
            with _unclaimed(path) as descriptor:
                if descriptor is not None:
                    count += _remove(path, descriptor)
    return count


@contextlib.contextmanager
def _unclaimed(path: Path) -> Iterator[int | None]:
    """The claim's file, locked; None while its agent lives."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor if _is_at(descriptor, path) else None
    except BlockingIOError:
        yield None
    finally:
        os.close(descriptor)


def _remove(path: Path, descriptor: int) -> bool:
    """Remove the base of a claim that is locked here. Returns whether it is gone."""
    run, bases = _run_of(descriptor), _bases_of(descriptor, path.name)
    if run is not None and any((run / "slots").glob("s-*")):
        return False
    groups = [child for base in bases if base.is_dir() for child in base.iterdir()]
    groups = [group for group in groups if group.is_dir()]
    if any(_has_processes(group) for group in [*groups, *bases]):
        return False
    for group in [*groups, *bases]:
        with contextlib.suppress(OSError):  # the kernel refuses one that a process has entered
            group.rmdir()
    if any(base.is_dir() for base in bases):
        return False
    path.unlink(missing_ok=True)
    return bool(bases)


def _is_ours(claims: Path) -> bool:
    """Whether no other user can put files there: root writes them, and believes what they say."""
    found = claims.lstat()
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_shared


def _has_processes(group: Path) -> bool:
    try:
        return bool((group / "cgroup.procs").read_text())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _body(descriptor: int) -> dict[str, object]:
    try:
        body = json.loads(os.pread(descriptor, 65_536, 0))
    except ValueError:  # it was killed before it wrote it
        return {}
    return body if isinstance(body, dict) else {}


def _run_of(descriptor: int) -> Path | None:
    run = _body(descriptor).get("run")
    return Path(run) if isinstance(run, str) else None


def _bases_of(descriptor: int, name: str) -> list[Path]:
    """Its directories that have the claim's name: nothing else is ever removed."""
    run, bases = _run_of(descriptor), _body(descriptor).get("bases")
    if run is None or base_name(run) != name or not isinstance(bases, list):
        return []
    return [Path(base) for base in bases if isinstance(base, str) and Path(base).name == name]

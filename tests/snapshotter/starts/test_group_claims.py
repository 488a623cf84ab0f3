"""Control groups of agents that were killed are removed by the next agent of the machine, and those
of living ones are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from snapshotter.linux.cgroups import Cgroups, base_name
from snapshotter.starts.group_claims import claim, remove_abandoned
from tests.snapshotter.linux.test_cpu_counter import needs_cgroups

KILLED = """
import os, signal, sys
from pathlib import Path
from snapshotter.starts.group_claims import claim
held = claim(Path(sys.argv[1]), Path(sys.argv[2]))
held.record(map(Path, sys.argv[3:]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(run: Path, claims: Path, *bases: Path) -> None:
    """What an agent with this run directory does before it is killed."""
    words = [sys.executable, "-c", KILLED, *map(str, (run, claims, *bases))]
    subprocess.run(words, check=False)


def bases_of(run: Path, tmp_path: Path, *groups: str) -> list[Path]:
    """A base in two hierarchies, with groups."""
    bases = [tmp_path / "cgroup" / each / base_name(run) for each in ("memory", "pids")]
    for base in bases:
        for group in groups:
            (base / group).mkdir(parents=True)
        base.mkdir(parents=True, exist_ok=True)
    return bases


def test_what_a_killed_agent_left_is_removed(tmp_path: Path) -> None:
    run, claims = tmp_path / "run", tmp_path / "claims"
    bases = bases_of(run, tmp_path, "s-1", "i-2")
    killed(run, claims, *bases)
    assert remove_abandoned(claims) == 1
    assert not any(base.exists() for base in bases)
    assert not list(claims.iterdir())


def test_a_living_agents_base_stays_also_when_it_is_empty(tmp_path: Path) -> None:
    run, claims = tmp_path / "run", tmp_path / "claims"
    bases = bases_of(run, tmp_path)
    held = claim(run, claims)
    assert held is not None
    held.record(bases)
    assert remove_abandoned(claims) == 0
    assert claim(run, claims) is None, "it has one owner"
    assert all(base.exists() for base in bases)

    held.release()  # it could not remove its base
    assert remove_abandoned(claims) == 1


def test_an_agent_that_has_removed_its_base_leaves_no_claim(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    held = claim(tmp_path / "run", claims)
    assert held is not None
    held.record([tmp_path / base_name(tmp_path / "run")])
    held.release()
    assert not list(claims.iterdir())


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    run, real, claims = tmp_path / "run", tmp_path / "real", tmp_path / "claims"
    bases = bases_of(run, tmp_path)
    real.mkdir(mode=0o700)
    claims.symlink_to(real)
    assert claim(run, claims) is None
    assert not list(real.iterdir())
    claims.unlink()
    killed(run, claims, *bases)
    claims.chmod(0o777)
    assert claim(run, claims) is None
    assert remove_abandoned(claims) == 0
    claims.chmod(0o700)
    assert remove_abandoned(claims) == 1


def test_a_claim_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run, claims, target = tmp_path / "run", tmp_path / "claims", tmp_path / "target"
    target.write_text("theirs")
    claims.mkdir(mode=0o700)
    (claims / base_name(run)).symlink_to(target)
    assert claim(run, claims) is None
    assert target.read_text() == "theirs"


def test_slots_that_the_next_agent_of_the_home_takes_over_keep_their_groups(
    tmp_path: Path,
) -> None:
    run, claims = tmp_path / "run", tmp_path / "claims"
    (run / "slots" / "s-1").mkdir(parents=True)
    bases = bases_of(run, tmp_path, "s-1")
    killed(run, claims, *bases)
    assert remove_abandoned(claims) == 0
    (run / "slots" / "s-1").rmdir()  # its home was removed, or its next agent has ended them
    assert remove_abandoned(claims) == 1


def test_only_directories_of_the_claims_name_are_removed(tmp_path: Path) -> None:
    run, claims = tmp_path / "run", tmp_path / "claims"
    others = bases_of(tmp_path / "another", tmp_path)
    killed(run, claims, *others, tmp_path / "cgroup")
    (claims / base_name(tmp_path / "torn")).write_text("{")
    (claims / "something").write_text('{"run": "/", "bases": ["/something"]}')
    assert remove_abandoned(claims) == 0
    assert all(base.exists() for base in others)


def test_without_the_right_to_claim_nothing_is_claimed_or_removed(tmp_path: Path) -> None:
    claims = tmp_path / "file"
    claims.write_text("")
    assert claim(tmp_path / "run", claims) is None
    assert remove_abandoned(claims) == 0


@needs_cgroups
async def test_groups_with_processes_stay(tmp_path: Path, short_tmp: Path) -> None:
    claims = tmp_path / "claims"
    cgroups = Cgroups.find(short_tmp)
    group = cgroups.make("busy", memory_bytes=64 * 1024**2, cpu=1.0)
    killed(short_tmp, claims, *cgroups.bases.values())
    enter = "".join(f"open({path!r}, 'w').write('0')\n" for path in group.procs)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"{enter}print('in', flush=True)\ninput()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"in\n"
    assert remove_abandoned(claims) == 0
    assert group.members() == [process.pid]

    await process.communicate(b"\n")
    async with asyncio.timeout(20):  # the kernel needs a moment
        while not remove_abandoned(claims):
            await asyncio.sleep(0.01)
    assert not any(base.exists() for base in cgroups.bases.values())


def test_an_agent_that_starts_after_its_base_was_removed_is_left_alone(tmp_path: Path) -> None:
    run, claims = tmp_path / "run", tmp_path / "claims"
    killed(run, claims, *bases_of(run, tmp_path))
    assert remove_abandoned(claims) == 1
    held = claim(run, claims)
    assert held is not None
    held.record(bases_of(run, tmp_path))
    assert remove_abandoned(claims) == 0
    held.release()

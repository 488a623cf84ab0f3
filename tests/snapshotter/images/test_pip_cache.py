"""pip is made once for an interpreter, kept where nobody else can change it, and copied into
environments in which it works."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.images.interpreters import own_interpreter
from snapshotter.images.pip_cache import lend, pip_of

pytestmark = pytest.mark.slow  # makes a virtual environment


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a user whose cache has pip already: making it takes seconds."""
    directory = tmp_path_factory.mktemp("user")
    found = {"XDG_CACHE_HOME": str(directory / "cache"), "HOME": str(directory)}
    assert asyncio.run(pip_of(own_interpreter(), found)) is not None
    return found


def packages_with(pip: Path, env: Path) -> str:
    """What pip lists in an environment that it was copied into."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    subprocess.run(["/bin/cp", "-Rp", f"{pip}/.", str(site)], check=True)
    command = [str(env / "bin/python"), "-m", "pip", "list", "--format=freeze"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def test_it_is_made_once_and_works_in_an_environment_that_it_is_copied_into(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    kept = await pip_of(own_interpreter(), environ)
    assert kept is not None
    made = (kept / "pip" / "__init__.py").stat()
    assert await pip_of(own_interpreter(), environ) == kept
    assert os.path.samestat((kept / "pip" / "__init__.py").stat(), made)
    assert [p.name for p in kept.parent.iterdir()] == [kept.name], (
        "nothing is left of how it was made"
    )
    assert not [
        p
        for p in [kept, *kept.rglob("*")]
        if p.stat().st_mode & 0o022 or not p.stat().st_mode & 0o004
    ]

    lend(kept, tmp_path / "lent")
    assert os.path.samestat((tmp_path / "lent" / "pip" / "__init__.py").stat(), made), (
        "links, where it is one file system"
    )
    assert (await asyncio.to_thread(packages_with, tmp_path / "lent", tmp_path / "env")).startswith(
        "pip=="
    )


async def test_where_it_cannot_be_made_or_kept_there_is_none(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    false = tmp_path / "python3"
    # none is made; one without pip is
    for script in ("exit 3", 'mkdir -p "$4/lib/python3.11/site-packages"'):
        false.write_text(f"#!/bin/sh\n{script}\n")
        false.chmod(0o755)
        assert await pip_of(replace(own_interpreter(), executable=false), environ) is None
    (tmp_path / "file").write_text("")
    assert await pip_of(own_interpreter(), {"XDG_CACHE_HOME": str(tmp_path / "file")}) is None


async def test_one_that_others_may_change_is_not_used(environ: dict[str, str]) -> None:
    kept = await pip_of(own_interpreter(), environ)
    assert kept is not None
    kept.chmod(0o777)
    assert await pip_of(own_interpreter(), environ) is None
    kept.chmod(0o755)
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")
    assert await pip_of(own_interpreter(), environ) is None
    kept.unlink()
    kept.with_name("elsewhere").rename(kept)

"""What makes a build of an image small, for tests in which no pip runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from snapshotter.images.interpreters import own_interpreter
from snapshotter.images.pip_cache import pip_of


def with_empty_pip(environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """`environ`, and a cache in which pip is an empty package: to copy and to remove the thousand
    files of the real one takes longer than the rest of a build."""
    kept = asyncio.run(pip_of(own_interpreter(), environ))
    assert kept is not None
    for name in ("pip", "pip-0.dist-info"):
        (cache / "pilotlight" / kept.name / name).mkdir(parents=True)
    return {**environ, "XDG_CACHE_HOME": str(cache)}

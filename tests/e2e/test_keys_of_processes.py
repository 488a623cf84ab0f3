"""Which process has which key in its memory, its environment and its files."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.e2e.harness import PlatformUnderTest

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]


def has_in_memory(pid: int, wanted: list[bytes]) -> bool:
    """Whether any of `wanted` stands in memory that the process may write."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode = line.split()[:2]
            if not mode.startswith("rw"):
                continue
            begin, end = (int(number, 16) for number in span.split("-"))
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except (OSError, OverflowError, ValueError):
                continue
            if any(each in content for each in wanted):
                return True
    return False


def test_the_activator_never_has_the_platforms_key(platform: PlatformUnderTest) -> None:
    text = (platform.local.paths.home / "platform.key").read_bytes().strip()
    wanted = [text, base64.urlsafe_b64decode(text)]
    activator, controller = platform.pid("activator"), platform.pid("controller")

    assert has_in_memory(controller, wanted), "the search finds the key where it is"
    assert not has_in_memory(activator, wanted)
    for name in ("environ", "cmdline"):
        assert text not in Path(f"/proc/{activator}/{name}").read_bytes()
    own = [path for path in (platform.local.paths.home / "activator").rglob("*") if path.is_file()]
    assert own
    assert not any(each in path.read_bytes() for path in own for each in wanted)
    assert (platform.local.paths.home / "activator.key").read_bytes().strip() != text

"""A fake platform, reached by every handle of the process while a test runs."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pilotlight.client import sessions
from tests.fakes.fake_platform import FakePlatform

Write = Callable[[str], ModuleType]


@pytest.fixture
def platform() -> Iterator[FakePlatform]:
    """An empty platform; handles use it."""
    with FakePlatform() as fake:
        with sessions.use_profile(fake.profile()):
            yield fake
        sessions.close()


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Write]:
    """`module(source)`: write a user's module, import it under a name of its own, and forget it at
    the end."""
    names: list[str] = []

    def write(source: str) -> ModuleType:
        name = f"user_{uuid.uuid4().hex[:8]}"
        directory = tmp_path / name
        directory.mkdir()
        file = directory / f"{name}.py"
        file.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        names.append(name)
        spec.loader.exec_module(found)
        return found

    yield write
    for name in names:
        sys.modules.pop(name, None)

"""How many modules of the activator one call passes: a reader has to know as many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.activator.conftest import KEY, Edge
from tests.fakes.routes import route_of, spec_of

ACTIVATOR = str(Path(__file__).parents[2] / "activator") + "/"
BESIDE = ("billing/journal", "billing/segment", "autoscaler/autoscaler_loop.py")
"""Tasks that run all the time, beside calls."""


@contextmanager
def modules_passed() -> Iterator[dict[str, int]]:
    """Modules of the activator in which code runs meanwhile, and their number of calls."""
    passed: dict[str, int] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ACTIVATOR):
            module = name.removeprefix(ACTIVATOR)
            if not module.startswith(BESIDE):
                passed[module] = passed.get(module, 0) + 1

    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("kind, most", [("warm", 23), ("from zero", 75)])
async def test_a_call_passes_few_modules(
    edge: Edge, kind: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    edge.add(route_of(spec_of()))
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    url = f"{edge.url}/v1/functions/shop/hello:invoke"
    if kind == "warm":
        for _ in range(2):
            assert (await edge.client.post(url, headers=headers, content=b'{"x":1}')).is_success
    with modules_passed() as passed:
        assert (await edge.client.post(url, headers=headers, content=b'{"x":1}')).is_success
    with capsys.disabled():
        print(f"\n{kind}: {len(passed)} modules: {', '.join(sorted(passed))}")
    assert len(passed) <= most

"""A function on a real GPU, through the whole platform: its snapshot holds the GPU's memory, and
comes back faster than a start."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pilotlight.protocol import HEADER_START
from tests.e2e.frozen import why_no_criu
from tests.e2e.harness import APPS, PlatformUnderTest, platform_up, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]
APP = str(APPS / "on_gpu.py")


@pytest.fixture(scope="module")
def output() -> list[str]:
    """What the deploy printed."""
    return []


@pytest.fixture(scope="module")
def platform(output: list[str]) -> Iterator[PlatformUnderTest]:
    if (why := why_no_criu()) is not None:
        pytest.skip(why)
    with platform_up(prices={"gpu_s": {"any": "0.001"}}) as running:
        output += running.cli("deploy", APP).stdout.splitlines()
        yield running


def test_a_model_on_the_gpu_comes_back_from_its_snapshot_with_what_it_had(
    platform: PlatformUnderTest, output: list[str]
) -> None:
    assert any("→ restore" in line for line in output), output
    first = platform.result("on-gpu/Model.total", {"n": 1000})
    for _ in range(2):
        wait_for(lambda: not platform.instances("on-gpu", "Model"), "scale to zero")
        began = time.monotonic()
        answer = platform.post("on-gpu/Model.total", {"n": 1000})
        print(f"{answer.headers[HEADER_START]} {time.monotonic() - began:.2f} s")
        assert (answer.headers[HEADER_START], answer.json()) == ("RESTORE", first)
    assert first[1].startswith("cuda")


def test_the_parts_of_a_restore_are_no_more_than_the_whole(platform: PlatformUnderTest) -> None:
    wait_for(lambda: not platform.instances("on-gpu", "Model"), "scale to zero")
    began = time.monotonic()
    platform.result("on-gpu/Model.total", {"n": 1})
    took_ms = 1000 * (time.monotonic() - began)
    (instance,) = platform.instances("on-gpu", "Model")
    phases = instance["phases_ms"]
    print({name: round(ms, 1) for name, ms in phases.items()})
    assert {"restore", "cuda_restore", "cuda_unlock", "revive"} <= set(phases)
    assert sum(phases.values()) - phases.get("prefetch", 0.0) <= took_ms


def test_managed_memory_is_named_and_the_function_serves(
    platform: PlatformUnderTest, output: list[str]
) -> None:
    assert any("64 MiB of managed memory" in line for line in output), output
    assert platform.result("on-gpu/Managed.nothing") is None

"""Tensors in a process that is to be forked or dumped: what is idle goes, what is in use is
named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import weight_cache
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from tests.fakes.fake_shim import function_spec
from tests.fakes.freezing_shim import FreezingShim
from tests.weight_cache.tensors.models_on_disk import large

SERVICE = """
    import pilotlight
    app = pilotlight.App("demo")

    @app.cls()
    class Service:
        @pilotlight.enter()
        def load(self):
            MODE

        @pilotlight.method(example=[0])
        def first(self, n: int) -> int:
            return int(self.tensors["t0"][n])
"""


class Shim(FreezingShim):
    """With all of our packages in the runtime, as the node agent binds them."""

    def before_boot(self, launch: dict[str, Any]) -> None:
        """See FakeShim."""
        super().before_boot(launch)
        launch["runtime"].append(str(Path(weight_cache.__file__).parents[1]))


def spec() -> FunctionSpec:
    return function_spec(
        qualname="Service", kind=FunctionKind.CLASS, methods=[MethodSpec(name="first", example=[0])]
    )


def service(*lines: str) -> dict[str, str]:
    return {"app.py": SERVICE.replace("MODE", f"\n{' ' * 12}".join(lines))}


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model that the worker may read."""
    return large(tmp_path)[0]


@pytest.mark.slow  # a worker that imports torch
def test_tensors_in_a_pool_are_named_as_what_stands_in_the_way(file: Path) -> None:
    code = service(f"self.tensors = pilotlight.weights.load({str(file)!r}, mode='pool')")
    with Shim(code, spec()) as shim:
        (one,) = shim.wait_event("snapshot_point")["obstacles"]
        assert one["kind"] == "memory"
        assert one["what"] == "memory pool of 42 MiB"
        assert re.search(
            r"enter\(\) left 40 MiB of tensors in a memory pool.*mode='mapped'.*snap=False",
            one["message"],
        )
        assert shim.checkpoint().said["obstacles"] == [one]


@pytest.mark.root  # /proc of a Template is closed to its own user
@pytest.mark.slow  # a worker that imports torch
def test_a_pool_that_nobody_uses_is_unmapped_in_what_is_dumped_and_only_there(file: Path) -> None:
    code = service(
        "self.pool = pilotlight.weights.pool(64 * 1024**2)",
        f"sum(t.sum() for t in pilotlight.weights.load({str(file)!r}, mode='pool', "
        f"pool=self.pool).values())",
        f"self.tensors = pilotlight.weights.load({str(file)!r})",
    )
    with Shim(code, spec()) as shim:
        point = shim.wait_event("snapshot_point")
        assert (point["threads"], point["obstacles"]) == ([], [])
        assert shim.checkpoint().said["obstacles"] == []
        pid = shim.wait_event("forked", instance="c-1")["pid"]
        assert "pilotlight-pool" not in maps(pid)
        assert str(file) in maps(pid)
        assert "pilotlight-pool" in maps(shim.pid)


def test_a_worker_that_maps_its_weights_can_be_forked_and_dumped(file: Path) -> None:
    with Shim(service(f"self.tensors = pilotlight.weights.load({str(file)!r})"), spec()) as shim:
        point = shim.wait_event("snapshot_point")
        assert (point["threads"], point["obstacles"]) == ([], [])
        frozen = shim.freeze()
        assert frozen.said["obstacles"] == []


def test_progress_bars_of_any_kind_leave_no_thread(file: Path) -> None:
    code = service(
        "from tqdm.auto import tqdm",
        "class Bar(tqdm): pass",
        f"self.tensors = dict(Bar(pilotlight.weights.load({str(file)!r}).items()))",
    )
    with Shim(code, spec()) as shim:
        assert shim.wait_event("snapshot_point")["threads"] == []

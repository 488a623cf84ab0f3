"""GPUs' memory as the driver's tool tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.cuda.memory import GpuMemoryUnknown, NvidiaSmi, parse

GPUS = """GPU-1111, 0, NVIDIA H100 80GB HBM3, 62503, 81559
GPU-2222, 1, NVIDIA H100 80GB HBM3, 4, 81559
GPU-3333, 2, NVIDIA H100 80GB HBM3, [GPU is lost], [N/A]
"""
APPS = "GPU-1111, 4711, 62494\nGPU-1111, 4712, [N/A]\n"


def test_both_tables_make_one() -> None:
    first, second = parse(GPUS, APPS, names=lambda pid: f"p{pid}")

    assert first.holders == ("p4711 (pid 4711): 61.0 GiB", "p4712 (pid 4712)")
    assert (first.is_free, second.is_free) == (False, True)
    assert second.describe().startswith("GPU 1 (GPU-2222) has 0.0 GiB of 79.6 GiB in use")


def _tool(directory: Path, script: str) -> dict[str, str]:
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "nvidia-smi").chmod(0o755)
    return {"PATH": str(directory)}


async def test_the_tool_is_asked_for_both(tmp_path: Path) -> None:
    (tmp_path / "proc/4711").mkdir(parents=True)
    (tmp_path / "proc/4711/comm").write_text("vllm\n")
    script = f'case "$1" in --query-gpu=*) printf "%s" "{GPUS}";; *) printf "%s" "{APPS}";; esac'
    reader = NvidiaSmi(_tool(tmp_path, script), proc=tmp_path / "proc")

    found = await reader.read()
    await reader.aclose()

    assert [gpu.uuid for gpu in found] == ["GPU-1111", "GPU-2222"]
    assert found[0].holders == ("vllm (pid 4711): 61.0 GiB", "a process (pid 4712)")


@pytest.mark.parametrize(
    "script, words",
    [
        ("echo no devices were found; exit 6", "status 6: no devices were found"),
        (None, "not on the PATH"),
    ],
)
async def test_a_tool_that_fails_says_why(tmp_path: Path, script: str | None, words: str) -> None:
    reader = NvidiaSmi({"PATH": str(tmp_path)} if script is None else _tool(tmp_path, script))

    with pytest.raises(GpuMemoryUnknown, match=words):
        await reader.read()

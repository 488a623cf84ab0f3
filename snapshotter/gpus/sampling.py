"""Samples the use of the node's GPUs through NVML and prints a line of JSON for each round:
`python -m snapshotter.gpus.sampling SECONDS`. It ends when its standard input does.

A process of its own, because the library can hang. Source: NVML API Reference Guide,
nvmlDeviceGetUtilizationRates (share of the last sample period in which a kernel ran; not supported
for MIG instances), nvmlDeviceGetMemoryInfo."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pilotlight.core.json_record import JsonRecord
from snapshotter.gpus.nvml import Nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample(JsonRecord):
    """The use of one GPU or MIG instance at one moment.

    Attributes:
        sm_utilisation: share of the last period in which a kernel ran on it, 0 to 1; None where the
            driver does not tell, as for MIG instances.
        used_bytes, total_bytes: its memory, that of the driver included.
    """

    uuid: str
    sm_utilisation: float | None
    used_bytes: int
    total_bytes: int


class NvmlUsage(Nvml, Protocol):
    """`Nvml`, and what only samples need."""

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: N802


def sample(nvml: NvmlUsage) -> list[GpuSample]:
    """Samples of all GPUs and MIG instances of the node. One that does not answer, as it was lost,
    is left out. Raises `nvml.NVMLError` when the library does not answer."""
    found: list[GpuSample] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            devices = list(_instances(nvml, gpu)) if _is_partitioned(nvml, gpu) else [gpu]
            found += [_sample(nvml, device) for device in devices]
        except nvml.NVMLError:
            continue
    return found


def _sample(nvml: NvmlUsage, device: Any) -> GpuSample:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    try:
        percent = int(nvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except nvml.NVMLError:
        percent = None
    return GpuSample(
        uuid=nvml.nvmlDeviceGetUUID(device),
        sm_utilisation=None if percent is None else percent / 100,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
    )


def _is_partitioned(nvml: NvmlUsage, gpu: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError_NotSupported:
        return False


def _instances(nvml: NvmlUsage, gpu: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError:  # fewer instances than there may be
            continue


def parse(line: str | bytes) -> dict[str, GpuSample]:
    """The samples of a line, by UUID. Raises ValueError, TypeError or KeyError when it is not one
    of this module's."""
    body: Mapping[str, Any] = json.loads(line)
    samples = (GpuSample(**one) for one in body["gpus"])
    return {one.uuid: one for one in samples}


def main(every_s: float) -> int:
    """Print samples until standard input ends; 1 and the reason on stderr if NVML does not
    answer."""
    try:
        import pynvml
    except ImportError as e:
        print(f"{e}: install pilotlight[node]", file=sys.stderr)
        return 1
    nvml = cast(NvmlUsage, pynvml)
    try:
        nvml.nvmlInit()
        while True:
            print(json.dumps({"gpus": [one.to_json() for one in sample(nvml)]}), flush=True)
            readable, _, _ = select.select([sys.stdin], [], [], every_s)
            if readable and not sys.stdin.buffer.read(1):
                return 0
    except nvml.NVMLError as e:
        print(f"NVML: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the agent has ended
        return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))

"""`pynvml` of a process whose PYTHONPATH begins with this directory: NVML of the node that the file
FAKE_NVML describes (`tests.fakes.fake_nvml`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.fakes.fake_nvml import FakeNvml

_NVML = FakeNvml.load(Path(os.environ["FAKE_NVML"]))


def __getattr__(name: str) -> Any:
    return getattr(_NVML, name)

"""A function that writes one file to a volume and commits it, and one that reads it."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path

import pilotlight

app = pilotlight.App("stored")
data = pilotlight.Volume.from_name("data", create_if_missing=True)
BLOCK_BYTES = 1 << 20


@app.function(volumes={"/data": data}, timeout=600)
def write(seed: int, size_bytes: int) -> dict[str, float]:
    """Write a file of which no two blocks are equal, and commit: seconds of both."""
    block = random.Random(seed).randbytes(BLOCK_BYTES - 8)
    began = time.perf_counter()
    with open("/data/file", "wb") as file:
        file.writelines(number.to_bytes(8) + block for number in range(size_bytes // BLOCK_BYTES))
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    data.commit()
    return {"write_s": written - began, "commit_s": time.perf_counter() - written}


@app.function(volumes={"/data": data}, timeout=600)
def read() -> str:
    """The sha256 of the file."""
    with Path("/data/file").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

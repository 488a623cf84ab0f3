"""Faults by a neighbour: an app of the drill's own, which is deployed before and deleted after it.
Its functions use up their memory, or want their weights all at once."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.drills.calls import call_json
from pilotlight.drills.faults import Fault
from pilotlight.errors import PilotlightError

if TYPE_CHECKING:
    from pilotlight.client.client import Client

APP = "pilotlight-drill"
GROW = f'''"""Uses more memory than it has."""

import pilotlight

app = pilotlight.App("{APP}")


@app.function(memory="128MiB", snapshot=False, timeout=60)
def grow() -> int:
    held = []
    while True:
        held.append(b"x" * (8 << 20))
'''
STORM_HEAD = f'''"""Functions that want weights and little else."""

import pilotlight

app = pilotlight.App("{APP}")
'''
STORM_FUNCTION = """
weights_{n} = pilotlight.Weights({directory!r}, name="drill-{n}")


@app.function(weights=weights_{n}, snapshot=False, memory="64MiB", scaledown_window=2, timeout=120)
def model_{n}() -> int:
    with open(weights_{n}.path / "model.safetensors", "rb") as file:
        return sum(len(piece) for piece in iter(lambda: file.read(1 << 20), b""))
"""
MODELS = 8
MODEL_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class Neighbour(Fault):
    """An app beside the drilled function, whose functions are all called at once.

    Attributes:
        client: of the platform.
        deploy: deploys an app's file.
        functions: of the app. fails: whether calls of them must be refused with an error, or
            answered.
    """

    summary: str
    client: Client
    deploy: Callable[[Path], None]
    functions: Sequence[str]
    fails: bool
    _calls: list[threading.Thread] = field(default_factory=list)
    _found: list[str] = field(default_factory=list)

    def write(self, directory: Path) -> Path:
        """Write the app's file, and return it."""
        file = directory / "drill_app.py"
        if self.fails:
            file.write_text(GROW)
            return file
        text = STORM_HEAD
        for n in range(len(self.functions)):
            model = directory / f"model-{n}"
            model.mkdir()
            write_weights(model / "model.safetensors", MODEL_BYTES)
            text += STORM_FUNCTION.format(n=n, directory=str(model))
        file.write_text(text)
        return file

    def prepare(self) -> None:
        """Deploy the app; its weights are only in the blob store then."""
        with tempfile.TemporaryDirectory(prefix="pilotlight-drill-") as directory:
            self.deploy(self.write(Path(directory)))

    def begin(self) -> None:
        """Call all of its functions at once."""
        self._calls = [
            threading.Thread(target=self._call, args=(name,), daemon=True)
            for name in self.functions
        ]
        for one in self._calls:
            one.start()

    def close(self) -> None:
        """Delete the app."""
        self.client.delete_app(APP)

    def is_over(self) -> bool:
        """Whether all calls have ended."""
        return not any(one.is_alive() for one in self._calls)

    def findings(self) -> list[str]:
        """Calls of the neighbour that did not end as they should."""
        return self._found

    def _call(self, name: str) -> None:
        try:
            answer = call_json(self.client, APP, name, {})
        except PilotlightError as e:
            if not self.fails:
                self._found.append(f"{APP}/{name} failed: {e}")
        else:
            if self.fails:
                self._found.append(f"{APP}/{name} used more than its memory and answered {answer}")


def write_weights(file: Path, size_bytes: int) -> None:
    """Write a safetensors file with one tensor of random bytes, which no other model has."""
    tensor = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}
    head = json.dumps({"t": tensor}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + os.urandom(size_bytes))

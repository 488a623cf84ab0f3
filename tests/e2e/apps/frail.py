"""Functions whose snapshots are damaged, interrupted, or find no room."""

import mmap
import os
import secrets

import pilotlight

app = pilotlight.App("frail")
BLOCK = 96 * 1024 * 1024


@app.cls(cpu=0.25, memory="256MiB", scaledown_window=300)
class Small:
    """A snapshot of 20 MB."""

    @pilotlight.enter()
    def load(self) -> None:
        self.words = {"one": 1, "two": 2}

    @pilotlight.method(example=["one"])
    def number(self, word: str) -> int:
        return self.words[word]


@app.cls(cpu=0.25, memory="512MiB", scaledown_window=300, max_instances=2)
class Large:
    """A snapshot that takes a while to write."""

    @pilotlight.enter()
    def load(self) -> None:
        self.block = secrets.token_bytes(BLOCK)

    @pilotlight.method(example=[])
    def size(self) -> int:
        return len(self.block)


@app.cls(
    cpu=0.25,
    memory="256MiB",
    scaledown_window=300,
    env={"LIBRARY": os.environ.get("FRAIL_LIBRARY", "/etc/hostname")},
)
class Mapper:
    """Has a file of the host mapped."""

    @pilotlight.enter()
    def load(self) -> None:
        with open(os.environ["LIBRARY"], "rb") as file:
            self.mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    @pilotlight.method(example=[])
    def read(self) -> str:
        return self.mapped[:3].decode()

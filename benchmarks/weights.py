"""Weights: ingest into the cache, tensors out of it, many functions that want theirs at once;
beside what others do with the same bytes.

Ingest (`benchmarks/ingest.py`): from an object store on loopback to this disk;
`benchmarks/peering.py`: from another node. Loading (`benchmarks/loading.py`): from this disk to
tensors, with the page cache warm and dropped. Storms (`benchmarks/storm.py`): the whole platform.
With --quick: one size, few rounds, few functions. With --peers: aws s3 cp, boto3, obstore and
runai-model-streamer, each in an environment of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import correctness, ingest, loading, peering, storm
from benchmarks.checkpoints import FOUR_GB, ONE_GB, SMALL, Shape
from benchmarks.harness import Report, options

NEEDS = ("nginx", "h2load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured: rounds by size of checkpoint, the ways of loading, and the storm's
    models."""

    ingest: Sequence[tuple[Shape, int]]
    clients: tuple[str, ...]
    load: Sequence[tuple[Shape, int]]
    arms: tuple[str, ...]
    storm_models: int
    storm_rounds: int


QUICK = Extent(
    ingest=[(SMALL, 3)],
    clients=("auto",),
    load=[(ONE_GB, 3)],
    arms=loading.QUICK,
    storm_models=8,
    storm_rounds=1,
)
FULL = Extent(
    ingest=[(ONE_GB, 15), (FOUR_GB, 5)],
    clients=("auto", "boto3"),
    load=[(ONE_GB, 15), (FOUR_GB, 5)],
    arms=loading.FULL,
    storm_models=50,
    storm_rounds=3,
)


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.weights", needs=NEEDS)
    extent = QUICK if given.quick else FULL
    report = Report("weights: object store to disk, disk to tensors, and many at once")
    correctness.check(report, storm.THIRTY_MB)
    for shape, rounds in extent.ingest:
        ingest.measure(
            report,
            shape,
            rounds=rounds,
            with_peers=given.peers,
            clients=extent.clients,
            suffix=_suffix(shape, extent.ingest),
        )
    peering.measure(report, *extent.ingest[0])
    for shape, rounds in extent.load:
        loading.measure(
            report,
            shape,
            rounds=rounds,
            with_peers=given.peers,
            arms=extent.arms,
            suffix=_suffix(shape, extent.load),
        )
    storm.measure(
        report,
        models=extent.storm_models,
        rounds=extent.storm_rounds,
        shape=storm.THIRTY_MB,
        one=SMALL,
    )
    report.finish(given)


def _suffix(shape: Shape, shapes: Sequence[tuple[Shape, int]]) -> str:
    """Ratios of the first size have the plain keys."""
    return "" if shape is shapes[0][0] else f"_{shape.name.lower()}"


if __name__ == "__main__":
    main()

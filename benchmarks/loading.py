"""Loading: from a checkpoint on this disk to tensors that can be used, with its pages in memory
(warm) and dropped from it (cold).

Every way is timed in a process of its own (`benchmarks/loader.py`,
`benchmarks/peers/load_runai.py`); all take turns. Rows are seconds: to the first tensor, and in
total, when one value of every page of every tensor was read. Reading into memory is compared as
GB/s, with the limit beside it: threads that preadv into memory that is there already. GPU rows are
where a GPU is."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import orders, page_cache, peers
from benchmarks.checkpoints import TINY, Checkpoint, Shape, checkpoint, pickled
from benchmarks.harness import ROOT, Report, Row, interleave, paired_ratio, percentile, phase
from benchmarks.network import DidNotStart

GB = 1e9
NAMES = {
    "load_file": "safetensors load_file",
    "load_file_pread": "safetensors load_file, backend=pread",
    "safe_open": "safetensors safe_open, one tensor",
    "torch_load": "torch.load, mmap=True",
    "mapped": "pilotlight mapped",
    "pool": "pilotlight pool",
    "runai": "runai-model-streamer",
    "preadv_1": "limit: preadv, 1 thread, faulted memory",
    "preadv_cores": "limit: preadv, a thread per core, faulted memory",
    "preadv_many": "limit: preadv, 16 threads, 2 MiB each, faulted memory",
    "preadv_fresh": "preadv, a thread per core, fresh memory",
    "cuda_ours": "pilotlight to the GPU",
    "cuda_load_file": "safetensors load_file to the GPU",
    "cuda_memcpy": "limit: cudaMemcpy from pinned memory",
}
LIMITS = ("preadv_1", "preadv_cores", "preadv_many")
QUICK = ("load_file", "safe_open", "mapped", "pool", "preadv_cores", "preadv_many")
ON_GPU = ("cuda_ours", "cuda_load_file", "cuda_memcpy")
FULL = tuple(name for name in NAMES if name not in ("runai", *ON_GPU))

Times = Mapping[str, float]


def measure(
    report: Report,
    shape: Shape,
    *,
    rounds: int,
    with_peers: bool,
    arms: Sequence[str],
    suffix: str = "",
) -> None:
    """Rows and ratios (their keys with `suffix`) for one checkpoint, warm and cold."""
    made, tiny = pickled(checkpoint(shape)), pickled(checkpoint(TINY))
    with contextlib.ExitStack() as held:
        project = held.enter_context(
            orders.hired(sys.executable, "-m", "benchmarks.loader", environment=_environment())
        )
        workers = dict.fromkeys(arms, project)
        if with_peers and (runai := hire_runai(report, held)) is not None:
            workers["runai"] = runai
        for state, prepare in (("warm", page_cache.warm), ("cold", page_cache.drop)):
            timed = {arm: _arm(worker, arm, made, tiny, prepare) for arm, worker in workers.items()}
            with phase(f"load {shape.name}, {state}"):
                took = interleave(
                    {arm: run for arm, run in timed.items() if works(report, NAMES[arm], run)},
                    rounds=rounds,
                )
            write(report, made, state, took, suffix=suffix)
        if project.ask(arm="devices", **_order(made), tiny=_order(tiny))["cuda"]:
            timed = {arm: _arm(project, arm, made, tiny, page_cache.warm) for arm in ON_GPU}
            with phase(f"load {shape.name} to the GPU"):
                took = interleave(
                    {arm: run for arm, run in timed.items() if works(report, NAMES[arm], run)},
                    rounds=rounds,
                )
            write_gpu(report, made, took, suffix=suffix)
        else:
            report.missing(f"load {shape.name} to a GPU", "there is none here")


def works(report: Report, name: str, arm: Callable[[], Any]) -> bool:
    """Try an arm once, uncounted; one that fails is said, and leaves the others alone."""
    try:
        arm()
    except orders.OrderFailed as e:
        report.missing(name, str(e))
        return False
    return True


def hire_runai(report: Report, held: contextlib.ExitStack) -> orders.Worker | None:
    """The peer's script, None (and said) where it cannot be had."""
    try:
        python = peers.install("runai")
        site = {peers.SITE_VARIABLE: sysconfig.get_paths()["purelib"]}
        return held.enter_context(
            orders.hired(str(python), str(peers.HERE / "load_runai.py"), environment=site)
        )
    except (peers.PeerFailed, DidNotStart) as e:
        report.missing(NAMES["runai"], str(e))
        return None


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}


def _arm(
    worker: orders.Worker,
    arm: str,
    made: Checkpoint,
    tiny: Checkpoint,
    prepare: Callable[[Sequence[Path]], None],
) -> Callable[[], Times]:
    order = {"arm": arm, **_order(made), "tiny": _order(tiny)}

    def run() -> Times:
        prepare([made.pickle if arm == "torch_load" else made.file])
        return worker.ask(**order)

    return run


def _order(made: Checkpoint) -> dict[str, Any]:
    return {key: str(value) for key, value in asdict(made).items()}


def write(
    report: Report,
    made: Checkpoint,
    state: str,
    took: Mapping[str, Sequence[Times]],
    *,
    suffix: str,
) -> None:
    """Rows, and the ratios that can be made of the arms that ran."""
    size_gb = made.size_bytes / GB
    for arm, times in took.items():
        row = f"load {made.name} {state}: {NAMES[arm]}"
        if "first_s" in times[0]:
            report.rows.append(
                Row.of(f"{row}, first tensor", "ms", [1000 * t["first_s"] for t in times])
            )
        if "total_s" in times[0]:
            report.rows.append(
                Row.of(
                    f"{row}, total",
                    "ms",
                    [1000 * t["total_s"] for t in times],
                    note=_note(arm, times),
                )
            )
        if arm not in ("safe_open", "mapped", "load_file", "torch_load"):  # those only map
            report.rows.append(
                Row.of(f"{row}, read", "GB/s", [size_gb / t["loaded_s"] for t in times])
            )
    warm, cold = ("_warm", "") if state == "warm" else ("", "_cold")

    def ratio(key: str, field: str, above: str, below: str) -> None:
        if above in took and below in took:
            report.ratio(
                f"{key}{suffix}",
                paired_ratio([t[field] for t in took[above]], [t[field] for t in took[below]]),
            )

    ratio(f"first_tensor_load_file_over_mapped{warm}", "first_s", "load_file", "mapped")
    ratio(f"total_mapped_over_load_file{warm}", "total_s", "mapped", "load_file")
    if limits := [arm for arm in LIMITS if arm in took]:
        best = min(limits, key=lambda arm: percentile([t["loaded_s"] for t in took[arm]], 50))
        # seconds of the limit over seconds of the pool: the part of the limit's bandwidth that the
        # pool reaches
        ratio(f"pool_vs_preadv{cold}", "loaded_s", best, "pool")


def write_gpu(
    report: Report, made: Checkpoint, took: Mapping[str, Sequence[Times]], *, suffix: str
) -> None:
    """Rows in GB/s from the page cache to the device, and ours over the limit."""
    for arm, times in took.items():
        note = "" if times[0].get("pinned", 1.0) else "the driver did not take the pool: not pinned"
        rates = [made.size_bytes / GB / t["loaded_s"] for t in times]
        report.rows.append(Row.of(f"load {made.name} warm: {NAMES[arm]}", "GB/s", rates, note=note))
    if {"cuda_ours", "cuda_memcpy"} <= set(took):
        ours, limit = ([t["loaded_s"] for t in took[arm]] for arm in ("cuda_ours", "cuda_memcpy"))
        report.ratio(f"gpu_vs_pinned_memcpy{suffix}", paired_ratio(limit, ours))


def _note(arm: str, times: Sequence[Times]) -> str:
    if arm == "runai":
        return "reads past the page cache (O_DIRECT): the next start reads the disk again"
    if "pool_s" not in times[0]:
        return ""
    return (
        f"after {1000 * percentile([t['pool_s'] for t in times], 50):.0f} ms to make the pool, "
        f"once per process"
    )

"""Many functions whose weights are not here, at once: each byte is read once, and what is hot stays
so.

The whole platform, its blobs in an object store (nginx, niced: it stands for another machine).
*Starts*: 8 calls at once to one function at zero, each on an instance of its own; the origin's log
says how often each byte of the model was read. *Storm*: a hot function is called at a steady rate
through the activator, while 50 others, each with a model of its own that was dropped from the node,
are wanted at once:

- writes: as many bytes are written to the same disk and synced, by a program that does nothing
  else: what any writer costs on this machine;
- reload: their models are asked for at the weight cache, as 50 starts would, but nothing is
  started;
- starts: they are called, and start, with their models here;
- storm: they are called, and start, and their models are not here.

Starting 50 processes takes the CPU of this machine from everybody; storm over starts says what
missing weights add to that. On a virtual machine, writing may take processors away from all of it:
how much time the host took is counted for each arm (`steal` of /proc/stat, proc(5))."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import origin, peers, priority, stack
from benchmarks.cache import remove
from benchmarks.checkpoints import Shape, checkpoint
from benchmarks.harness import BENCH_HOME, ROOT, Report, Row, percentile, phase
from benchmarks.load import Request, steady
from benchmarks.programs import program
from pilotlight.core.object_store import blob_key
from weight_cache.client import WeightCacheClient
from weight_cache.sources.manifest_builder import build_manifest

HOT_PER_S = 200
HOT_APP, HOT_FUNCTION, HOT_SOURCE = (
    "bench-echo",
    "echo",
    ROOT / "benchmarks" / "functions" / "echo.py",
)
STORM_APP = "bench-storm"
HOLD_S = 3.0
"""Calls that arrive at once stay this long, so that each needs an instance of its own."""
STARTS = 8
DROP_TIMEOUT_S = 60.0
CALM_S = 3.0
SETTLE_S = 0.5
THIRTY_MB = Shape(name="30MB", layers=4, hidden=512, intermediate=1408, kv=256, vocabulary=16384)

SOURCE_HEAD = '''"""Functions that want weights and little else."""

import os
import time

import pilotlight

app = pilotlight.App("{app}")
'''
SOURCE_FUNCTION = '''
weights_{n} = pilotlight.Weights({directory!r}, name="model-{n}")


@app.cls(weights=weights_{n}, snapshot=False, cpu=0.05, memory="64MiB", max_instances={instances}, scaledown_window=2, timeout=120)
@pilotlight.concurrent(max_inputs=1)
class Model{n}:
    """Reads its weights' first page."""

    @pilotlight.enter()
    def load(self) -> None:
        with open(weights_{n}.path / "model.safetensors", "rb") as file:
            self.head = file.read(4096)

    @pilotlight.method(example=[0.0])
    def run(self, seconds: float) -> str:
        time.sleep(seconds)
        return f"{{os.readlink('/proc/self/ns/pid')}}/{{os.getpid()}}"
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What the storm wants: manifests of models, their size together, and the function of each."""

    manifests: tuple[str, ...]
    size_bytes: int

    @property
    def functions(self) -> tuple[str, ...]:
        """In the order of their models."""
        return tuple(f"Model{n}.run" for n in range(len(self.manifests)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """The hot function's latencies while an arm ran once, how long that took, and how much
    processor time the host took meanwhile."""

    hot_ms: Sequence[float]
    lasted_s: float
    stolen_ms: float


def measure(report: Report, *, models: int, rounds: int, shape: Shape, one: Shape) -> None:
    """Rows and ratios. `shape`: of each of the storm's models; `one`: of the model that starts 8
    times."""
    with contextlib.ExitStack() as held:
        folder = Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="plst", dir=BENCH_HOME))
        )
        platform = held.enter_context(stack.running())
        with phase("storm: deploy"):
            wanted = deploy(
                platform,
                folder,
                STORM_APP,
                [checkpoint(shape, seed=n + 1).directory for n in range(models)],
                instances=1,
            )
            single = deploy(
                platform, folder, "bench-starts", [checkpoint(one).directory], instances=STARTS
            )
            platform.deploy(HOT_SOURCE)
        server = held.enter_context(
            origin.serving(platform.directory / "home" / "blobs", niceness=priority.AFTER_OTHERS)
        )
        with phase("storm: blobs move to the object store"):
            platform.restart(
                platform={"blobs": f"s3://{origin.BUCKET}"},
                variables=server.environment,
                between=lambda: remove(platform.directory / "home" / "weights"),
            )
        starts(report, platform, server, single, one)
        hot(report, platform, wanted, rounds=rounds)


def deploy(
    platform: stack.Stack, folder: Path, app: str, directories: Sequence[Path], *, instances: int
) -> Models:
    """One app, with a function for each directory of weights."""
    file = folder / app / "app.py"
    file.parent.mkdir()
    functions = [
        SOURCE_FUNCTION.format(n=n, directory=str(d), instances=instances)
        for n, d in enumerate(directories)
    ]
    file.write_text(SOURCE_HEAD.format(app=app) + "".join(functions))
    platform.deploy(file, app=app)
    made = [build_manifest(directory) for directory in directories]
    return Models(
        manifests=tuple(one.digest for one in made),
        size_bytes=sum(file.size_bytes for one in made for file in one.files),
    )


def starts(
    report: Report, platform: stack.Stack, server: origin.Origin, single: Models, one: Shape
) -> None:
    """How often the origin was asked for each byte of a model that starts 8 times at once."""
    files = build_manifest(checkpoint(one).directory).files
    keys = [blob_key(file.digest) for file in files]
    before = server.sent_bytes(*keys)
    with phase(f"storm: {STARTS} starts of one model"):
        answers = at_once(
            [
                functools.partial(
                    platform.invoke, "bench-starts", single.functions[0], {"seconds": HOLD_S}
                )
            ]
            * STARTS
        )
    where = {answer.body for answer in answers}
    kinds = ", ".join(sorted({answer.start for answer in answers}))
    milliseconds = [answer.milliseconds - 1000 * HOLD_S for answer in answers]
    report.rows.append(
        Row.of(
            f"{STARTS} starts at once, {one.name}",
            "ms",
            milliseconds,
            note=f"{len(where)} instances, by {kinds}",
        )
    )
    report.ratio(
        f"reads_per_byte_{STARTS}_starts",
        (server.sent_bytes(*keys) - before) / sum(file.size_bytes for file in files),
    )


def hot(report: Report, platform: stack.Stack, wanted: Models, *, rounds: int) -> None:
    """The hot function's latencies, calm and in each of the storms; the arms take turns."""
    platform.invoke(HOT_APP, HOT_FUNCTION, {"text": "ready"})
    socket = platform.run_directory() / "weight_cache.sock"
    arms: dict[str, Callable[[], None]] = {
        "calm": lambda: time.sleep(CALM_S),
        "writes": lambda: write_plain(platform.directory / "written", wanted.size_bytes),
        "reload": lambda: asyncio.run(reload(socket, wanted)),
        "starts": lambda: call_all(platform, wanted),
        "storm": lambda: call_all(platform, wanted),
    }
    runs: dict[str, list[ArmRun]] = {name: [] for name in arms}
    for i in range(rounds):
        for name, act in arms.items():
            prepare(platform, socket, wanted, missing=name in ("reload", "storm"))
            stolen_ms = _stolen_ms()
            with phase(f"storm: {name} {i + 1}/{rounds}"):
                began, ended, requests = beside(platform, act)
            runs[name].append(
                ArmRun(
                    hot_ms=[r.milliseconds for r in requests if began <= r.sent_at <= ended],
                    lasted_s=ended - began,
                    stolen_ms=_stolen_ms() - stolen_ms,
                )
            )
    write(report, len(wanted.manifests), runs)


def beside(platform: stack.Stack, act: Callable[[], None]) -> tuple[float, float, list[Request]]:
    """Call the hot function steadily while `act` runs: when that began and ended, and every hot
    request until then."""
    url, headers = platform.invoke_url(HOT_APP, HOT_FUNCTION), platform.headers
    with steady(url, body=peers.ECHO_BODY, headers=headers, per_s=HOT_PER_S) as requests:
        time.sleep(SETTLE_S)
        began = time.time()
        act()
        ended = time.time()
        time.sleep(SETTLE_S)  # what was sent in time and answered late belongs to it
        return began, ended, requests()


def write_plain(file: Path, size_bytes: int) -> None:
    """Write so many bytes, and sync them."""
    command = [
        program("dd"),
        "if=/dev/zero",
        f"of={file}",
        "bs=16M",
        f"count={size_bytes}B",
        "conv=fsync",
    ]
    process = priority.started([*command, "status=none"], niceness=priority.AFTER_OTHERS)
    if status := process.wait():
        raise stack.StackFailed(f"{' '.join(command)} ended with status {status}")
    file.unlink()


def _stolen_ms() -> float:
    """Processor time that the host took from this machine, since it started (proc(5))."""
    (total,) = (
        line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu ")
    )
    return 1000 * int(total.split()[8]) / os.sysconf("SC_CLK_TCK")


def call_all(platform: stack.Stack, wanted: Models) -> None:
    """Call every function once, all at the same moment."""
    at_once(
        [
            functools.partial(platform.invoke, STORM_APP, function, {"seconds": 0.0})
            for function in wanted.functions
        ]
    )


def at_once(calls: Sequence[Callable[[], stack.Answer]]) -> list[stack.Answer]:
    """The answers of calls that are sent together."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], stack.Answer]) -> stack.Answer:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


async def reload(socket: Path, wanted: Models) -> None:
    """Ask the cache for every model at once, as starts would, and let go."""
    client = WeightCacheClient(socket)
    try:
        opened = [await client.open(manifest, holder="storm") for manifest in wanted.manifests]
        await asyncio.gather(*(client.wait(lease.lease_id) for lease in opened))
        for lease in opened:
            await client.close(lease.lease_id)
    finally:
        await client.aclose()


def prepare(platform: stack.Stack, socket: Path, wanted: Models, *, missing: bool) -> None:
    """No instance of the storm is left; its models are all here, or all gone. Raises StackFailed
    when they would not go."""
    platform.wait_zero(STORM_APP)
    if missing:
        asyncio.run(_drop_all(socket, wanted))
    else:
        asyncio.run(reload(socket, wanted))


async def _drop_all(socket: Path, wanted: Models) -> None:
    client = WeightCacheClient(socket)
    deadline = time.monotonic() + DROP_TIMEOUT_S
    try:
        while here := {model.manifest for model in await client.models()} & set(wanted.manifests):
            if time.monotonic() > deadline:
                raise stack.StackFailed(
                    f"{len(here)} models are still held {DROP_TIMEOUT_S:g} s after their last "
                    f"instance"
                )
            for manifest in here:
                await client.drop(manifest)
            await asyncio.sleep(0.1)  # leases end a moment after their instances
    finally:
        await client.aclose()


def write(report: Report, models: int, runs: Mapping[str, Sequence[ArmRun]]) -> None:
    """Rows of the hot function, of how long each storm took, and the ratios of its p99."""
    p99 = {}
    for name, those in runs.items():
        milliseconds = [ms for run in those for ms in run.hot_ms]
        stolen_ms = sum(run.stolen_ms for run in those) / len(those)
        what = f"{HOT_PER_S} calls/s" if name == "calm" else f"{models} functions"
        note = f"{what}; the host took {stolen_ms:.0f} ms a round"
        report.rows.append(Row.of(f"hot function, {name}", "ms", milliseconds, note=note))
        if name != "calm":
            lasted_s = [run.lasted_s for run in those]
            label = f"{name}: until the last of {models} was there"
            report.rows.append(Row.of(label, "s", lasted_s))
        p99[name] = percentile(milliseconds, 99)
    report.ratio("hot_p99_storm_over_calm", p99["storm"] / p99["calm"])
    report.ratio("hot_p99_starts_over_calm", p99["starts"] / p99["calm"])
    report.ratio("hot_p99_storm_over_starts", p99["storm"] / p99["starts"])
    report.ratio("hot_p99_reload_over_calm", p99["reload"] / p99["calm"])
    report.ratio("hot_p99_writes_over_calm", p99["writes"] / p99["calm"])

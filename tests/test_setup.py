"""The lock files serve every platform and Python that they promise, and the set-up takes the build
of torch that it should."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PLATFORM = ROOT / "requirements.lock"
DEV = ROOT / "scripts" / "dev.lock"
DOCS = ROOT / "scripts" / "docs.lock"
TORCH = ROOT / "scripts" / "torch.lock"
UV = Path(sys.executable).parent / "uv"
PYTHONS = ("3.11.0", "3.11.2", "3.11.9", "3.12.1", "3.13.5", "3.14.0")
"""3.11.2 is Debian 12's: some packages need a backport below 3.11.3."""
SYSTEMS = {
    "linux-x86_64": {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
    },
    "linux-arm64": {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "aarch64",
    },
    "macos": {
        "sys_platform": "darwin",
        "platform_system": "Darwin",
        "os_name": "posix",
        "platform_machine": "arm64",
    },
    "windows": {
        "sys_platform": "win32",
        "platform_system": "Windows",
        "os_name": "nt",
        "platform_machine": "AMD64",
    },
}
CUDA = re.compile(r"(torch|triton|cuda-.*|nvidia-(?!ml-py).*)\Z")
"""nvidia-ml-py is NVML's interface in pure Python, which the node agent needs."""


def environment(system: str, python: str) -> dict[str, str]:
    """The variables of markers (PEP 508) on another machine."""
    common = {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    versions = {
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "implementation_version": python,
    }
    return {**common, **versions, **SYSTEMS[system]}


def entries(*files: Path) -> Iterator[tuple[Requirement, str]]:
    """Each pinned requirement, and the text of its hashes."""
    for file in files:
        text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in text.splitlines():
            words, _, hashes = line.partition(" --hash=")
            yield Requirement(words.strip()), hashes


def pins(environment: Mapping[str, str], *files: Path) -> dict[str, str]:
    """Versions by name, of what is installed there. A name that two lines pin differently fails the
    test."""
    found: dict[str, str] = {}
    for requirement, _ in entries(*files):
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            name, version = (
                canonicalize_name(requirement.name),
                str(requirement.specifier).removeprefix("=="),
            )
            assert found.setdefault(name, version) == version, requirement
    return found


def unmet(
    requirements: list[str],
    there: Mapping[str, str],
    environment: Mapping[str, str],
    extras: tuple[str, ...] = ("",),
) -> list[str]:
    """Those of `requirements` that apply in the environment and that no pin satisfies."""
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(
            marker.evaluate({**environment, "extra": extra}) for extra in extras
        ):
            continue
        version = there.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


@pytest.mark.parametrize("file", [PLATFORM, DEV, TORCH], ids=lambda file: file.name)
def test_every_package_is_pinned_with_hashes_and_no_index_is_named(file: Path) -> None:
    found = list(entries(file))
    assert found
    assert [str(requirement) for requirement, hashes in found if "sha256:" not in hashes] == []
    assert [
        str(requirement)
        for requirement, _ in found
        if not str(requirement.specifier).startswith("==")
    ] == []
    assert "://" not in file.read_text()
    assert not re.search(r"^-", file.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_the_project_declares_is_locked_for_every_system_and_python(
    system: str, python: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    where = environment(system, python)
    groups = {**project["project"]["optional-dependencies"], **project["dependency-groups"]}
    declared = [
        text for name, texts in groups.items() if name not in {"all", "vllm"} for text in texts
    ]

    assert (
        unmet(
            [*project["project"]["dependencies"], *declared],
            pins(where, PLATFORM, DEV, DOCS, TORCH),
            where,
        )
        == []
    )


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.13.5"])
def test_what_locked_packages_need_is_locked_too(python: str) -> None:
    where = environment("linux-x86_64", python)
    there = pins(where, PLATFORM, DEV, TORCH)
    missing = {}
    for name in there:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another Python or platform, or of the other build of torch
        needs = [text for text in distribution.requires or [] if "extra ==" not in text]
        if lacking := unmet(needs, there, where):
            missing[name] = lacking
    assert missing == {}


def test_cuda_comes_with_the_plain_build_of_torch_only() -> None:
    assert [
        r.name for r, _ in entries(PLATFORM, DEV) if CUDA.match(canonicalize_name(r.name))
    ] == []
    assert [r.name for r, _ in entries(TORCH) if not CUDA.match(canonicalize_name(r.name))] == []
    assert {"torch", "nvidia-cublas"} <= set(pins(environment("linux-x86_64", "3.11.2"), TORCH))
    assert set(pins(environment("macos", "3.11.2"), TORCH)) == {"torch"}


# -- which build of torch --------------------------------------------------------------------------
def wheel(directory: Path, name: str, version: str) -> str:
    """Make an empty package; its line in a lock file."""
    info = f"{name}-{version}.dist-info"
    file = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return (
        f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    )


@pytest.fixture
def torch_places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """An empty environment with uv, a directory of wheels with the plain build of torch and its
    CUDA package, and their lock file."""
    venv, wheels, lock = tmp_path / "venv", tmp_path / "wheels", tmp_path / "torch.lock"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    (venv / "bin" / "uv").symlink_to(UV)
    (venv / "no-index").mkdir()
    wheels.mkdir()
    lock.write_text(wheel(wheels, "torch", "1.2.3") + wheel(wheels, "cuda_fake", "1.0"))
    return venv, wheels, lock


def install_torch(places: tuple[Path, Path, Path], **variables: str) -> tuple[list[str], str]:
    """Run the script against the directory of wheels alone; what is installed then, and what it
    printed."""
    venv, wheels, lock = places
    own = {
        "PATH": os.environ["PATH"],
        "UV_OFFLINE": "1",
        "UV_DEFAULT_INDEX": (venv / "no-index").as_uri(),
        **variables,
    }
    own |= {"UV_FIND_LINKS": str(wheels), "UV_CACHE_DIR": str(venv / "cache")}
    done = subprocess.run(
        [ROOT / "scripts" / "install-torch", venv, lock],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        [UV, "pip", "freeze", "--python", venv / "bin/python"],
        env=own,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split(), done.stdout


def test_the_cpu_build_is_taken_where_there_is_one(torch_places: tuple[Path, Path, Path]) -> None:
    wheel(torch_places[1], "torch", "1.2.3+cpu")
    assert install_torch(torch_places) == (["torch==1.2.3+cpu"], "")
    assert install_torch(torch_places) == (["torch==1.2.3+cpu"], "")


def test_the_plain_build_is_taken_else_with_one_line_about_its_size(
    torch_places: tuple[Path, Path, Path],
) -> None:
    installed, printed = install_torch(torch_places)
    assert installed == ["cuda-fake==1.0", "torch==1.2.3"]
    assert re.fullmatch(
        r"setup: no CPU build of torch 1\.2\.3 .* \(2\.6 GB to download, 4\.8 GB on disk\)\n",
        printed,
    )


def test_the_plain_build_is_taken_where_it_was_asked_for(
    torch_places: tuple[Path, Path, Path],
) -> None:
    wheel(torch_places[1], "torch", "1.2.3+cpu")
    assert install_torch(torch_places, PILOTLIGHT_CUDA="1") == (
        ["cuda-fake==1.0", "torch==1.2.3"],
        "",
    )


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", ["3.10", "3.15"])
def test_another_python_is_refused_with_its_version_and_the_way_out(
    tmp_path: Path, version: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "setup", python, tmp_path / "venv"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"is Python {version}; pilotlight needs 3.11 to 3.14" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"PIP_FIND_LINKS": "/a /b"}, "/a,/b||"),
        ({"PIP_FIND_LINKS": "/a", "UV_FIND_LINKS": "/c"}, "/c||"),
        (
            {"PIP_INDEX_URL": "file:///i", "PIP_EXTRA_INDEX_URL": "file:///x\nfile:///y"},
            "|file:///i|file:///x file:///y",
        ),
        ({}, "||"),
    ],
)
def test_pips_configuration_is_passed_on_to_uv(variables: dict[str, str], expected: str) -> None:
    shown = '"${UV_FIND_LINKS:-}|${UV_DEFAULT_INDEX:-}|${UV_INDEX:-}"'
    script = f"set -euo pipefail; . {ROOT}/scripts/uv-settings {sys.executable}; echo {shown}"
    own = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PIP_CONFIG_FILE": "/dev/null",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-c", script], env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected

"""Where an image's packages come from: what the platform built here, a virtual environment, or this
interpreter's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.environment import (
    WORKER_NEEDS,
    add_packages,
    add_runtime,
    built_environment,
    own_environment,
    virtual_environment,
)

DIGEST = "d" * 64
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def built(home: Path) -> Path:
    """An image as the node agent leaves it."""
    folder = home / "node" / "images" / DIGEST
    site = folder / "env" / "lib" / f"python{VERSION}" / "site-packages"
    (site / "numpy" / "__pycache__").mkdir(parents=True)
    (site / "numpy" / "__init__.py").write_text("")
    (site / "numpy" / "__pycache__" / "x.pyc").write_bytes(b"")
    (folder / "files" / "data").mkdir(parents=True)
    (folder / "files" / "data" / "words.txt").write_text("words")
    (folder / "files" / ".absolute" / "models").mkdir(parents=True)
    (folder / "files" / ".absolute" / "models" / "a.bin").write_text("a")
    own = own_environment()
    body = {
        "python": str(own.python),
        "prefix": str(own.prefix),
        "site": [f"env/lib/python{VERSION}/site-packages", "files"],
        "env": {"MODE": "fast"},
    }
    (folder / "image.json").write_text(json.dumps(body))
    return folder


def test_what_the_platform_built_goes_in_with_its_files_and_variables(tmp_path: Path) -> None:
    folder = built(tmp_path)
    environment = built_environment(tmp_path, DIGEST)
    assert (environment.version, environment.variables) == (VERSION, {"MODE": "fast"})
    contents = LayerContents()
    add_packages(contents, environment)
    names = {name for name, entry in contents.entries.items() if entry.source is not None}
    assert names == {
        "opt/pilotlight/site/numpy/__init__.py",
        "opt/pilotlight/files/data/words.txt",
        "models/a.bin",
    }
    (folder / "image.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"image\.json is invalid"):
        built_environment(tmp_path, DIGEST)


def test_links_of_a_built_image_bring_no_file_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("the operator's")
    folder = built(tmp_path)
    site = folder / "env" / "lib" / f"python{VERSION}" / "site-packages"
    (site / "numpy" / "key").symlink_to(secret / "key")
    (folder / "files" / "all").symlink_to(secret)
    contents = LayerContents()
    add_packages(contents, built_environment(tmp_path, DIGEST))
    assert contents.entries["opt/pilotlight/site/numpy/key"].link == str(secret / "key")
    assert contents.entries["opt/pilotlight/files/all"].link == str(secret)
    assert not [
        name
        for name, entry in contents.entries.items()
        if entry.source is not None and secret in entry.source.parents
    ]

    site.rename(tmp_path / "away")
    site.symlink_to(secret)
    with pytest.raises(InvalidInput, match="leads through a symbolic link"):
        built_environment(tmp_path, DIGEST)


@pytest.mark.parametrize("digest", [DIGEST, "../../etc"])
def test_what_was_not_built_here_says_how_to_build_it(tmp_path: Path, digest: str) -> None:
    with pytest.raises(NotFound, match="was not built on this machine") as refused:
        built_environment(tmp_path, digest)
    assert "pilotlight deploy" in str(refused.value.detail["hint"])


def test_a_virtual_environment_needs_what_a_worker_needs(tmp_path: Path) -> None:
    own = own_environment()
    (tmp_path / "pyvenv.cfg").write_text(f"home = {own.prefix}/bin\nversion = {VERSION}.7\n")
    site = tmp_path / "lib" / f"python{VERSION}" / "site-packages"
    site.mkdir(parents=True)
    with pytest.raises(InvalidInput, match="lacks cloudpickle, uvicorn"):
        virtual_environment(tmp_path)
    for name in WORKER_NEEDS:
        (site / f"{name}-1.0.dist-info").mkdir()
    assert virtual_environment(tmp_path).site == (site,)


def test_a_virtual_environment_of_an_interpreter_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /nowhere/bin\nversion = 3.11.7\n")
    with pytest.raises(InvalidInput, match=r"/nowhere/bin/python3\.11 does not exist"):
        virtual_environment(tmp_path)


def test_the_runtime_is_what_workers_import_and_no_server() -> None:
    contents = LayerContents()
    add_runtime(contents)
    names = set(contents.entries)
    assert {
        f"opt/pilotlight/runtime/{name}"
        for name in ("pilotlight/launcher/__main__.py", "weight_cache/errors.py")
    } <= names
    assert not any(
        name.startswith(
            (
                "opt/pilotlight/runtime/pilotlight/controller/",
                "opt/pilotlight/runtime/pilotlight/cli/",
            )
        )
        for name in names
    )
    assert not any("__pycache__" in name for name in names)

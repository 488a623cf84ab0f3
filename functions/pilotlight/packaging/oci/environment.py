"""The environment of a function as contents of an image, below /opt/pilotlight.

/opt/pilotlight/python    interpreter and standard library (relocated: it locates itself by path)
/opt/pilotlight/site      packages
/opt/pilotlight/files     files of `Image.copy`
/opt/pilotlight/runtime   pilotlight, snapshotter, weight_cache
/opt/pilotlight/code      code of the function, with bundle.sha256 next to it
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pilotlight.core.image_steps import ABSOLUTE, check_copy_target
from pilotlight.core.openat2 import check_directory_beneath
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.packaging.oci.contents import LayerContents

ROOT = "opt/pilotlight"
RUNTIME = ("pilotlight", "snapshotter", "weight_cache")
WORKER_NEEDS = ("cloudpickle", "uvicorn", "httptools", "uvloop", "wsproto")
"""Packages that a worker imports: the extra `worker` in pyproject.toml."""
_SERVERS_ONLY = ("pilotlight/cli", "pilotlight/controller", "pilotlight/loadtest")
"""Packages of the platform that no worker imports."""
_NOT_AT_RUN_TIME = (
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "pydoc_data",
    "site-packages",
)
LEFT_OUT = ("_tkinter", "_test", "_xxtestfuzz", "xxlimited")
"""Extension modules of the excluded parts."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter and packages on this machine.

    Attributes:
        version: such as "3.11".
        prefix, python: installation and executable of the interpreter.
        site: directories of packages; empty = those that a worker needs, from the running
            interpreter.
        files: directory of files of `Image.copy`; None for none.
        variables: environment variables of the image.
        is_built: the platform built it for a tenant, so its links may point to any file of this
            machine."""

    version: str
    prefix: Path
    python: Path
    site: tuple[Path, ...] = ()
    files: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    is_built: bool = False

    def library(self) -> Path:
        """Return the directory of the standard library."""
        return self.prefix / "lib" / f"python{self.version}"


def own_environment() -> Environment:
    """Return the running interpreter with only the packages that a worker needs."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    return Environment(version=version, prefix=prefix, python=prefix / "bin" / f"python{version}")


def built_environment(home: Path, digest: str) -> Environment:
    """Return the environment with this digest that the platform at `home` has built. Raises
    NotFound, InvalidInput."""
    images = home / "node" / "images"
    found = [images / digest, *sorted(images.glob(f"{digest}-*"))] if _DIGEST.match(digest) else []
    found = [folder for folder in found if (folder / "image.json").is_file()]
    if len(found) > 1:
        raise InvalidInput(
            f"several tenants have built the environment {digest[:12]}: "
            f"{', '.join(folder.name[64:] or 'shared' for folder in found)}",
            hint=f"Remove those of others from {images}, or specify a venv with --venv.",
        )
    folder = found[0] if found else images / digest
    if not found:
        raise NotFound(
            f"the environment {digest[:12]} was not built on this machine: {folder} does not exist",
            hint="Deploy the app to a platform on this machine first, which builds it "
            "(`pilotlight deploy`), or specify a venv with --venv.",
        )
    try:
        body = json.loads((folder / "image.json").read_bytes())
        python, prefix = Path(body["python"]), Path(body["prefix"])
        version = python.name.removeprefix("python")
        site = tuple(
            check_directory_beneath(folder, str(place))
            for place in body["site"]
            if place != "files"
        )
        variables = {str(key): str(value) for key, value in body["env"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InvalidInput(
            f"{folder}/image.json is invalid: {e!r}. Deploy the app again to rebuild it"
        ) from e
    files = folder / "files"
    return Environment(
        version=version,
        prefix=prefix,
        python=python,
        site=site,
        files=files if files.is_dir() else None,
        variables=variables,
        is_built=True,
    )


def virtual_environment(folder: Path) -> Environment:
    """Return the environment of a venv. Raises InvalidInput."""
    try:
        lines = (folder / "pyvenv.cfg").read_text().splitlines()
    except OSError as e:
        raise InvalidInput(
            f"--venv {folder} is not a virtual environment: {e.strerror or e}", parameter="venv"
        ) from e
    settings = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)
    }
    version = ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])
    prefix = Path(settings.get("home", "/nonexistent")).resolve().parent
    site, python = (
        folder / "lib" / f"python{version}" / "site-packages",
        prefix / "bin" / f"python{version}",
    )
    if not site.is_dir() or not python.is_file():
        raise InvalidInput(
            f"--venv {folder}: {site if python.is_file() else python} does not exist",
            parameter="venv",
        )
    missing = [name for name in WORKER_NEEDS if not list(site.glob(f"{name}-*.dist-info"))]
    if missing:
        raise InvalidInput(
            f"--venv {folder} lacks {', '.join(missing)}, which a worker needs: run pip install "
            f"'pilotlight[worker]' in it",
            parameter="venv",
        )
    return Environment(version=version, prefix=prefix, python=python, site=(site,))


def add_interpreter(contents: LayerContents, environment: Environment) -> None:
    """Add the interpreter and the standard library, without modules for development only. Raises
    OSError."""
    version, library = environment.version, environment.library()
    contents.file(
        f"{ROOT}/python/bin/python{version}", environment.python.resolve(), executable=True
    )
    for name in ("python3", "python"):
        contents.link(f"{ROOT}/python/bin/{name}", f"python{version}")

    def leave(name: str) -> bool:
        parts = PurePosixPath(name).parts
        developing = parts[0] in _NOT_AT_RUN_TIME or parts[0].startswith("config-")
        return (
            developing
            or _is_waste(parts[-1])
            or (parts[0] == "lib-dynload" and parts[-1].startswith(LEFT_OUT))
        )

    contents.tree(f"{ROOT}/python/lib/python{version}", library, leave=leave)


def add_packages(contents: LayerContents, environment: Environment) -> None:
    """Add the packages and the copied files. Raises InvalidInput, OSError."""
    for name in ("site", "files"):
        contents.opaque(f"{ROOT}/{name}")
    for folder in environment.site:
        contents.tree(
            f"{ROOT}/site",
            folder,
            leave=lambda name: _is_waste(PurePosixPath(name).name) or _is_ours(name),
            follow=not environment.is_built,
        )
    if not environment.site:
        for name, path in needed_files(WORKER_NEEDS):
            contents.file(f"{ROOT}/site/{name}", path)
    if environment.files is not None:
        contents.tree(
            f"{ROOT}/files",
            environment.files,
            leave=lambda name: PurePosixPath(name).parts[0] == ABSOLUTE,
            follow=not environment.is_built,
        )
        absolute = environment.files / ABSOLUTE
        if absolute.is_dir() and not absolute.is_symlink():
            for place in sorted(absolute.iterdir()):
                check_copy_target(f"/{place.name}")
                contents.tree(place.name, place, follow=not environment.is_built)


def add_runtime(contents: LayerContents) -> None:
    """Add the packages of the platform. Raises InvalidInput, OSError."""
    contents.opaque(f"{ROOT}/runtime")
    for package in RUNTIME:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise InvalidInput(
                f"package {package} is not installed: run pip install 'pilotlight[all]'"
            )

        def leave(name: str, package: str = package) -> bool:
            return _is_waste(PurePosixPath(name).name) or f"{package}/{name}" in _SERVERS_ONLY

        contents.tree(
            f"{ROOT}/runtime/{package}", Path(spec.submodule_search_locations[0]), leave=leave
        )


def package_trees(environment: Environment) -> tuple[Path, ...]:
    """Return the directories with extension modules that are copied to the image."""
    own = tuple(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    modules = environment.library() / "lib-dynload"
    if environment.site:
        return (
            modules,
            *environment.site,
            *([environment.files] if environment.files is not None else []),
        )
    names = {PurePosixPath(name).parts[0] for name, _ in needed_files(WORKER_NEEDS)}
    return (
        modules,
        *(folder / name for folder in own for name in sorted(names) if (folder / name).is_dir()),
    )


def needed_files(names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files of these distributions and all their dependencies, as (name below
    site-packages, path). Raises InvalidInput."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if (key := re.sub(r"[-_.]+", "-", name).lower()) in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as e:
            raise InvalidInput(
                f"package {name} is not installed: run pip install 'pilotlight[worker]'"
            ) from e
        waiting += [
            match[0]
            for line in distribution.requires or ()
            if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))
        ]
        for file in distribution.files or ():
            if (
                ".." not in file.parts
                and not any(_is_waste(part) for part in file.parts)
                and (path := Path(str(file.locate()))).is_file()
            ):
                yield str(file), path


def _is_waste(name: str) -> bool:
    return name == "__pycache__" or name.endswith((".pyc", ".pyo", ".a", ".pth.bak"))


def _is_ours(name: str) -> bool:
    """Whether `name` belongs to an installation of the platform, which is in the runtime layer."""
    first = name.partition("/")[0]
    return first in RUNTIME or first.startswith(
        ("_pilotlight", "pilotlight-", "_editable_impl_pilotlight")
    )

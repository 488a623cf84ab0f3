"""`Image`: the environment of a function as a list of build steps, content-addressed and built once
by the platform.

Steps are records `{"op": …}`, in the format of the builder (`pilotlight.spec.function.ImageSpec`):

    {"op": "from", "image": "python:3.12-slim"}      as the first step
    {"op": "pip", "packages": [...], "options": [...]}
    {"op": "apt", "packages": [...]}
    {"op": "run", "commands": [...]}
    {"op": "env", "values": {...}}
    {"op": "copy", "blob": sha256, "target": "path"}

A copied file or directory is packed and uploaded at deploy time; until then its step holds the
local path."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pilotlight.core.oci import dockerfile
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk.decorator_metadata import PilotlightWarning
from pilotlight.sdk.unsupported import not_supported, refuse_attributes
from pilotlight.spec.function import ImageSpec

_VERSION = re.compile(r"3\.(\d{1,2})\Z")
_OLDEST_MINOR = 11
"""The worker needs Python 3.11."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """A copy step whose source is not packed yet.

    Attributes:
        source: local path.
        target: path in the environment, relative to its files directory."""

    source: Path
    target: str


@refuse_attributes
@dataclass(frozen=True, slots=True)
class Image:
    """The environment in which a function runs.

    Start with `Image.python("3.11")` and chain methods. An image is immutable: each method returns
    a new image with one more step."""

    python_version: str
    steps: tuple[Mapping[str, Any] | LocalCopy, ...] = ()

    def __repr__(self) -> str:
        version = self.python_version or "of its container image"
        return f"<Image python {version}, {len(self.steps)} steps>"

    @classmethod
    def python(cls, version: str | None = None) -> Image:
        """Create an empty environment with a Python version ("3.11"; None = the running one)."""
        chosen = version or f"{sys.version_info.major}.{sys.version_info.minor}"
        match = _VERSION.match(str(chosen))
        if match is None or int(match[1]) < _OLDEST_MINOR:
            raise InvalidInput(
                f"python version {chosen!r} is invalid: pass a string like '3.11', at least "
                f"3.{_OLDEST_MINOR}",
                parameter="version",
            )
        return cls(chosen)

    @classmethod
    def debian_slim(cls, python_version: str | None = None, **build_options: Any) -> Image:
        """Alias of `Image.python`, for compatibility with Modal."""
        _refuse_options("debian_slim", build_options)
        return cls.python(python_version)

    @classmethod
    def from_registry(cls, tag: str, *, add_python: str | None = None, **unsupported: Any) -> Image:
        """Begin with a container image of a registry, by the name that `docker pull` takes:
        "python:3.12-slim", "registry.example/team/base@sha256:…".

        Its files become the root file system, its environment variables and its Python are used;
        its entrypoint, user and working directory have no effect. `add_python`: a version of this
        machine's Python to use instead ("3.11"), for images that have none. A tag is resolved when
        the image is built; name a digest to get the same files everywhere. The platform must run
        as root, with skopeo."""
        from pilotlight.core.oci.image_reference import check_image_name

        for option in unsupported:
            raise InvalidInput(
                f"from_registry: {option} is not supported: the image must be public; add further "
                f"steps with .run_commands(…)",
                parameter=option,
            )
        try:
            name = check_image_name(tag)
        except ValueError as e:
            raise InvalidInput(f"from_registry: {e}", parameter="tag") from e
        version = "" if add_python is None else cls.python(add_python).python_version
        return cls(version, ({"op": "from", "image": name},))

    @classmethod
    def from_dockerfile(
        cls,
        path: str | os.PathLike[str] = "Dockerfile",
        *,
        context_dir: str | os.PathLike[str] | None = None,
        add_python: str | None = None,
        **unsupported: Any,
    ) -> Image:
        """Translate a Dockerfile of the plain kind into steps: FROM a public image, RUN, COPY, ENV
        and WORKDIR, which applies to the file's own instructions; functions have their working
        directory.

        CMD, ENTRYPOINT, EXPOSE, HEALTHCHECK and LABEL are ignored with a warning; everything else
        is refused with its line: ARG, ADD, several stages, users other than root, options,
        patterns and variables. `context_dir`: what COPY copies from; by default the file's
        directory. `add_python`: as of `from_registry`. Raises InvalidInput, NotFound."""
        for option in unsupported:
            raise InvalidInput(
                f"from_dockerfile: {option} is not supported: add further steps with "
                f".run_commands(…)",
                parameter=option,
            )
        file = Path(path).expanduser()
        try:
            with file.open(encoding="utf-8") as f:
                text = f.read(dockerfile.MAX_BYTES)
        except OSError as e:
            raise NotFound(f"from_dockerfile: {file}: {e.strerror or e}") from e
        context = Path(context_dir).expanduser() if context_dir is not None else file.parent
        try:
            begin, *others = dockerfile.parse(text)
            translation = _Translation(
                cls.from_registry(begin.image(), add_python=add_python), context
            )
            for one in others:
                translation.add(one)
        except ValueError as e:
            raise InvalidInput(f"from_dockerfile: {file}: {e}", parameter="path") from e
        return translation.image

    def pip_install(
        self,
        *packages: str | list[str],
        index_url: str | None = None,
        extra_index_url: str | None = None,
        find_links: str | None = None,
        pre: bool = False,
        extra_options: str = "",
        **build_options: Any,
    ) -> Image:
        """Install Python packages, given as requirements ("torch==2.13.0") or lists of them.

        `index_url`, `extra_index_url`, `find_links` and `pre` are the pip options of that name;
        `extra_options` takes further ones as on a command line. `build_options`: those of Modal
        raise NotSupported."""
        _refuse_options("pip_install", build_options)
        names = _flat("pip_install", packages)
        for name in names:
            if name.startswith("-"):
                raise InvalidInput(
                    f"pip_install: {name!r} is an option, not a package: use extra_options=",
                    parameter="packages",
                )
        options = _pip_options(index_url, extra_index_url, find_links, pre) + shlex.split(
            extra_options
        )
        return self._with({"op": "pip", "packages": names, "options": options})

    uv_pip_install = pip_install

    def pip_install_from_requirements(
        self, requirements_txt: str | os.PathLike[str], **options: Any
    ) -> Image:
        """Install the packages in a requirements file. The file is read immediately, so changing it
        changes the image. Raises NotFound."""
        path = Path(requirements_txt)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as e:
            raise NotFound(f"pip_install_from_requirements: {path}: {e.strerror or e}") from e
        wanted = [
            text
            for line in lines
            if (text := line.partition(" #")[0].strip()) and not text.startswith("#")
        ]
        return self.pip_install(*wanted, **options)

    def apt_install(self, *packages: str | list[str], **build_options: Any) -> Image:
        """Install packages of the node's Debian or Ubuntu release by name ("ffmpeg", "libgl1").

        This gives the image its own root file system, in which later `run` steps run as root. If
        the node cannot create one (it needs root and debootstrap), packages already installed on
        the node are accepted, and the build fails for others."""
        from pilotlight.core.image_steps import check_debian_package_name

        _refuse_options("apt_install", build_options)
        names = _flat("apt_install", packages)
        for name in names:
            try:
                check_debian_package_name(name)
            except ValueError as e:
                raise InvalidInput(f"apt_install: {e}", parameter="packages") from e
        return self._with({"op": "apt", "packages": names})

    def run(self, *commands: str | list[str], **build_options: Any) -> Image:
        """Run shell commands in the environment, in order, once at build time."""
        _refuse_options("run", build_options)
        return self._with({"op": "run", "commands": _flat("run", commands)})

    run_commands = run

    def env(self, variables: Mapping[str, str]) -> Image:
        """Set environment variables for later steps and for instances."""
        for key, value in variables.items():
            if not isinstance(value, str):
                raise InvalidInput(f"Image.env: {key} = {value!r}: must be a string", parameter=key)
        return self._with({"op": "env", "values": dict(variables)})

    def copy(self, source: str | os.PathLike[str], to: str | None = None) -> Image:
        """Copy a local file or directory into the environment, to the path `to` (default: its
        name). A file goes into a directory whose path ends in "/".

        Files at relative paths, or below "/root", are in the working directory of later `run`
        steps, on `sys.path` in instances, and, up to 16 MiB together, in their working directory.
        Others are at that absolute path: in instances, and in later `run` steps of images with a
        root file system of their own (`apt_install`, `from_registry`). Raises InvalidInput for a
        path of the system, as "/usr/x"."""
        from pilotlight.core.image_steps import check_copy_target

        path = Path(source).expanduser().absolute()
        if to is not None and to.endswith("/") and not path.is_dir():
            to += path.name
        try:
            target = str(check_copy_target(to or path.name))
        except ValueError as e:
            raise InvalidInput(f"Image.copy: {e}", parameter="to") from e
        return self._with(LocalCopy(source=path, target=target))

    def add_local_file(
        self, local_path: str | os.PathLike[str], remote_path: str, *, copy: bool = False
    ) -> Image:
        """Alias of `copy` for a file, for compatibility with Modal. The file is always part of the
        image, so `copy=True` changes nothing."""
        return self.copy(local_path, remote_path)

    def add_local_dir(
        self,
        local_path: str | os.PathLike[str],
        remote_path: str,
        *,
        copy: bool = False,
        ignore: Any = (),
    ) -> Image:
        """Alias of `copy` for a directory, for compatibility with Modal, and `copy` as in
        `add_local_file`. `ignore` raises NotSupported."""
        if ignore:
            raise not_supported("Image.…(ignore=…)")
        return self.copy(local_path, remote_path)

    def add_local_python_source(self, *modules: str, **_: Any) -> Image:
        """Do nothing, for compatibility with Modal: source next to the app is always packaged."""
        return self

    @contextlib.contextmanager
    def imports(self) -> Iterator[None]:
        """Guard imports of packages that only the image has: `with image.imports(): import torch`.

        A missing package is ignored on the local machine and raises ImportError in a worker."""
        try:
            yield
        except ImportError:
            if os.environ.get("PILOTLIGHT_WORKER") == "1":
                raise

    @property
    def variables(self) -> dict[str, str]:
        """The merged variables of all `env` steps, which are set in instances."""
        merged: dict[str, str] = {}
        for step in self.steps:
            if isinstance(step, Mapping) and step["op"] == "env":
                merged.update(step["values"])
        return merged

    def spec(self, pack: Callable[[Path, str], str]) -> ImageSpec:
        """Return the record for the builder. `pack(path, name)` packs a directory's content, or a
        file under `name`, and returns the digest of the blob."""
        return ImageSpec(
            python=self.python_version,
            steps=tuple(_packed(s, pack) if isinstance(s, LocalCopy) else s for s in self.steps),
        )

    def _with(self, step: Mapping[str, Any] | LocalCopy) -> Image:
        if isinstance(step, Mapping) and [] in (step.get("packages"), step.get("commands")):
            return self
        return Image(self.python_version, (*self.steps, step))


class _Translation:
    """The instructions of a Dockerfile so far, as an image."""

    def __init__(self, image: Image, context: Path) -> None:
        self.image = image
        self._context = context
        self._directory: PurePosixPath | None = None
        self._directories: set[PurePosixPath] = set()

    def add(self, one: dockerfile.Instruction) -> None:
        """Add one instruction. Raises DockerfileRefused, InvalidInput, NotFound."""
        if one.name in dockerfile.IGNORED:
            text = f"line {one.line}: {one.name} has no effect: functions are no containers"
            warnings.warn(text, PilotlightWarning, stacklevel=3)
        elif one.name == "RUN":
            there = self._directory
            begin = "" if there is None else f"cd {shlex.quote(str(there))} || exit 1\n"
            self.image = self.image.run(begin + one.command())
        elif one.name == "ENV":
            self.image = self.image.env(one.variables())
        elif one.name == "WORKDIR":
            self._enter(self._at(one, one.plain(one.value)))
        elif one.name == "COPY":
            self._copy(one)
        elif one.value not in ("root", "0", "root:root", "0:0"):
            raise one.refused(f"USER {one.value[:40]}", "no USER: functions have one of their own")

    def _enter(self, directory: PurePosixPath) -> None:
        self._directory = directory
        self._directories.add(directory)
        self.image = self.image.run(f"mkdir -p -- {shlex.quote(str(directory))}")

    def _copy(self, one: dockerfile.Instruction) -> None:
        sources, given = one.copies()
        target = self._at(one, given)
        into = len(sources) > 1 or given.endswith(("/", ".")) or target in self._directories
        for name in sources:
            path = self._context / name
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise one.refused(f"{name[:80]!r}, outside of the context", "context_dir=")
            if not path.exists():
                raise NotFound(f"from_dockerfile: line {one.line}: {path} does not exist")
            self._require_inside(one, path)
            if path.is_dir() and (self._context / ".dockerignore").exists():
                raise one.refused(".dockerignore", "COPY of the directories and files by name")
            place = target / path.name if into and not path.is_dir() else target
            self.image = self.image.copy(path, str(place))

    def _require_inside(self, one: dockerfile.Instruction, path: Path) -> None:
        """Refuse links by which files of this machine outside of the context would be copied."""
        context = self._context.resolve()
        links = (
            Path(directory, name)
            for directory, directories, files in os.walk(path)
            for name in (*directories, *files)
            if os.path.islink(os.path.join(directory, name))
        )
        for place in (path, *links):
            if place.exists() and not place.resolve().is_relative_to(context):
                raise one.refused(
                    f"{str(place)[:200]!r}, a link out of the context", "files in the context"
                )

    def _at(self, one: dockerfile.Instruction, given: str) -> PurePosixPath:
        """Where a path leads: below WORKDIR, unless it is absolute."""
        path = PurePosixPath(given)
        if not path.is_absolute():
            if self._directory is None:
                raise one.refused(f"the relative path {given[:80]!r} here", "WORKDIR before it")
            path = self._directory / path
        if path.parts[1:2] == ("root",):
            raise one.refused("/root, the home of functions,", "another directory, such as /app")
        return path


def _refuse_options(method: str, options: Mapping[str, Any]) -> None:
    """Raise NotSupported for an option of Modal's build steps that is set."""
    for name, value in options.items():
        if name not in ("env", "force_build", "gpu", "secrets", "volumes"):
            raise InvalidInput(f"Image.{method}({name}=…): unknown option", parameter=name)
        if value:
            raise not_supported(f"Image.…({name}=…)")


def _packed(step: LocalCopy, pack: Callable[[Path, str], str]) -> Mapping[str, Any]:
    # The builder unpacks a blob into the directory `target`, so a file needs its parent directory.
    target = PurePosixPath(step.target)
    directory = target if step.source.is_dir() else target.parent
    if str(directory) == "/":
        raise InvalidInput(
            f"Image.copy: {step.target!r} is in the root directory: name a directory below it, such "
            f"as '/data/{target.name}'",
            parameter="to",
        )
    return {"op": "copy", "blob": pack(step.source, target.name), "target": str(directory)}


def _flat(method: str, items: tuple[str | list[str], ...]) -> list[str]:
    flat: list[str] = []
    for item in items:
        flat += list(item) if isinstance(item, list | tuple) else [item]
    for text in flat:
        if not str(text).strip():
            raise InvalidInput(f"Image.{method}: an argument is an empty string")
    return flat


def _pip_options(
    index_url: str | None, extra_index_url: str | None, find_links: str | None, pre: bool
) -> list[str]:
    pairs = (
        ("--index-url", index_url),
        ("--extra-index-url", extra_index_url),
        ("--find-links", find_links),
    )
    options = [part for option, value in pairs if value for part in (option, value)]
    return [*options, "--pre"] if pre else options

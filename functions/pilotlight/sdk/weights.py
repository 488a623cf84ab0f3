"""`Weights`: model files by reference, at the same expression everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.types import MAX_NAME_LENGTH

WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""In a worker: a JSON object, mount name → directory."""
_LATER = ("s3://", "hf://", "gs://", "http://", "https://")


class Weights:
    """A directory of model files that instances map instead of carrying along.

    `source` is a local directory, absolute or relative to the file that declares it (if it is not there, to the working
    directory). `path` is that directory here, and the mounted one in a worker. `name` names the mount; it defaults to the
    directory's name.
    """

    def __init__(self, source: str | os.PathLike[str], *, name: str | None = None) -> None:
        self.source = os.fspath(source)
        if self.source.startswith(_LATER):
            raise InvalidInput(
                f"Weights({self.source!r}): only local directories are supported so far; download the files and name their directory",
                parameter="source",
            )
        self._beside = _caller_directory()
        self.name = name or _mount_name(self.source)

    @classmethod
    def from_package(cls, package: str, subdirectory: str = "", *, name: str | None = None) -> Weights:
        """Files that an installed package carries; the package is found, not imported, and is not needed in a worker.

        Raises NotFound when it is not installed here.
        """
        mount = name or _mount_name(subdirectory or package)
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            return cls(package, name=mount)  # `path` finds it among the mounts, or says that the function did not declare it
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise NotFound(f"Weights.from_package({package!r}): no such package is installed here", parameter="package")
        return cls(Path(next(iter(spec.submodule_search_locations))) / subdirectory, name=mount)

    def __repr__(self) -> str:
        return f"<Weights {self.name} from {self.source}>"

    @property
    def path(self) -> Path:
        """The directory with the files. In a worker, raises NotFound when the function did not declare these weights."""
        mounted = _mounted()
        if self.name in mounted:
            return Path(mounted[self.name])
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            raise NotFound(
                f"weights {self.name!r} are not mounted in this worker: declare them, as in @app.cls(weights=…); "
                f"mounted are: {', '.join(sorted(mounted)) or 'none'}"
            )
        return self.directory()

    def directory(self) -> Path:
        """The local directory. Raises NotFound, naming where it was looked for."""
        source = Path(self.source).expanduser()
        candidates = [source] if source.is_absolute() else [self._beside / source, Path.cwd() / source]
        for candidate in candidates:
            if candidate.is_dir():
                return candidate.resolve()
        looked = " and ".join(dict.fromkeys(str(c) for c in candidates))
        raise NotFound(f"weights {self.name!r}: no directory at {looked}")


def _mounted() -> dict[str, str]:
    return dict(json.loads(os.environ.get(WEIGHTS_VARIABLE) or "{}"))


def _caller_directory() -> Path:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    file = frame.f_globals.get("__file__")
    return Path(file).resolve().parent if file else Path.cwd()


def _mount_name(source: str) -> str:
    base = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).name or Path(source).resolve().name)
    name = base.strip("-_")[:MAX_NAME_LENGTH].rstrip("-_")
    return name if name[:1].isalpha() else f"w-{name}".rstrip("-")

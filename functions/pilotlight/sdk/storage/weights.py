"""`Weights`: model files by reference, with the same `path` expression locally and in workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk.secret import Secret
from pilotlight.spec.identifiers import MAX_NAME_LENGTH, require_name

WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""Variable in workers with a JSON object, mount name → directory."""
_WEB = ("http://", "https://")
_ADDRESSES = (*_WEB, "s3://", "hf://")


class Weights:
    """Model files that are mounted into instances, instead of being part of the deployed source.

    `path` is the directory with the files, both locally and in a worker.

    Args:
        source: a directory (absolute, or relative to the declaring file or the working directory),
            `s3://bucket/prefix`, `hf://org/name@revision`, or the `http(s)://` URL of a file or a
            list of such URLs. It is read on the machine that deploys the app.
        name: name of the mount; by default the last part of the source.
        include: patterns of the files to use, such as `["*.safetensors", "*.json"]`, where `*` also
            matches `/`; by default all files.
        secret: credentials for the source, instead of those of the deploying machine: a token for
            the hub or web server, or a Secret with the variables of the client (`HF_TOKEN`,
            `AWS_ACCESS_KEY_ID`, …)."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str],
        *,
        name: str | None = None,
        include: Sequence[str] = (),
        secret: str | Secret | None = None,
    ) -> None:
        self.sources = _sources(source)
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self.secret = secret
        self.registered: str | None = None
        self._beside = _caller_directory()
        self.name = name or _mount_name(_last_part(self.sources))

    @classmethod
    def named(cls, name: str, *, mount: str | None = None) -> Weights:
        """Refer to weights that are on the platform as `name`, stored by `pilotlight weights push`
        or a deploy. The files are not needed locally.

        `mount` names the mount (default: `name`). Raises InvalidInput for an invalid name."""
        weights = cls(require_name("weights", name, parameter="name"), name=mount or name)
        weights.registered = name
        return weights

    @classmethod
    def from_package(
        cls, package: str, subdirectory: str = "", *, name: str | None = None
    ) -> Weights:
        """Use files of an installed package. The package is located without importing it, and is
        not needed in a worker.

        Raises NotFound if the package is not installed."""
        mount = name or _mount_name(subdirectory or package)
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            # `path` finds it among the mounts, or raises NotFound
            return cls(package, name=mount)
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise NotFound(
                f"Weights.from_package({package!r}): the package is not installed",
                parameter="package",
            )
        return cls(Path(next(iter(spec.submodule_search_locations))) / subdirectory, name=mount)

    def __repr__(self) -> str:
        return f"<Weights {self.name} from {self.source}>"

    def __getstate__(self) -> dict[str, object]:
        """The state for pickling with a function, without the secret, which only deploys need."""
        return {**self.__dict__, "secret": None}

    @property
    def source(self) -> str:
        """The declared source for display, without parts of URLs that may be secret."""
        if self.registered is not None:
            return f"the platform's {self.registered}"
        return ", ".join(_without_credentials(source) for source in self.sources)

    @property
    def is_directory(self) -> bool:
        """Whether the files are in a directory of the deploying machine."""
        return self.registered is None and not self.sources[0].startswith(_ADDRESSES)

    @property
    def path(self) -> Path:
        """The directory with the files: the mount in a worker, otherwise the local directory.
        Raises NotFound, in a worker if the function does not declare these weights."""
        mounted = _mounted()
        if self.name in mounted:
            return Path(mounted[self.name])
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            raise NotFound(
                f"weights {self.name!r} are not mounted in this worker: declare them with "
                f"@app.cls(weights=…); mounted weights: {', '.join(sorted(mounted)) or 'none'}"
            )
        return self.directory()

    def directory(self) -> Path:
        """Return the local directory. Raises NotFound, with the searched paths or, for a remote
        source, how to fetch the files."""
        if not self.is_directory:
            pulled = json.dumps({self.name: f"./{self.name}"})
            raise NotFound(
                f"weights {self.name!r} from {self.source} are not on this machine: fetch them "
                f"with `pilotlight weights pull {self.registered or self.name} ./{self.name}`, and "
                f"set {WEIGHTS_VARIABLE}='{pulled}'"
            )
        source = Path(self.sources[0]).expanduser()
        candidates = (
            [source] if source.is_absolute() else [self._beside / source, Path.cwd() / source]
        )
        for candidate in candidates:
            if candidate.is_dir():
                return candidate.resolve()
        looked = " and ".join(dict.fromkeys(str(c) for c in candidates))
        raise NotFound(f"weights {self.name!r}: no directory at {looked}")

    def token(self) -> str | None:
        """Return the secret as a single token, None if it is not one. Raises InvalidInput for a
        secret whose values only the platform has."""
        if self.secret is None or isinstance(self.secret, str):
            return self.secret
        values = self._values(self.secret)
        return (
            next(iter(values.values()))
            if len(values) == 1 and not self.sources[0].startswith("s3://")
            else None
        )

    def variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return `environ` updated with the variables of the secret. Raises InvalidInput like
        `token`."""
        return (
            {**environ, **self._values(self.secret)} if isinstance(self.secret, Secret) else environ
        )

    def _values(self, secret: Secret) -> Mapping[str, str]:
        if secret.values is None:
            raise InvalidInput(
                f"weights {self.name!r}: the values of {secret!r} are only on the platform, but "
                "weights are read on this machine at deploy time: use Secret.from_dotenv() or "
                "Secret.from_dict(), or set the variables in this shell",
                parameter="secret",
            )
        return secret.values


def _sources(source: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """Check and normalize the source. Raises InvalidInput."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if "://" in text and not text.startswith(_ADDRESSES):
            raise InvalidInput(
                f"Weights({text!r}): must be a directory, s3://…, hf://… or http(s)://…",
                parameter="source",
            )
        return (_address(text),) if text.startswith(_ADDRESSES) else (text,)
    sources = tuple(source)
    if not sources or not all(isinstance(s, str) and s.startswith(_WEB) for s in sources):
        raise InvalidInput(
            f"Weights({list(sources)!r}): a list must consist of http(s):// URLs of files",
            parameter="source",
        )
    return tuple(map(_address, sources))


def _address(text: str) -> str:
    """Return `text` if it is a valid URL. Raises InvalidInput without showing it, since it may
    contain a key."""
    try:
        urlsplit(text)
    except ValueError as e:
        raise InvalidInput(f"Weights(…): invalid URL: {e}", parameter="source") from e
    return text


def _last_part(sources: tuple[str, ...]) -> str:
    """Return the last part of a directory, prefix, repository or URL; of several URLs, that of
    their folder."""
    address = urlsplit(sources[0])
    if not sources[0].startswith(_ADDRESSES):
        return Path(sources[0]).name or Path(sources[0]).resolve().name
    path = address.path.partition("@")[0] if address.scheme == "hf" else unquote(address.path)
    folder, _, last = path.rstrip("/").rpartition("/")
    return (folder.rpartition("/")[2] if len(sources) > 1 else last) or address.hostname or ""


def _without_credentials(source: str) -> str:
    """Strip user, password, query and fragment from a URL: they may be secret."""
    if not source.startswith(_WEB):
        return source
    address = urlsplit(source)
    return address._replace(
        netloc=address.netloc.rpartition("@")[2], query="", fragment=""
    ).geturl()


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

"""`Weights`: model files by reference, at the same expression everywhere."""

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
from pilotlight.spec.identifiers import MAX_NAME_LENGTH, check_name

WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""In a worker: a JSON object, mount name → directory."""
_WEB = ("http://", "https://")
_ADDRESSES = (*_WEB, "s3://", "hf://")


class Weights:
    """Model files that instances map instead of carrying along.

    `source`: a directory (absolute, or relative to the file that declares it, or else to the
    working directory), `s3://bucket/prefix`, `hf://org/name@revision`, or the `http(s)://` address
    of a file or a list of them. It is read where the app is deployed, with the credentials there,
    or those of `secret`: a token of the hub or the web server, or a Secret whose variables are the
    ones that such a client looks for (`HF_TOKEN`, `AWS_ACCESS_KEY_ID`, …).

    `include` names the files that are wanted, as in `["*.safetensors", "*.json"]` (`*` also stands
    for `/`); without it, all are.

    `path` is the directory here, and the mounted one in a worker. `name` names the mount; it
    defaults to the last part of the source."""

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
        """Weights that `pilotlight weights push` or a deploy left on the platform under `name`; the
        files are not needed here.

        `mount` names the mount; it defaults to `name`.
        """
        try:
            weights = cls(check_name("weights", name), name=mount or name)
        except ValueError as e:
            raise InvalidInput(str(e), parameter="name") from e
        weights.registered = name
        return weights

    @classmethod
    def from_package(
        cls, package: str, subdirectory: str = "", *, name: str | None = None
    ) -> Weights:
        """Files that an installed package carries; the package is found, not imported, and is not
        needed in a worker.

        Raises NotFound when it is not installed here.
        """
        mount = name or _mount_name(subdirectory or package)
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            # `path` finds it among the mounts, or says that the function did not declare it
            return cls(package, name=mount)
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise NotFound(
                f"Weights.from_package({package!r}): no such package is installed here",
                parameter="package",
            )
        return cls(Path(next(iter(spec.submodule_search_locations))) / subdirectory, name=mount)

    def __repr__(self) -> str:
        return f"<Weights {self.name} from {self.source}>"

    def __getstate__(self) -> dict[str, object]:
        """What travels with a pickled function: not the secret, which only the deploy needs."""
        return {**self.__dict__, "secret": None}

    @property
    def source(self) -> str:
        """What it was declared with, to be shown; without what may be a key in an address."""
        if self.registered is not None:
            return f"the platform's {self.registered}"
        return ", ".join(_shown(source) for source in self.sources)

    @property
    def is_directory(self) -> bool:
        """Whether the files are in a directory of the machine that deploys."""
        return self.registered is None and not self.sources[0].startswith(_ADDRESSES)

    @property
    def path(self) -> Path:
        """The directory with the files. In a worker, raises NotFound when the function did not
        declare these weights."""
        mounted = _mounted()
        if self.name in mounted:
            return Path(mounted[self.name])
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            raise NotFound(
                f"weights {self.name!r} are not mounted in this worker: declare them, as in "
                f"@app.cls(weights=…); "
                f"mounted are: {', '.join(sorted(mounted)) or 'none'}"
            )
        return self.directory()

    def directory(self) -> Path:
        """The local directory. Raises NotFound, naming where it was looked for, or how to get the
        files of a remote source."""
        if not self.is_directory:
            pulled = json.dumps({self.name: f"./{self.name}"})
            raise NotFound(
                f"weights {self.name!r} from {self.source} are not on this machine: fetch them with "
                f"`pilotlight weights pull {self.registered or self.name} ./{self.name}`, and set "
                f"{WEIGHTS_VARIABLE}='{pulled}'"
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
        """The secret as one text, where it is one. Raises InvalidInput for a secret whose values
        only the platform has."""
        if self.secret is None or isinstance(self.secret, str):
            return self.secret
        values = self._values(self.secret)
        return (
            next(iter(values.values()))
            if len(values) == 1 and not self.sources[0].startswith("s3://")
            else None
        )

    def variables(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """`environ` with the secret's variables on top. Raises as `token`."""
        return (
            {**environ, **self._values(self.secret)} if isinstance(self.secret, Secret) else environ
        )

    def _values(self, secret: Secret) -> Mapping[str, str]:
        if secret.values is None:
            raise InvalidInput(
                f"weights {self.name!r}: {secret!r} is on the platform, but weights are read "
                f"here, when the app is deployed: "
                "use Secret.from_dotenv() or Secret.from_dict(), or set the variables in this shell",
                parameter="secret",
            )
        return secret.values


def _sources(source: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """Raises InvalidInput for what can never be read."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if "://" in text and not text.startswith(_ADDRESSES):
            raise InvalidInput(
                f"Weights({text!r}): name a directory, s3://…, hf://… or http(s)://…",
                parameter="source",
            )
        return (_address(text),) if text.startswith(_ADDRESSES) else (text,)
    sources = tuple(source)
    if not sources or not all(isinstance(s, str) and s.startswith(_WEB) for s in sources):
        raise InvalidInput(
            f"Weights({list(sources)!r}): a list names files by http(s):// address, one each",
            parameter="source",
        )
    return tuple(map(_address, sources))


def _address(text: str) -> str:
    """`text`, which has the parts of an address. Raises InvalidInput without showing it: it may
    hold a key."""
    try:
        urlsplit(text)
    except ValueError as e:
        raise InvalidInput(f"Weights(…): an address that is none: {e}", parameter="source") from e
    return text


def _last_part(sources: tuple[str, ...]) -> str:
    """Of a directory, a prefix, a repository, a file on the web, or the folder that several of
    these are in."""
    address = urlsplit(sources[0])
    if not sources[0].startswith(_ADDRESSES):
        return Path(sources[0]).name or Path(sources[0]).resolve().name
    path = address.path.partition("@")[0] if address.scheme == "hf" else unquote(address.path)
    folder, _, last = path.rstrip("/").rpartition("/")
    return (folder.rpartition("/")[2] if len(sources) > 1 else last) or address.hostname or ""


def _shown(source: str) -> str:
    """Addresses without user, password and query: any of these may be a key."""
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

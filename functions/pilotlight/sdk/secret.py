"""`Secret`: environment variables that are stored encrypted and delivered to instances after every
start."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.sdk.decorator_metadata import warn_ignored
from pilotlight.sdk.unsupported import refuse, refuse_attributes
from pilotlight.spec.identifiers import MAX_NAME_LENGTH, require_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@refuse_attributes
class Secret:
    """Environment variables for instances, stored by name on the platform or uploaded with the
    deploy.

    Values never appear in `repr` or in a spec."""

    def __init__(self, *, name: str | None, values: Mapping[str, str] | None) -> None:
        self._name = name
        self.values = values

    def __repr__(self) -> str:
        return (
            f"<Secret {self._name}>"
            if self._name
            else f"<Secret with {', '.join(sorted(self.values or {}))}>"
        )

    @classmethod
    def from_name(
        cls, name: str, *, required_keys: Sequence[str] = (), **modal_options: object
    ) -> Secret:
        """Refer to a secret created with `pilotlight secret`. `required_keys` is ignored with a
        warning; other options of Modal's raise NotSupported."""
        if required_keys:
            warn_ignored("required_keys", "a deploy checks that the secret exists")
        refuse(modal_options, "Secret.from_name")
        return cls(name=require_name("secret", name, parameter="name"), values=None)

    @classmethod
    def from_dict(cls, values: Mapping[str, str | None]) -> Secret:
        """Create a secret from values, which are stored on the platform when the app is deployed.
        Entries with value None are omitted."""
        kept = {key: value for key, value in values.items() if value is not None}
        for key, value in kept.items():
            if not _VARIABLE.match(key) or not isinstance(value, str):
                raise InvalidInput(
                    f"secret variable {key!r}: the name must consist of letters, digits and '_', "
                    "and the value must be a string",
                    parameter=key,
                )
        return cls(name=None, values=kept)

    @classmethod
    def from_dotenv(
        cls, path: str | os.PathLike[str] | None = None, *, filename: str = ".env"
    ) -> Secret:
        """Create a secret from a `.env` file: `KEY=value` lines, `#` comments, optional quotes and
        `export`.

        `path` is the file or its directory; None searches the working directory and its parents. In
        a worker no file is read, because the values come from the platform. Raises NotFound without
        a file, InvalidInput for an invalid line."""
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            return cls(name=None, values={})
        file = _find(Path(path) if path is not None else None, filename)
        return cls.from_dict(parse_dotenv(file.read_text(encoding="utf-8"), str(file)))

    @classmethod
    def from_local_environ(cls, env_keys: list[str]) -> Secret:
        """Create a secret from variables of this process. In a worker none is read, because the
        values come from the platform. Raises InvalidInput for a variable that is not set."""
        if os.environ.get("PILOTLIGHT_WORKER") == "1":
            return cls(name=None, values={})
        for key in env_keys:
            if key not in os.environ:
                raise InvalidInput(f"Secret.from_local_environ: {key} is not set", parameter=key)
        return cls.from_dict({key: os.environ[key] for key in env_keys})

    def stored_name(self, app: str) -> str:
        """Return the name under which the platform stores it: its own, or one derived from the app
        and the variable names.

        It is not derived from the values, because names are not secret and new values must reach
        functions without a new revision."""
        if self._name:
            return self._name
        keys = hashlib.sha256("\n".join(sorted(self.values or {})).encode()).hexdigest()[:10]
        return f"{app[: MAX_NAME_LENGTH - 17]}-inline-{keys}"


def parse_dotenv(text: str, where: str) -> dict[str, str]:
    """Parse the variables of a dotenv file. Raises InvalidInput naming the line."""
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip().removeprefix("export ").strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in stripped.partition("="))
        if not equals or not _VARIABLE.match(key):
            raise InvalidInput(f"{where}:{number}: expected KEY=value")
        values[key] = _unquote(value)
    return values


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        inner = value[1:-1]
        return inner.replace("\\n", "\n").replace('\\"', '"') if value[0] == '"' else inner
    return value.partition(" #")[0].rstrip()


def _find(path: Path | None, filename: str) -> Path:
    if path is not None:
        candidates = [path / filename if path.is_dir() else path]
    else:
        here = Path.cwd()
        candidates = [directory / filename for directory in (here, *here.parents)]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        raise NotFound(f"no {filename} file at {candidates[0]}")
    return found

"""An image's description: parsing and validation of `{"python": "3.11", "steps": [{"op": …}, …]}`.
If the first step is `{"op": "from", "image": …}`, `python` may be "": the container image's own.

The digest of the description as given names the image, so that its author knows the name before it
is built."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.core.image_steps import check_copy_target, check_debian_package_name
from pilotlight.core.oci.image_reference import check_image_name
from snapshotter.errors import ImageBuildFailed, Unsupported

OLDEST_PYTHON = (3, 11)
"""Oldest version that the worker runtime supports (requires-python in pyproject.toml)."""
_VERSION = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_KEYS = {
    "from": {"image"},
    "pip": {"packages", "options"},
    "apt": {"packages"},
    "run": {"commands"},
    "copy": {"blob", "target"},
    "env": {"values"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """One step: `op` is from, pip, apt, run, copy or env; `items` are packages or commands, or the
    container image; the other fields depend on the op."""

    op: str
    items: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    blob: str = ""
    target: str = ""
    values: Mapping[str, str] | None = None

    @property
    def title(self) -> str:
        """A description of the step for progress and errors: `pip install numpy`."""
        words = {
            "from": "from",
            "pip": "pip install",
            "apt": "apt install",
            "run": "run",
            "copy": "copy to",
            "env": "environment",
        }[self.op]
        shown = (
            "; ".join(self.items)
            if self.op == "run"
            else " ".join(self.items) or self.target or ", ".join(self.values or {})
        )
        return f"{words} {shown}"[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """A validated description.

    Attributes:
        python: a version, such as "3.11", of an interpreter of this machine; "": that of the
            container image.
        steps: in order.
    """

    python: str
    steps: tuple[BuildStep, ...]

    @property
    def container_image(self) -> str:
        """The container image that it begins with; "": none."""
        first = self.steps[0] if self.steps else None
        return first.items[0] if first is not None and first.op == "from" else ""


def image_digest(spec: Mapping[str, Any]) -> str:
    """sha256 (hex) of the canonical JSON of `spec` as given: the image's name. Raises
    ImageBuildFailed if JSON cannot represent it."""
    try:
        text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise _broken(
            f"{e.object[e.start : e.end]!r} is half of a character: use valid UTF-8"
        ) from e
    except RecursionError as e:
        raise _broken("it is nested too deeply") from e
    return hashlib.sha256(text).hexdigest()


def parse_image(spec: Mapping[str, Any]) -> ImagePlan:
    """Validate `spec`. Raises ImageBuildFailed (`step` is "description"), or Unsupported for what
    only a container could do."""
    steps = spec.get("steps", [])
    if not isinstance(steps, list | tuple):
        raise _broken(f"steps = {_format(steps)}: expected a list")
    parsed = tuple(_step(i, s) for i, s in enumerate(steps))
    has_own = bool(parsed) and parsed[0].op == "from"
    return ImagePlan(python=_python(spec.get("python"), has_own=has_own), steps=parsed)


def _python(python: Any, *, has_own: bool) -> str:
    if has_own and python == "":
        return ""
    if not isinstance(python, str) or not _VERSION.match(python):
        raise _broken(f"python = {_format(python)}: expected a version such as '3.11'")
    if tuple(int(part) for part in python.split(".")) < OLDEST_PYTHON:
        raise Unsupported(
            f"python {python} is too old: the worker requires "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer in every image"
        )
    return python


def _step(index: int, body: Any) -> BuildStep:
    where = f"steps[{index}]"
    op = body.get("op") if isinstance(body, Mapping) else None
    if not isinstance(op, str) or op not in _KEYS:
        raise _broken(
            f"{where} = {_format(body)}: expected an object whose op is one of {', '.join(_KEYS)}"
        )
    if unknown := sorted(set(body) - _KEYS[op] - {"op"}):
        raise _broken(
            f"{where}: unknown key {_format(unknown[0])} of {op}; known: "
            f"{', '.join(sorted(_KEYS[op]))}"
        )
    if op == "from":
        return _from(index, body, where)
    if op == "copy":
        return BuildStep(
            op=op,
            blob=_text(body, "blob", where),
            target=_target(_text(body, "target", where), where),
        )
    if op == "env":
        return BuildStep(op=op, values=_variables(body.get("values"), where))
    if op == "run":
        return BuildStep(op=op, items=_texts(body, "commands", where))
    packages = _texts(body, "packages", where)
    for package in packages:
        if op == "pip" and package.startswith("-"):
            raise _broken(
                f"{where}: {_format(package)} is not a package name; put options into `options`"
            )
        if op == "apt":
            _check_debian(package, where)
    return BuildStep(
        op=op,
        items=packages,
        options=_texts(body, "options", where) if op == "pip" and "options" in body else (),
    )


def _from(index: int, body: Mapping[str, Any], where: str) -> BuildStep:
    if index:
        raise _broken(
            f"{where}: an image begins with at most one container image, as its first step"
        )
    try:
        return BuildStep(op="from", items=(check_image_name(body.get("image")),))
    except ValueError as e:
        raise _broken(f"{where}.image: {e}") from e


def _is_text(value: Any) -> bool:
    """Whether this can be a program argument: UTF-8 without NUL."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can represent
        return False


def _texts(body: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = body.get(key, [])
    if not isinstance(value, list | tuple) or not all(_is_text(v) and v for v in value):
        raise _broken(f"{where}.{key} = {_format(value)}: expected a list of strings")
    return tuple(value)


def _text(body: Mapping[str, Any], key: str, where: str) -> str:
    value: Any = body.get(key)
    if not _is_text(value) or not value:
        raise _broken(f"{where}.{key} = {_format(value)}: expected a string")
    return str(value)


def _target(target: str, where: str) -> str:
    try:
        return str(check_copy_target(target))
    except ValueError as e:
        raise _broken(f"{where}.target: {e}") from e


def _check_debian(package: str, where: str) -> None:
    try:
        check_debian_package_name(package)
    except ValueError as e:
        raise _broken(f"{where}: {e}") from e


def _variables(values: Any, where: str) -> Mapping[str, str]:
    if not isinstance(values, Mapping) or not all(
        _is_text(v) and _VARIABLE.match(k) for k, v in values.items()
    ):
        raise _broken(
            f"{where}.values = {_format(values)}: expected an object of strings whose keys are "
            f"variable names"
        )
    return dict(values)


def _format(value: Any) -> str:
    """`value` as ASCII, short enough for a message."""
    try:
        return ascii(value)[:200]
    except RecursionError:
        return "a value that is nested too deeply"


def _broken(message: str) -> ImageBuildFailed:
    return ImageBuildFailed(
        f"invalid image description: {message}", {"step": "description", "log_tail": []}
    )

"""Precompiled bytecode for images, whose file system is read-only: without it each start would
compile the standard library.

The files are never compared with their source (PEP 552, unchecked hash), since files of an image do
not change. The bytes of a compiled module depend on the history of the process (references to
interned strings), so a new process compiles all modules in a fixed order."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotlight.errors import InvalidInput
from pilotlight.packaging.oci.contents import LayerContents, LayerEntry

_TIMEOUT_S = 1800
_PROGRAM = """
import importlib.util, json, os, sys, warnings
from importlib._bootstrap_external import _code_to_hash_pyc
warnings.simplefilter("ignore")
for line in sys.stdin:
    name, source, target = json.loads(line)
    with open(source, "rb") as file:
        text = file.read()
    try:
        code = compile(text, name, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        continue  # test data, or a template: importing it would fail, too
    with open(target, "wb") as file:
        file.write(_code_to_hash_pyc(code, importlib.util.source_hash(text), False))
print(sys.implementation.cache_tag)
"""


@contextmanager
def with_bytecode(contents: LayerContents, *, python: Path) -> Iterator[LayerContents]:
    """Yield `contents` with a compiled module added for each module that compiles. The compiled
    files are deleted at the end of the context."""
    modules = [
        (name, entry)
        for name, entry in sorted(contents.entries.items())
        if name.endswith(".py") and not entry.is_directory
    ]
    with tempfile.TemporaryDirectory(prefix="plpyc") as folder:
        orders, targets = [], {}
        for number, (name, entry) in enumerate(modules):
            if (source := _source(entry, Path(folder) / f"{number}.py")) is not None:
                targets[name] = Path(folder) / f"{number}.pyc"
                orders.append(json.dumps([f"/{name}", str(source), str(targets[name])]))
        tag = _compile(python, orders)
        made = LayerContents(dict(contents.entries))
        for name, target in targets.items():
            if target.exists():
                parent, _, file = name.rpartition("/")
                made.file(f"{parent}/__pycache__/{file.removesuffix('.py')}.{tag}.pyc", target)
        yield made


def _source(entry: LayerEntry, scratch: Path) -> Path | None:
    if entry.content is not None:
        scratch.write_bytes(entry.content)
        return scratch
    return entry.source


def _compile(python: Path, orders: list[str]) -> str:
    environ = {"PYTHONHASHSEED": "0", "PATH": os.environ.get("PATH", os.defpath)}
    try:
        done = subprocess.run(
            [str(python), "-I", "-S", "-B", "-c", _PROGRAM],
            input="\n".join(orders).encode(),
            stdout=subprocess.PIPE,
            check=True,
            env=environ,
            timeout=_TIMEOUT_S,
        )
    except (subprocess.SubprocessError, OSError) as e:
        raise InvalidInput(f"{python} could not compile the modules of the image: {e}") from e
    return done.stdout.decode().strip()

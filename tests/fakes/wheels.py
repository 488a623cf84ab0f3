"""Small packages for tests of pip."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, *, requires: str = "") -> None:
    """A wheel with one module `name` that knows its version."""
    info = f"{name}-{version}.dist-info"
    described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": described,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: "
        "py3-none-any\n",
    }
    _write(folder / f"{name}-{version}-py3-none-any.whl", info, _encoded(files))


def repack_installed(folder: Path, names: Iterable[str]) -> None:
    """Wheels of packages that are installed here, without their scripts."""
    for name in names:
        found = metadata.distribution(name)
        files = {
            str(file): Path(str(file.locate())).read_bytes()
            for file in found.files or ()
            if ".." not in file.parts and file.suffix != ".pyc"
        }
        info = next(str(Path(file).parent) for file in files if file.endswith(".dist-info/WHEEL"))
        wheel = files[f"{info}/WHEEL"].decode()
        tag = next(line[5:] for line in wheel.splitlines() if line.startswith("Tag: "))
        del files[f"{info}/RECORD"]
        _write(folder / f"{info.removesuffix('.dist-info')}-{tag}.whl", info, files)


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}


def _write(path: Path, info: str, files: Mapping[str, bytes]) -> None:
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for name, data in files.items()
    ]
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")

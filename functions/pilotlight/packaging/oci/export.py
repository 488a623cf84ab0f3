"""Export of a function as a container image: layers by rate of change, the launcher as entrypoint,
an unprivileged user.

Without a base, the image contains the interpreter and all shared libraries including the loader.
With a base, these come from the base, which needs an interpreter of the same version."""

from __future__ import annotations

import datetime as dt
import io
import platform
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.packaging.oci import environment as places
from pilotlight.packaging.oci.bytecode import with_bytecode
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.environment import ROOT, Environment
from pilotlight.packaging.oci.layers import Layer, unpack_names, write_layer
from pilotlight.packaging.oci.layout import (
    BaseImage,
    copy_base_layers,
    create_layout,
    read_base,
    write_image,
)
from pilotlight.packaging.oci.libraries import (
    LibrariesMissing,
    LibraryClosure,
    find_library_closure,
)

USER = 65532
"""An unprivileged user. Pods override it with the user of their tenant."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_MOUNT_POINTS = ("dev", "proc", "sys", "run", "usr", "scratch", "pilotlight", "etc/pilotlight")
"""Mount points of a pod, which must exist because the root is read-only; of `/run` and `/usr` a
restored worker sees the node agent's."""
_PYTHON = re.compile(r"(?:usr/local|usr|opt/[\w./-]+)/bin/python(3\.\d+)\Z")

MessageCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCode:
    """The code of a function: the archive of the bundle, its digest (hex), and the names of app and
    function."""

    bundle: bytes
    digest: str
    app: str
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export. `digest`: that of the image in a registry (`sha256:…`). `missing`:
    libraries that were not found."""

    digest: str
    output: Path
    layers: tuple[Layer, ...]
    missing: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Compressed size of the layers."""
        return sum(layer.size_bytes for layer in self.layers)


def export_image(
    code: FunctionCode | None,
    environment: Environment,
    output: Path,
    *,
    base: Path | None = None,
    tag: str,
    epoch_s: int,
    say: MessageCallback = lambda _: None,
) -> ExportResult:
    """Write the image as an OCI layout to `output`. Raises InvalidInput.

    `code`: None for an image of the environment alone, in which the node agent provides the code.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise InvalidInput(
            f"machines of type {platform.machine()} are not supported, only "
            f"{', '.join(_ARCHITECTURES)}"
        )
    found = read_base(base, architecture=architecture) if base is not None else BaseImage()
    python = (
        f"/{ROOT}/python/bin/python{environment.version}"
        if base is None
        else f"/{_python_of(found, environment.version)}"
    )
    try:
        blobs = create_layout(output)
        copy_base_layers(found, blobs)
        layers, missing = list(found.layers), dict[str, str]()
        if base is None:
            say("interpreter and libraries")
            needed = find_library_closure(
                environment.python.resolve(),
                trees=places.package_trees(environment),
                without=places.LEFT_OUT,
            )
            missing = needed.missing
            layers += _system_layers(environment, needed, blobs, epoch_s)
        for title, fill in (
            ("packages", places.add_packages),
            ("runtime", lambda contents, _: places.add_runtime(contents)),
        ):
            say(title)
            layers.append(_layer(title, fill, environment, blobs, epoch_s))
        if code is not None:
            say("code")
            layers.append(_code_layer(code, environment, blobs, epoch_s))
        config = _configuration(
            code,
            environment,
            found,
            layers,
            python=python,
            architecture=architecture,
            epoch_s=epoch_s,
        )
        digest = write_image(output, layers, config=config, tag=tag)
    except (OSError, ValueError, tarfile.TarError, LibrariesMissing) as e:
        raise InvalidInput(f"the image cannot be written to {output}: {e}") from e
    return ExportResult(digest=digest, output=output, layers=tuple(layers), missing=missing)


def _system_layers(
    environment: Environment, needed: LibraryClosure, blobs: Path, epoch_s: int
) -> list[Layer]:
    system = LayerContents()
    system.directory("tmp", mode=0o1777)
    for name in _MOUNT_POINTS:
        system.directory(name)
    system.text(
        "etc/passwd",
        f"root:x:0:0:root:/:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/tmp:/sbin/nologin\n",
    )
    system.text("etc/group", f"root:x:0:\nnonroot:x:{USER}:\n")
    system.text("etc/nsswitch.conf", "hosts: files dns\n")
    system.file(needed.loader, needed.loader_file.resolve(), executable=True)
    for name, path in needed.files.items():
        system.file(f"{needed.folder}/{name}", path.resolve(), executable=True)
    if _CERTIFICATES.is_file():
        system.file(str(_CERTIFICATES), _CERTIFICATES)
    return [
        write_layer(system, blobs, title="system libraries", epoch_s=epoch_s),
        _layer("interpreter", places.add_interpreter, environment, blobs, epoch_s),
    ]


def _code_layer(code: FunctionCode, environment: Environment, blobs: Path, epoch_s: int) -> Layer:
    def fill(contents: LayerContents, _: Environment) -> None:
        _add_code(contents, code)

    return _layer(f"code of {code.app}/{code.function}", fill, environment, blobs, epoch_s)


def _layer(
    title: str,
    fill: Callable[[LayerContents, Environment], None],
    environment: Environment,
    blobs: Path,
    epoch_s: int,
) -> Layer:
    contents = LayerContents()
    fill(contents, environment)
    with with_bytecode(contents, python=environment.python) as whole:
        return write_layer(whole, blobs, title=title, epoch_s=epoch_s)


def _add_code(contents: LayerContents, code: FunctionCode) -> None:
    contents.opaque(f"{ROOT}/code")
    with tarfile.open(fileobj=io.BytesIO(code.bundle), mode="r:gz") as bundle:
        for member in bundle:
            name = f"{ROOT}/code/{member.name}"
            if ".." in PurePosixPath(member.name).parts or member.name.startswith("/"):
                raise ValueError(f"{member.name!r} is outside the bundle")
            if member.issym():
                contents.link(name, member.linkname)
            elif (file := bundle.extractfile(member)) is not None:
                contents.text(name, file.read())
    contents.text(f"{ROOT}/bundle.sha256", f"{code.digest}\n")


def _python_of(base: BaseImage, version: str) -> str:
    """Return the path of the interpreter of this version in the base, from the last layer that has
    one."""
    others: set[str] = set()
    for layer in reversed(base.layers):
        assert base.blobs is not None
        try:
            names = unpack_names(
                base.blobs / layer.digest.removeprefix("sha256:"), layer.media_type, _PYTHON
            )
        except (OSError, ValueError) as e:
            raise InvalidInput(
                f"--base: layer {layer.digest[7:19]} cannot be read: {e}", parameter="base"
            ) from e
        found = {name: match[1] for name in sorted(names) if (match := _PYTHON.match(name))}
        for name, its in found.items():
            if its == version:
                return name
        others |= set(found.values())
    has = f"it has {', '.join(sorted(others))}" if others else "it has none"
    raise InvalidInput(
        f"--base has no Python {version}, which the environment of the function requires: {has}",
        parameter="base",
    )


def _configuration(
    code: FunctionCode | None,
    environment: Environment,
    base: BaseImage,
    layers: Sequence[Layer],
    *,
    python: str,
    architecture: str,
    epoch_s: int,
) -> dict[str, Any]:
    created = dt.datetime.fromtimestamp(epoch_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    before: Mapping[str, Any] = base.config.get("config") or {}
    inherited = dict(line.partition("=")[::2] for line in before.get("Env") or [])
    variables = {
        "PATH": f"/{ROOT}/python/bin:/usr/local/bin:/usr/bin:/bin",
        **inherited,
        **(
            {"SSL_CERT_FILE": str(_CERTIFICATES)}
            if not base.layers and _CERTIFICATES.is_file()
            else {}
        ),
        **environment.variables,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(f"/{ROOT}/{name}" for name in ("site", "files", "runtime")),
    }
    labels = {
        **(before.get("Labels") or {}),
        **(_labels(code) if code is not None else {}),
        "dev.pilotlight.version": metadata.version("pilotlight"),
    }
    known = list(base.config.get("history") or [])
    new = [
        {"created": created, "created_by": f"pilotlight image export: {layer.title}"}
        for layer in layers[len(base.layers) :]
    ]
    return {
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Env": [f"{name}={value}" for name, value in sorted(variables.items())],
            "Entrypoint": [python, "-m", "pilotlight.launcher"],
            "WorkingDir": "/",
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": known + new,
    }


def _labels(code: FunctionCode) -> dict[str, str]:
    return {
        "dev.pilotlight.app": code.app,
        "dev.pilotlight.function": code.function,
        "dev.pilotlight.bundle": code.digest,
    }


def source_date_epoch(environ: Mapping[str, str]) -> int:
    """Return SOURCE_DATE_EPOCH, or 0 if not set. Raises InvalidInput."""
    text = environ.get("SOURCE_DATE_EPOCH", "0")
    if not text.isdigit() or int(text) > 253402300799:
        raise InvalidInput(
            f"SOURCE_DATE_EPOCH = {text!r}: must be an integer, the seconds since 1970",
            parameter="SOURCE_DATE_EPOCH",
        )
    return int(text)

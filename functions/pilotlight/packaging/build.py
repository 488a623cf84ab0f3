"""`build`: an App becomes records to send: blobs by digest, images to build, secrets to store, and the FunctionSpecs that name them.

No network here. What is built is deterministic for functions of modules: the same source gives the same specs, so deploying twice
creates no revision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.errors import InvalidInput
from pilotlight.packaging.archive import DEFAULT_LIMIT_BYTES, Archive, pack_files, pack_tree
from pilotlight.packaging.source import Source, notebook_files, source_of
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.image import Image
from pilotlight.sdk.pickling import dumps
from pilotlight.sdk.running import APP_VARIABLE
from pilotlight.sdk.weights import Weights
from pilotlight.spec import FunctionSpec, ImageSpec, WeightsSpec

if TYPE_CHECKING:
    from pilotlight.sdk.app import App

Blob = bytes | Path
Say = Callable[[str, int, int], None]
"""Told (what, bytes done, bytes in all) while weights are hashed."""

_PICKLES = ".pilotlight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Everything that a deploy sends.

    Attributes:
        app: name to deploy under.
        functions: the specs; they name images and blobs by digest and secrets by name.
        images: digest → description of each environment to build, before the deploy.
        blobs: sha256 → content, or the file that holds it.
        files: digest (`weight_cache.manifest.file_digest`) → the file of weights that has it.
        secrets: name → variables of the secrets whose values the app itself brings.
    """

    app: str
    functions: tuple[FunctionSpec, ...]
    images: Mapping[str, ImageSpec]
    blobs: Mapping[str, Blob]
    files: Mapping[str, Path]
    secrets: Mapping[str, Mapping[str, str]]


def build(app: App, *, name: str | None = None, limit_bytes: int = DEFAULT_LIMIT_BYTES, say: Say | None = None) -> Build:
    """Package `app`, to be deployed as `name` (default: its own). Raises InvalidInput, NotFound or TooLarge."""
    if not app.declarations:
        raise InvalidInput(f"app {app.name!r} declares nothing: decorate a function with @app.function() or a class with @app.cls()")
    builder = _Builder(app, name or app.name, limit_bytes, say)
    functions = tuple(builder.function(d) for d in app.declarations.values())
    return Build(
        app=builder.name,
        functions=functions,
        images=builder.images,
        blobs=builder.blobs,
        files=builder.files,
        secrets=builder.secrets,
    )


@dataclass(slots=True)
class _Builder:
    """Collects what the specs name. Owned by one `build`; each source, image and model is packed once."""

    app: App
    name: str
    limit_bytes: int
    say: Say | None
    images: dict[str, ImageSpec] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    secrets: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _bundles: dict[Path | None, Archive] = field(default_factory=dict)
    _manifests: dict[Path, str] = field(default_factory=dict)

    def function(self, declaration: Declaration) -> FunctionSpec:
        """The spec of one declaration; what it names is collected on the way."""
        source = source_of(declaration)
        image = declaration.image
        return FunctionSpec(
            name=declaration.name,
            kind=declaration.kind,
            module=source.module,
            qualname="" if declaration.by_value else declaration.raw.__qualname__,
            pickled=_pickle_name(declaration) if declaration.by_value else None,
            bundle=self._bundle(source).digest,
            image=self._image(image) if image is not None else None,
            methods=declaration.methods(),
            resources=declaration.resources,
            scaling=declaration.scaling,
            clocks=declaration.clocks,
            weights=self._weights(declaration),
            secrets=self._secrets(declaration),
            env=self._env(declaration),
            snapshot=declaration.snapshot,
            idempotent=declaration.idempotent,
            description=declaration.description,
        )

    def _bundle(self, source: Source) -> Archive:
        if source.root not in self._bundles:
            pickles = self._pickles(source.root)
            if source.root is None:
                archive = pack_files(notebook_files(Path.cwd()), extra=pickles, limit_bytes=self.limit_bytes)
            else:
                models = {w.directory() for d in self.app.declarations.values() for w in d.weights}
                archive = pack_tree(source.root, extra=pickles, exclude=models, limit_bytes=self.limit_bytes)
            self._bundles[source.root] = archive
            self.blobs[archive.digest] = archive.data
        return self._bundles[source.root]

    def _pickles(self, root: Path | None) -> dict[str, bytes]:
        travelling = [d for d in self.app.declarations.values() if d.by_value and source_of(d).root == root]
        return {_pickle_name(d): _pickled(d) for d in travelling}

    def _image(self, image: Image) -> str:
        def pack(path: Path, name: str) -> str:
            if path.is_dir():
                archive = pack_tree(path, respect_ignore=False, limit_bytes=self.limit_bytes)
            elif path.is_file():
                archive = pack_files({name: path}, limit_bytes=self.limit_bytes)
            else:
                raise InvalidInput(f"Image.copy: there is nothing at {path}", parameter="source")
            self.blobs[archive.digest] = archive.data
            return archive.digest

        spec = image.spec(pack)
        digest = spec.digest()
        self.images[digest] = spec
        return digest

    def _weights(self, declaration: Declaration) -> tuple[WeightsSpec, ...]:
        names = [w.name for w in declaration.weights]
        if len(set(names)) != len(names):
            raise InvalidInput(f"{declaration.name}: two of its weights are named {max(names, key=names.count)!r}: give one a name=")
        return tuple(WeightsSpec(name=w.name, manifest=self._manifest(w)) for w in declaration.weights)

    def _manifest(self, weights: Weights) -> str:
        from weight_cache.errors import ManifestInvalid
        from weight_cache.manifest import build_manifest

        directory = weights.directory()
        if directory not in self._manifests:
            say = self.say
            try:
                manifest = build_manifest(directory, progress=(lambda d, t: say(f"weights {weights.name}", d, t)) if say else None)
            except (ManifestInvalid, OSError) as e:
                raise InvalidInput(f"weights {weights.name!r}: {e}", parameter="weights") from e
            self.files.update({f.digest: directory / f.path for f in manifest.files})
            raw = manifest.to_bytes()
            self.blobs[hashlib.sha256(raw).hexdigest()] = raw
            self._manifests[directory] = manifest.digest
        return self._manifests[directory]

    def _secrets(self, declaration: Declaration) -> tuple[str, ...]:
        names: list[str] = []
        for secret in declaration.secrets:
            stored = secret.stored_name(self.name)
            if secret.values is not None:
                self.secrets[stored] = secret.values
            names.append(stored)
        return tuple(dict.fromkeys(names))

    def _env(self, declaration: Declaration) -> dict[str, str]:
        env = {**(declaration.image.variables if declaration.image else {}), **declaration.env}
        return env if self.name == self.app.name else {**env, APP_VARIABLE: f"{self.app.name}={self.name}"}


def _pickle_name(declaration: Declaration) -> str:
    return f"{_PICKLES}/{declaration.name}.pkl"


def _pickled(declaration: Declaration) -> bytes:
    try:
        return dumps(declaration.raw)
    except InvalidInput as e:
        raise InvalidInput(
            f"{declaration.name} is defined in a script or notebook, so it travels by value, and something that it uses cannot: {e}. "
            "Make that thing inside the function, or move the function into a module.",
            parameter=declaration.name,
        ) from e

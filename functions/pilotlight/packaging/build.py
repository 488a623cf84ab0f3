"""`build`: converts an App to the records of a deploy: blobs by digest, images to build, secrets to
store, and the FunctionSpecs that refer to them.

It uses the network only to read remote weights. For functions in modules it is deterministic: the
same source results in the same specs, so deploying twice creates no revision."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pilotlight.client.pickling import dumps
from pilotlight.errors import InvalidInput
from pilotlight.packaging.archive import DEFAULT_LIMIT_BYTES, Archive, pack_files, pack_tree
from pilotlight.packaging.source import SourceTree, find_source_tree, notebook_files
from pilotlight.packaging.vllm import resolve_engine
from pilotlight.packaging.weights_pull import BlobReader, fetch_manifest
from pilotlight.packaging.weights_push import (
    Blob,
    HashProgress,
    PreparedWeights,
    SourceBody,
    prepare_weights,
    source_errors_as_invalid_input,
)
from pilotlight.sdk.active_app import APP_VARIABLE
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.declared_app import DeclaredApp
from pilotlight.sdk.decorator_metadata import PilotlightWarning
from pilotlight.sdk.image import Image
from pilotlight.sdk.llm import EngineDeclaration
from pilotlight.sdk.sandboxes.declaration import SandboxDeclaration
from pilotlight.sdk.storage.weights import Weights
from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.function import FunctionSpec, ImageSpec, WeightsSpec
from pilotlight.spec.instances.volumes import VolumeSpec
from pilotlight.spec.policies import ModelCard

if TYPE_CHECKING:
    from weight_cache.manifest import Manifest, ManifestFile
    from weight_cache.sources import Source as Origin

Named = Callable[[str], str]
"""Returns the digest of the manifest that the platform has under a name. Raises NotFound."""
Unread = Callable[[str, InvalidInput], str]
"""Returns a placeholder digest for the manifest of weights that cannot be read, for builds that are
not deployed: name, error → digest."""

_PICKLES = ".pilotlight"
MODEL_CARD = "model_card.json"
"""Name of the model card among weights."""
MAX_CARD_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Everything that a deploy sends. A context manager that closes the sources of weights.

    Attributes:
        app: name to deploy under.
        functions: the specs, which refer to images and blobs by digest and to secrets by name.
        images: digest → description of each environment to build before the deploy.
        blobs: digest → content of bundles, and of files of weights followed by their manifests.
        sources: open sources of the weights.
        secrets: name → variables of secrets whose values are part of the app.
        volumes: names of volumes to create where they are missing.
        homes: homes of platforms that were left out of the source."""

    app: str
    functions: tuple[FunctionSpec, ...]
    images: Mapping[str, ImageSpec]
    blobs: Mapping[str, Blob]
    sources: tuple[Origin, ...]
    secrets: Mapping[str, Mapping[str, str]]
    volumes: frozenset[str]
    homes: tuple[Path, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for source in self.sources:
            source.close()


def build(
    app: DeclaredApp,
    *,
    name: str | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    say: HashProgress | None = None,
    named: Named | None = None,
    remote: BlobReader | None = None,
    unread: Unread | None = None,
) -> Build:
    """Package `app`, to be deployed as `name` (default: its name). Raises InvalidInput, NotFound or
    TooLarge.

    Args:
        say: callback for the progress of hashing.
        named, remote: look up the manifests of `Weights.named`, and their files.
        unread: handles weights that cannot be read; None = an error."""
    if not app.declarations:
        raise InvalidInput(
            f"app {app.name!r} has no functions: decorate a function with @app.function() or a "
            f"class with @app.cls()"
        )
    builder = _Builder(app, name or app.name, limit_bytes, say, named, remote, unread)
    try:
        functions = tuple(builder.function(d) for d in app.declarations.values())
    except BaseException:
        builder.close()
        raise
    return Build(
        app=builder.name,
        functions=functions,
        images=builder.images,
        blobs=builder.blobs,
        sources=tuple(builder.sources),
        secrets=builder.secrets,
        volumes=frozenset(builder.volumes),
        homes=tuple(dict.fromkeys(builder.homes)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The code and environment of one function: its bundle, and the description of its image with
    its digest (None: no image)."""

    bundle: bytes
    bundle_digest: str
    image: ImageSpec | None
    image_digest: str | None


def pack_function(
    app: DeclaredApp, declaration: Declaration, *, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> Packed:
    """Package one function of `app` as for a deploy, without weights. Raises InvalidInput or
    TooLarge."""
    if isinstance(declaration, EngineDeclaration):
        raise InvalidInput(
            f"{declaration.name} is a language model: it runs a stock engine and has no user code",
            hint="Build deploy/kubernetes/docker/runtime-vllm.Dockerfile, and set "
            "cluster.images.vllm to the result.",
        )
    builder = _Builder(app, app.name, limit_bytes, None, None, None)
    digest = builder._image(declaration.image) if declaration.image is not None else None
    bundle = builder._bundle(find_source_tree(declaration))
    image = builder.images[digest] if digest is not None else None
    return Packed(bundle=bundle.data, bundle_digest=bundle.digest, image=image, image_digest=digest)


def pack_images(
    app: DeclaredApp, declarations: Iterable[Declaration]
) -> tuple[Mapping[str, ImageSpec], Mapping[str, Blob]]:
    """Package the images of these functions: descriptions by digest, and the archives of their copy
    steps. Raises InvalidInput or TooLarge."""
    builder = _Builder(app, app.name, DEFAULT_LIMIT_BYTES, None, None, None)
    for declaration in declarations:
        if declaration.image is not None:
            builder._image(declaration.image)
    return builder.images, builder.blobs


def copies_of(spec: ImageSpec, blobs: Mapping[str, Blob]) -> dict[str, bytes]:
    """Return the archives of an image's copy steps, by digest."""
    found = {
        str(step["blob"]): blobs[str(step["blob"])] for step in spec.steps if step["op"] == "copy"
    }
    return {digest: blob for digest, blob in found.items() if isinstance(blob, bytes)}


@dataclass(slots=True)
class _Builder:
    """Collects what the specs refer to, for one `build`. Each source, image and model is packed
    once."""

    app: DeclaredApp
    name: str
    limit_bytes: int
    say: HashProgress | None
    named: Named | None
    remote: BlobReader | None
    unread: Unread | None = None
    images: dict[str, ImageSpec] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    sources: list[Origin] = field(default_factory=list)
    secrets: dict[str, Mapping[str, str]] = field(default_factory=dict)
    volumes: set[str] = field(default_factory=set)
    homes: list[Path] = field(default_factory=list)
    _bundles: dict[Path | None, Archive] = field(default_factory=dict)
    _models: dict[tuple[tuple[str, ...], tuple[str, ...]], PreparedWeights] = field(
        default_factory=dict
    )

    def close(self) -> None:
        """Close the sources of weights after a failed build."""
        for source in self.sources:
            source.close()

    def function(self, declaration: Declaration) -> FunctionSpec:
        """Return the spec of one declaration, and collect what it refers to."""
        if isinstance(declaration, EngineDeclaration):
            return self._language_model(declaration)
        if isinstance(declaration, SandboxDeclaration):
            return FunctionSpec(
                module=declaration.module,
                qualname=declaration.qualname,
                bundle=self._no_code(),
                image=self._image(declaration.image) if declaration.image is not None else None,
                resources=declaration.resources,
                sandbox=True,
                **self._common(declaration),
            )
        source = find_source_tree(declaration)
        image = declaration.image
        weights, common = self._weights(declaration), self._common(declaration)
        if declaration.policies["features"] is not None and self.unread is None:
            common["card"] = self._card(declaration.policies["card"], weights)
        return FunctionSpec(
            module=source.module,
            qualname=declaration.qualname,
            pickled=_pickle_name(declaration) if declaration.by_value else None,
            bundle=self._bundle(source).digest,
            image=self._image(image) if image is not None else None,
            resources=declaration.resources,
            weights=weights,
            **common,
        )

    def _card(self, card: ModelCard, weights: tuple[WeightsSpec, ...]) -> ModelCard:
        """Return the model card with the features that the weights' own cards name."""
        for one in weights:
            files = self._manifest_of(one.manifest).files
            found = next((file for file in files if file.path == MODEL_CARD), None)
            if found is None:
                continue
            if found.size_bytes > MAX_CARD_BYTES:
                raise InvalidInput(
                    f"weights {one.name!r}: {MODEL_CARD} has {found.size_bytes} bytes, at most "
                    f"{MAX_CARD_BYTES}",
                    parameter="weights",
                )
            trained = _features_of_card(self._read(found), one.name)
            if trained and card.features not in ("", trained):
                raise InvalidInput(
                    f"card: features {card.features[:12]}… are not those of {MODEL_CARD} in the "
                    f"weights {one.name!r}, {trained[:12]}…: leave them out",
                    parameter="card",
                )
            card = replace(card, features=trained or card.features)
        return card

    def _language_model(self, declaration: EngineDeclaration) -> FunctionSpec:
        """Return the spec of a language model. Without user code, its revision depends on its
        declaration, not on the declaring file."""
        weights = self._weights(declaration)
        names = {name: w.name for name, w in declaration.adapters.items()}
        manifests = {w.name: self._manifest_of(w.manifest) for w in weights}
        completed = resolve_engine(
            declaration,
            manifests[declaration.model.name],
            self._read,
            {name: manifests[mount] for name, mount in names.items()},
        )
        for note in completed.notes:
            warnings.warn(note, PilotlightWarning, stacklevel=2)
        return FunctionSpec(
            bundle=self._no_code(),
            image=self._image(declaration.image) if declaration.image is not None else None,
            resources=completed.resources,
            weights=weights,
            engine=completed.engine,
            **self._common(declaration),
        )

    def _no_code(self) -> str:
        """Return the digest of the bundle of a function without user code."""
        empty = pack_files({})
        self.blobs[empty.digest] = empty.data
        return empty.digest

    def _common(self, declaration: Declaration) -> dict[str, Any]:
        return {
            "name": declaration.name,
            "kind": declaration.kind,
            "methods": declaration.methods(),
            "scaling": declaration.scaling,
            "clocks": declaration.clocks,
            "secrets": self._secrets(declaration),
            "volumes": self._volumes(declaration),
            "env": self._env(declaration),
            "snapshot": declaration.snapshot,
            "idempotent": declaration.idempotent,
            "description": declaration.description,
            "access": declaration.access,
            "priority": declaration.priority,
            "tags": declaration.tags,
            "parameters": declaration.parameters,
            **_policies(declaration),
        }

    def _manifest_of(self, digest: str) -> Manifest:
        found = next(
            (model.manifest for model in self._models.values() if model.digest == digest), None
        )
        if found is not None:
            return found
        if self.remote is None:
            raise InvalidInput(
                "the weights of the language model are on the platform: deploy with a client that "
                "is connected to it",
                parameter="weights",
            )
        return fetch_manifest(self.remote, digest)

    def _read(self, file: ManifestFile) -> bytes:
        blob = self.blobs.get(file.digest)
        if blob is None and self.remote is not None:
            return self.remote.read_blob(file.digest)
        return b"".join(blob) if isinstance(blob, SourceBody) else blob or b""

    def _bundle(self, source: SourceTree) -> Archive:
        if source.root not in self._bundles:
            pickles = self._pickles(source.root)
            if source.root is None:
                archive = pack_files(
                    notebook_files(Path.cwd()), extra=pickles, limit_bytes=self.limit_bytes
                )
            else:
                models = {
                    w.directory()
                    for d in self.app.declarations.values()
                    for w in d.weights
                    if w.is_directory
                }
                archive = pack_tree(
                    source.root, extra=pickles, exclude=models, limit_bytes=self.limit_bytes
                )
            self.homes += archive.homes
            self._bundles[source.root] = archive
            self.blobs[archive.digest] = archive.data
        return self._bundles[source.root]

    def _pickles(self, root: Path | None) -> dict[str, bytes]:
        travelling = [
            d
            for d in self.app.declarations.values()
            if d.by_value and find_source_tree(d).root == root
        ]
        return {_pickle_name(d): _pickled(d) for d in travelling}

    def _image(self, image: Image) -> str:
        def pack(path: Path, name: str) -> str:
            if path.is_dir():
                archive = pack_tree(path, respect_ignore=False, limit_bytes=self.limit_bytes)
                self.homes += archive.homes
            elif path.is_file():
                archive = pack_files({name: path}, limit_bytes=self.limit_bytes)
            else:
                raise InvalidInput(f"Image.copy: {path} does not exist", parameter="source")
            self.blobs[archive.digest] = archive.data
            return archive.digest

        spec = image.spec(pack)
        digest = spec.digest()
        self.images[digest] = spec
        return digest

    def _weights(self, declaration: Declaration) -> tuple[WeightsSpec, ...]:
        names = [w.name for w in declaration.weights]
        if len(set(names)) != len(names):
            raise InvalidInput(
                f"{declaration.name}: two of its weights are named "
                f"{max(names, key=names.count)!r}: pass name= to one"
            )
        return tuple(
            WeightsSpec(name=w.name, manifest=self._manifest(w)) for w in declaration.weights
        )

    def _manifest(self, weights: Weights) -> str:
        if weights.registered is not None:
            if self.named is None:
                raise InvalidInput(
                    f"weights {weights.name!r} are on the platform: deploy with a client that is "
                    f"connected to it",
                    parameter="weights",
                )
            return self.named(weights.registered)
        where = (str(weights.directory()),) if weights.is_directory else weights.sources
        key = (where, weights.include)
        if key not in self._models:
            try:
                self._models[key] = prepare_weights(
                    self._open(weights, where), name=weights.name, say=self.say
                )
            except InvalidInput as e:
                if self.unread is None:
                    raise
                return self.unread(weights.name, e)
            self.blobs.update(self._models[key].blobs)
        return self._models[key].digest

    def _open(self, weights: Weights, where: tuple[str, ...]) -> Origin:
        from weight_cache.sources import open_source

        token, environ = weights.token(), weights.variables(os.environ)
        with source_errors_as_invalid_input(weights.name):
            opened = open_source(
                where[0] if len(where) == 1 else where,
                include=weights.include,
                token=token,
                environ=environ,
            )
        self.sources.append(opened)
        return opened

    def _secrets(self, declaration: Declaration) -> tuple[str, ...]:
        names: list[str] = []
        for secret in declaration.secrets:
            stored = secret.stored_name(self.name)
            if secret.values is not None:
                self.secrets[stored] = secret.values
            names.append(stored)
        return tuple(dict.fromkeys(names))

    def _volumes(self, declaration: Declaration) -> tuple[VolumeSpec, ...]:
        self.volumes |= {v.name for v in declaration.volumes.values() if v.create_if_missing}
        return tuple(
            VolumeSpec(name=volume.name, path=path)
            for path, volume in sorted(declaration.volumes.items())
        )

    def _env(self, declaration: Declaration) -> dict[str, str]:
        env = {**(declaration.image.variables if declaration.image else {}), **declaration.env}
        names = {self.app.name, *self.app.included} - {self.name}
        if not names:
            return env
        return {**env, APP_VARIABLE: ",".join(f"{name}={self.name}" for name in sorted(names))}


def _features_of_card(data: bytes, weights: str) -> str:
    """Return the hash of the features that a model card names; "" for none. Raises InvalidInput."""
    try:
        card = json.loads(data)
        trained = card.get("features") if isinstance(card, dict) else None
    except (ValueError, RecursionError) as e:
        raise InvalidInput(
            f"weights {weights!r}: {MODEL_CARD} is not JSON: write it with ModelCard(…).save(path)",
            parameter="weights",
        ) from e
    return trained if isinstance(trained, str) else ""


def _policies(declaration: Declaration) -> dict[str, Any]:
    """The policies of a declaration. A guard's function of its own app is named without it, so that
    both move together when the app is deployed under another name."""
    policies = dict(declaration.policies)
    guard: GuardSpec | None = policies.get("guard")
    if guard is not None:
        own = guard.function.removeprefix(f"{declaration.app}/")
        policies["guard"] = replace(guard, function=own)
    return policies


def _pickle_name(declaration: Declaration) -> str:
    return f"{_PICKLES}/{declaration.name}.pkl"


def _pickled(declaration: Declaration) -> bytes:
    try:
        return dumps(declaration.raw)
    except InvalidInput as e:
        raise InvalidInput(
            f"{declaration.name} is defined in a script or notebook, so it is deployed by value, "
            f"but it uses an object that cannot be serialised: {e}. Create the object inside the "
            "function, or move the function to a module.",
            parameter=declaration.name,
        ) from e

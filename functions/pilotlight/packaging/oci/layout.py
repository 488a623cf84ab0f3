"""OCI image layouts: directories with one image, which `skopeo`, `crane` and `oras` can copy to a
registry."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.packaging.oci.layers import Layer, copy_blob

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MAX_DOCUMENT_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """A base image: its layers, oldest first, and its configuration."""

    layers: tuple[Layer, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    blobs: Path | None = None


def create_layout(directory: Path) -> Path:
    """Create an empty layout and return its directory of blobs. Raises InvalidInput for a directory
    with other content."""
    if directory.exists() and any(directory.iterdir()) and not (directory / "oci-layout").is_file():
        raise InvalidInput(
            f"{directory} is not empty and not an OCI layout: choose another directory",
            parameter="output",
        )
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return blobs


def write_image(
    directory: Path, layers: Sequence[Layer], *, config: Mapping[str, Any], tag: str
) -> str:
    """Write the documents of an image for layers that are in the layout, and return the digest of
    the image. Other blobs are deleted."""
    blobs = directory / "blobs" / "sha256"
    described = _store(blobs, CONFIG, config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": described,
        "layers": [layer.descriptor() for layer in layers],
    }
    image = _store(blobs, MANIFEST, manifest)
    image["platform"] = {"architecture": config["architecture"], "os": config["os"]}
    image["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (directory / "index.json").write_bytes(
        _canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": [image]})
    )
    kept = {
        d.removeprefix("sha256:")
        for d in (described["digest"], image["digest"], *(layer.digest for layer in layers))
    }
    for blob in blobs.iterdir():
        if blob.name not in kept:
            blob.unlink()
    return str(image["digest"])


def read_base(directory: Path, *, architecture: str) -> BaseImage:
    """Read the image for `architecture` in a layout. Raises InvalidInput with the reason if there
    is none."""
    try:
        blobs = directory / "blobs" / "sha256"
        entries = _load(directory / "index.json")["manifests"]
        manifest = _image_in(entries, blobs, architecture)
        config = _document(blobs, manifest["config"]["digest"])
        if (config.get("os"), config.get("architecture")) != ("linux", architecture):
            raise ValueError(
                f"it is for {config.get('os')}/{config.get('architecture')}, but this machine is "
                f"linux/{architecture}"
            )
        diff_ids = config["rootfs"]["diff_ids"]
        layers = tuple(
            Layer(
                title="base",
                media_type=d["mediaType"],
                digest=_check(d["digest"]),
                size_bytes=int(d["size"]),
                diff_id=diff_id,
            )
            for d, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise InvalidInput(
            f"--base {directory} is not an OCI layout with a usable image: {e!r}", parameter="base"
        ) from e
    return BaseImage(layers=layers, config=config, blobs=blobs)


def read_manifest(directory: Path) -> tuple[str, bytes]:
    """Return the digest (`sha256:…`) and the bytes of the manifest of a layout with one image.
    Raises InvalidInput."""
    try:
        (entry,) = _load(directory / "index.json")["manifests"]
        digest = _check(entry["digest"])
        blobs = directory / "blobs" / "sha256"
        if _document(blobs, digest).get("mediaType") != MANIFEST:
            raise ValueError(f"{digest} is not an image manifest")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InvalidInput(f"{directory} is not an OCI layout with one image: {e!r}") from e
    return digest, (blobs / digest.removeprefix("sha256:")).read_bytes()


def copy_base_layers(base: BaseImage, blobs: Path) -> None:
    """Copy the layers of a base to another layout. Raises InvalidInput."""
    for layer in base.layers:
        try:
            if base.blobs is not None:
                copy_blob(layer.digest, base.blobs, blobs)
        except (OSError, ValueError) as e:
            raise InvalidInput(
                f"--base: layer {layer.digest[7:19]} cannot be copied: {e}", parameter="base"
            ) from e


def _image_in(
    entries: Sequence[Mapping[str, Any]], blobs: Path, architecture: str
) -> Mapping[str, Any]:
    fitting = [
        e
        for e in entries
        if e.get("platform", {}).get("architecture", architecture) == architecture
    ]
    if len(fitting) != 1:
        raise ValueError(f"it has {len(fitting)} images for {architecture}, expected 1")
    found = _document(blobs, fitting[0]["digest"])
    return (
        _image_in(found["manifests"], blobs, architecture)
        if found.get("mediaType") == INDEX or "manifests" in found
        else found
    )


def _store(blobs: Path, media_type: str, document: Mapping[str, Any]) -> dict[str, Any]:
    raw = _canonical(document)
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(raw)}


def _document(blobs: Path, digest: str) -> Mapping[str, Any]:
    name = _check(digest).removeprefix("sha256:")
    found = _load(blobs / name)
    if hashlib.sha256((blobs / name).read_bytes()).hexdigest() != name:
        raise ValueError(f"{name[:12]} does not match its digest")
    return found


def _load(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > _MAX_DOCUMENT_BYTES:
        raise ValueError(f"{path.name} is too large for a document")
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def _check(digest: str) -> str:
    if not _DIGEST.match(str(digest)):
        raise ValueError(f"{digest!r} is not a sha256 digest")
    return digest


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

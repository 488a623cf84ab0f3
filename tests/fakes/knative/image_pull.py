"""Pulls of container images from registries on this machine, over plain HTTP as containerd does for
loopback addresses, with the logins of the pod's `imagePullSecrets`.

Source: OCI Image Format Specification 1.1, "Image Layer Filesystem Changeset"."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pilotlight.core.oci.image_reference import Repository, parse_reference
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import SECRET
from tests.fakes.plain_http import NO_TLS

Json = dict[str, Any]
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class PullFailed(Exception):
    """Raised when an image cannot be pulled; with what the kubelet says then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledImage:
    """An image on a node: its files, its entrypoint and its variables."""

    root: Path
    argv: list[str]
    env: Mapping[str, str]


def repository_of(reference: str) -> Repository | None:
    """Where an image is pulled from; None: it is no image of a registry on this machine."""
    try:
        repository, _ = parse_reference(reference)
    except ValueError:
        return None
    return repository if repository.is_loopback else None


async def logins(cluster: Cluster, pod: Json, repository: Repository) -> list[str]:
    """Headers to try: those of the pod's secrets for that registry, then none. The kubelet ignores
    secrets that are missing."""
    found = []
    for one in pod["spec"].get("imagePullSecrets") or ():
        secret = await cluster.get(SECRET, one["name"], pod["metadata"]["namespace"])
        raw = ((secret or {}).get("data") or {}).get(".dockerconfigjson")
        auths = json.loads(base64.b64decode(raw)).get("auths", {}) if raw else {}
        if repository.host in auths:
            found.append(f"Basic {auths[repository.host]['auth']}")
    return found or [""]


async def pull(
    reference: str, authorizations: Iterable[str], folder: Path
) -> tuple[PulledImage, str]:
    """Pull into `folder`; the image, and the login that the registry accepted. Raises
    PullFailed."""
    repository, digest = parse_reference(reference)
    said = ""
    for authorization in authorizations:
        headers = {"authorization": authorization} if authorization else {}
        async with httpx.AsyncClient(
            base_url=f"http://{repository.host}/v2/{repository.name}/",
            headers=headers,
            verify=NO_TLS,
            timeout=60,
        ) as registry:
            try:
                answer = await registry.get(f"manifests/{digest}", headers={"accept": _MANIFEST})
                if answer.is_success:
                    image = await _unpacked(registry, answer.content, digest, folder)
                    return image, authorization
            except httpx.HTTPError as e:
                raise PullFailed(f'failed to pull and unpack image "{reference}": {e}') from e
            said = _refusal(reference, answer)
    raise PullFailed(said)


def _refusal(reference: str, answer: httpx.Response) -> str:
    repository, digest = parse_reference(reference)
    why = (
        f"{reference}: not found"
        if answer.status_code == 404
        else f"pulling from host {repository.host} failed with status code "
        f"[manifests {digest}]: {answer.status_code} {answer.reason_phrase}"
    )
    return (
        f'failed to pull and unpack image "{reference}": failed to resolve reference '
        f'"{reference}": {why}'
    )


async def _unpacked(
    registry: httpx.AsyncClient, raw: bytes, digest: str, folder: Path
) -> PulledImage:
    async def blob(of: Json) -> bytes:
        data = (await registry.get(f"blobs/{of['digest']}")).raise_for_status().content
        return _checked(data, of["digest"])

    manifest = json.loads(_checked(raw, digest))
    config = json.loads(await blob(manifest["config"])).get("config", {})
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}-draft")
        shutil.rmtree(draft, ignore_errors=True)
        for layer in manifest["layers"]:
            data = await blob(layer)
            await asyncio.to_thread(apply_layer, data, draft)
        draft.rename(folder)
    return PulledImage(
        root=folder,
        argv=[*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())],
        env=dict(one.split("=", 1) for one in config.get("Env") or ()),
    )


def _checked(data: bytes, digest: str) -> bytes:
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise PullFailed(f"failed commit on ref: unexpected digest, expected {digest}")
    return data


def apply_layer(layer: bytes, root: Path) -> None:
    """Unpack a layer over those before it."""
    root.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(layer))) as archive:
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # 3.11.4
        for member in archive:
            path = root / member.name
            if path.name == _OPAQUE:
                for below in path.parent.iterdir() if path.parent.is_dir() else ():
                    _remove(below)
            elif path.name.startswith(_WHITEOUT):
                _remove(path.with_name(path.name.removeprefix(_WHITEOUT)))
            else:
                if not path.is_dir() or path.is_symlink():
                    path.unlink(missing_ok=True)
                archive.extract(member, root)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

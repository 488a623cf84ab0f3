"""`deploy`: build an app, send what the platform lacks, and make it live. The order is what makes it safe: the last step is the only
one that changes what callers see, and it is one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.client import Client, Deployment
from pilotlight.errors import PilotlightError
from pilotlight.packaging.archive import DEFAULT_LIMIT_BYTES
from pilotlight.packaging.build import Blob, Build, build
from pilotlight.spec import ImageSpec

if TYPE_CHECKING:
    from pilotlight.sdk.app import App

PACKAGE, IMAGE, UPLOAD, DEPLOY = "package", "image", "upload", "deploy"
"""The stages, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One step forward.

    Attributes:
        stage: `package`, `image`, `upload` or `deploy`.
        text: what is being done, or a line of a build's output.
        done_bytes, total_bytes: of the stage; 0 where it has no size.
    """

    stage: str
    text: str
    done_bytes: int = 0
    total_bytes: int = 0


Progress = Callable[[ProgressEvent], None]
"""Told about every step, in the calling thread, except that hashing of weights may tell from others."""


def deploy(
    app: App,
    *,
    client: Client,
    name: str | None = None,
    message: str = "",
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Deployment:
    """Deploy `app` as `name` (default: its own) to `client`'s environment. Raises PilotlightError; nothing is live unless it returns."""
    report = progress or _nothing
    report(ProgressEvent(stage=PACKAGE, text=f"packaging {app.name}"))
    built = build(app, name=name, limit_bytes=limit_bytes, say=lambda what, done, total: report(_hashing(what, done, total)))
    _upload(client, built, report)
    for digest, spec in built.images.items():
        _build_image(client, digest, spec, report)
    for secret, values in built.secrets.items():
        client.put_secret(secret, values)
    report(ProgressEvent(stage=DEPLOY, text=f"deploying {built.app} to {client.profile.environment}"))
    return client.deploy(built.app, built.functions, message=message, labels=labels)


def _upload(client: Client, built: Build, report: Progress) -> None:
    missing = {digest: blob for digest, blob in {**built.blobs, **built.files}.items() if not client.has_blob(digest)}
    total, done = sum(_size_bytes(blob) for blob in missing.values()), 0
    for digest, blob in missing.items():
        text = blob.name if isinstance(blob, Path) else digest[:12]
        report(ProgressEvent(stage=UPLOAD, text=text, done_bytes=done, total_bytes=total))
        client.put_blob(digest, blob, chunked=digest in built.files)
        done += _size_bytes(blob)
    if missing:
        report(ProgressEvent(stage=UPLOAD, text="uploaded", done_bytes=done, total_bytes=total))


def _build_image(client: Client, digest: str, spec: ImageSpec, report: Progress) -> None:
    finished: str | None = None
    for part in client.build_image(spec):
        finished = part.get("image", finished)
        if "text" in part:
            report(ProgressEvent(stage=IMAGE, text=str(part["text"])))
    if finished is None:
        raise PilotlightError(f"the build of image {digest[:12]} broke off: its stream ended without a result; deploy again")
    if finished != digest:
        raise PilotlightError(f"the platform built image {finished[:12]} where {digest[:12]} was described: client and platform differ")


def _size_bytes(blob: Blob) -> int:
    return blob.stat().st_size if isinstance(blob, Path) else len(blob)


def _hashing(what: str, done: int, total: int) -> ProgressEvent:
    return ProgressEvent(stage=PACKAGE, text=what, done_bytes=done, total_bytes=total)


def _nothing(_: ProgressEvent) -> None:
    return None

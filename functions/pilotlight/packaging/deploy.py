"""`deploy`: builds an app, uploads what the platform lacks, and releases it. Only the last step, a
single request, changes what callers see."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pilotlight.client.client import Client
from pilotlight.client.resources.releases import Deployment, ReleaseOptions
from pilotlight.errors import PilotlightError
from pilotlight.packaging import git_provenance
from pilotlight.packaging.archive import DEFAULT_LIMIT_BYTES
from pilotlight.packaging.build import Build, build, copies_of
from pilotlight.packaging.progress import (
    DEPLOY,
    IMAGE,
    NOTICE,
    PACKAGE,
    Progress,
    ProgressEvent,
    ignore_progress,
)
from pilotlight.packaging.weights_push import hashing_event, upload_blobs
from pilotlight.sdk.declared_app import DeclaredApp
from pilotlight.spec.function import ImageSpec

__all__ = ["Progress", "ProgressEvent", "deploy"]


def deploy(
    app: DeclaredApp,
    *,
    client: Client,
    name: str | None = None,
    message: str = "",
    labels: Mapping[str, str] | None = None,
    terms: ReleaseOptions | None = None,
    progress: Progress | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Deployment:
    """Deploy `app` as `name` (default: its name) to the environment of `client`. Raises
    PilotlightError; nothing is released unless it returns.

    `terms`: how it is released; its lineage is completed from the git checkout of the app."""
    report = progress or ignore_progress
    report(ProgressEvent(stage=PACKAGE, text=f"packaging {app.name}"))

    def named(weights: str) -> str:
        return client.get_weights(weights).manifest

    with build(
        app,
        name=name,
        limit_bytes=limit_bytes,
        say=lambda *said: report(hashing_event(*said)),
        named=named,
        remote=client,
    ) as built:
        for home in built.homes:
            text = f"{home} is the home of a platform and is not uploaded"
            report(ProgressEvent(stage=NOTICE, text=text))
        upload_blobs(client, built.blobs, report=report)
    for digest, spec in built.images.items():
        _provide_image(client, built, digest, spec, report)
    for volume in sorted(built.volumes):
        client.create_volume(volume)
    for secret, values in built.secrets.items():
        client.put_secret(secret, values)
    report(
        ProgressEvent(stage=DEPLOY, text=f"deploying {built.app} to {client.profile.environment}")
    )
    given: ReleaseOptions = terms or {}
    known = git_provenance.read_provenance(list(app.declarations.values()))
    wanted: ReleaseOptions = {**given, "meta": {**known, **given.get("meta", {})}}
    return client.deploy(built.app, built.functions, message=message, labels=labels, **wanted)


def _provide_image(
    client: Client, built: Build, digest: str, spec: ImageSpec, report: Progress
) -> None:
    """Have the platform build an image, or push it to the registry of its cluster, unless it is
    there."""
    there = client.container_image(built.app, digest)
    if there["repository"] is None:
        _build_image(client, digest, spec, report)
    elif there["reference"] is None:
        from pilotlight.packaging.container_images import push_image  # loads the builder of images

        push_image(
            client,
            built.app,
            spec,
            repository=there["repository"],
            copies=copies_of(spec, built.blobs),
            report=report,
            environ=os.environ,
        )


def _build_image(client: Client, digest: str, spec: ImageSpec, report: Progress) -> None:
    finished: str | None = None
    for part in client.build_image(spec):
        finished = part.get("image", finished)
        if "text" in part:
            report(ProgressEvent(stage=IMAGE, text=str(part["text"])))
    if finished is None:
        raise PilotlightError(
            f"the build of image {digest[:12]} was interrupted: its stream ended without a result; "
            f"deploy again"
        )
    if finished != digest:
        raise PilotlightError(
            f"the platform built image {finished[:12]}, expected {digest[:12]}: use the same "
            f"version of pilotlight on client and platform"
        )

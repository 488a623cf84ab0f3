"""Container images of functions on a cluster: made on this machine, pushed to the registry that the
platform names with the user's own login, and recorded on the platform by digest.

The image contains the environment only: a pod gets the code of its revision from its node agent, so
that a change of code pushes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.client.client import Client
from pilotlight.core.object_store import DirectoryStore, blob_key
from pilotlight.core.oci.image_reference import Repository, parse_repository
from pilotlight.errors import InvalidInput
from pilotlight.packaging.oci import environment as places
from pilotlight.packaging.oci.environment import Environment
from pilotlight.packaging.oci.export import export_image, source_date_epoch
from pilotlight.packaging.oci.registry import Registry
from pilotlight.packaging.oci.registry_login import find_login
from pilotlight.packaging.progress import IMAGE, PUSH, Progress, ProgressEvent
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import to_json
from snapshotter.errors import SnapshotterError
from snapshotter.images.images import Images, runtime_requirements

T = TypeVar("T")


def push_image(
    client: Client,
    app: str,
    spec: ImageSpec,
    *,
    repository: str,
    copies: Mapping[str, bytes],
    report: Progress,
    environ: Mapping[str, str],
    base: Path | None = None,
    venv: Path | None = None,
) -> str:
    """Make the container image of an Image, push it, and record it for the app's next deploy.
    Returns its reference. Raises PilotlightError.

    Args:
        repository: the tenant's.
        copies: archives of the image's copy steps, by digest.
        base: layout of a base image for the system and the interpreter; None: this machine's.
        venv: virtual environment to use instead of building the Image."""
    check_first_step(spec)
    target, digest = _parsed(repository), spec.digest()
    registry = Registry(target, find_login(target, environ))
    with registry, _workshop(environ) as workshop:
        registry.check_login()
        if venv is not None:
            environment = places.virtual_environment(venv)
        else:
            check_packages(spec, has_base=base is not None)
            environment = _built(workshop, spec, copies=copies, report=report, environ=environ)
        pushed = _push(
            registry, environment, digest, workshop, base=base, report=report, environ=environ
        )
    reference = f"{target}@{pushed}"
    client.record_container_image(app, spec, reference)
    return reference


def check_first_step(spec: ImageSpec) -> None:
    """Raise InvalidInput for an Image that begins with a container image."""
    if any(step["op"] == "from" for step in spec.steps):
        raise InvalidInput(
            "Image.from_registry is not supported on a cluster",
            hint="Begin with Image.python('3.11'), and pass the container image as an OCI layout: "
            "`skopeo copy docker://… oci:LAYOUT`, then `pilotlight image push FILE --base LAYOUT`, "
            "before the deploy.",
            parameter="image",
        )


def check_packages(spec: ImageSpec, *, has_base: bool) -> None:
    """Raise InvalidInput for an Image with Debian packages, which only a base can provide."""
    names = [name for step in spec.steps if step["op"] == "apt" for name in step["packages"]]
    if names and not has_base:
        raise InvalidInput(
            f"the Image installs Debian packages ({', '.join(names)}), which only a base image can "
            f"provide",
            hint="Pass --base with an OCI layout that contains them: `pilotlight image push FILE "
            "--base LAYOUT`, before the deploy.",
            parameter="base",
        )


def _parsed(repository: str) -> Repository:
    try:
        return parse_repository(repository)
    except ValueError as e:
        raise InvalidInput(f"the platform's registry: {e}") from e


@contextlib.contextmanager
def _workshop(environ: Mapping[str, str]) -> Iterator[Path]:
    """The directory of built environments in the user's cache, for one process at a time."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/root")) / ".cache"
    workshop = Path(base) / "pilotlight" / "images"
    try:
        workshop.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (workshop / "lock").open("w")
    except OSError as e:
        raise InvalidInput(
            f"images cannot be made in {workshop}: {e.strerror or e}",
            hint="Set XDG_CACHE_HOME to a directory of yours.",
        ) from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield workshop


def _built(
    workshop: Path,
    spec: ImageSpec,
    *,
    copies: Mapping[str, bytes],
    report: Progress,
    environ: Mapping[str, str],
) -> Environment:
    """Build the Image, unless it is there from an earlier push; other images are deleted."""
    digest = spec.digest()

    async def tell(part: Mapping[str, Any]) -> None:
        if "text" in part:
            report(ProgressEvent(stage=IMAGE, text=str(part["text"])))

    async def make(blobs: Path) -> None:
        store = DirectoryStore(blobs)
        for name, data in copies.items():
            await store.put(blob_key(name), data)
        images = Images(workshop, environ=environ, requirements=runtime_requirements(), blobs=store)
        images.prune({digest})
        await images.build(to_json(spec), uid=None, part=tell)

    try:
        with tempfile.TemporaryDirectory(dir=workshop, prefix="copies-") as blobs:
            _run(make(Path(blobs)))
    except SnapshotterError as e:
        detail = {key: e.detail[key] for key in ("log_tail",) if key in e.detail}
        raise InvalidInput(str(e), **detail) from e
    except PackageNotFoundError as e:
        raise InvalidInput(
            f"images cannot be made without package {e.name}: run pip install 'pilotlight[worker]'"
        ) from e
    return places.built_environment(workshop, digest)


def _push(
    registry: Registry,
    environment: Environment,
    digest: str,
    workshop: Path,
    *,
    base: Path | None,
    report: Progress,
    environ: Mapping[str, str],
) -> str:
    def say(what: str) -> None:
        report(ProgressEvent(stage=IMAGE, text=f"writing {what}"))

    def sent(done: int, total: int) -> None:
        report(
            ProgressEvent(
                stage=PUSH,
                text=f"pushing image {digest[:12]} to {registry.repository}",
                done_bytes=done,
                total_bytes=total,
            )
        )

    with tempfile.TemporaryDirectory(dir=workshop, prefix="layout-") as folder:
        layout = Path(folder)
        made = export_image(
            None,
            environment,
            layout,
            base=base,
            tag=digest[:12],
            epoch_s=source_date_epoch(environ),
            say=say,
        )
        return registry.push(layout, tag=f"{digest[:12]}-{made.digest[7:19]}", sent=sent)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also below a running event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()

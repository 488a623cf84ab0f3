"""Images: environments built once per node from a description, and found again by its digest.

An image is `<home>/node/images/<digest>/` with `env/` (a virtual environment of a real interpreter), `files/` (what was copied in)
and `image.json`. Workers do not run the environment's own `python`: they run the interpreter behind it with the image's
`site` directories on `sys.path`, so an image works wherever it is bound.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import sysconfig
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.buildbounds import NO_CGROUPS, BuildBounds, enclosed
from snapshotter.buildbox import BuildBox
from snapshotter.cgroups import Cgroups
from snapshotter.engines import Engines
from snapshotter.errors import BundleUnavailable, ImageBuildFailed, Unsupported
from snapshotter.imagebuild import ImageBuild
from snapshotter.imagespec import ImagePlan, image_digest, parse_image
from snapshotter.interpreters import Interpreter, find_interpreter, own_interpreter
from snapshotter.launch import Layout
from snapshotter.pipconfig import build_variables, user_config
from snapshotter.staging import discard, freeze, staged_in_thread, sweep
from weight_cache.objects import DirectoryStore, ObjectStore

RUNTIME_PACKAGES = ("cloudpickle", "uvicorn", "httptools", "uvloop", "wsproto")
"""What a worker imports (the extra `worker` in pyproject.toml): goes into every image, at the platform's own versions."""
BUILD_TIMEOUT_S = 3600.0
"""One build: compiling a large package on two cores takes half an hour."""
_MAX_BACKLOG = 1000
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Part = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends progress to whoever asked: `{"step": "pip install numpy", "index": 2, "of": 4, "text": line}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """What a worker of an image needs; host paths.

    Attributes:
        python: the interpreter's executable, inside `prefix`.
        prefix: the interpreter's installation.
        site: directories of packages, in the order in which they go on sys.path.
        env: the image's environment variables.
    """

    python: Path
    prefix: Path
    site: tuple[Path, ...]
    env: Mapping[str, str]


@dataclass(slots=True, eq=False)
class _Flight:
    """A build in progress and who listens to it. Listeners come and go between awaits only."""

    task: asyncio.Task[None]
    listeners: list[asyncio.Queue[Mapping[str, Any] | None]] = field(default_factory=list)

    def tell(self, body: Mapping[str, Any] | None) -> None:
        """To every listener; one that reads too slowly loses its oldest lines (the log has them all)."""
        for inbox in self.listeners:
            if inbox.full():
                inbox.get_nowait()
            inbox.put_nowait(body)


class Images:
    """The images of this node. Owner: one event loop; `_flights` changes between awaits only."""

    def __init__(
        self,
        home: Path,
        *,
        environ: Mapping[str, str],
        requirements: Sequence[str],
        blobs: ObjectStore | None = None,
        build_timeout_s: float = BUILD_TIMEOUT_S,
        bounds: BuildBounds | None = None,
        cgroups: Cgroups = NO_CGROUPS,
        engines: Engines | None = None,
    ) -> None:
        """`blobs`: where copy steps find their archives; None: the directory `<home>/blobs`. `engines`: None: those of the home alone."""
        self._engines = Engines(home) if engines is None else engines
        self._blobs = DirectoryStore(home / "blobs") if blobs is None else blobs
        self._root = home / "node" / "images"
        self._environ = environ
        self._requirements = tuple(requirements)
        self._build_timeout_s = build_timeout_s
        self._bounds = bounds or BuildBounds()
        self._cgroups = cgroups
        self._flights: dict[str, _Flight] = {}
        self._swept = False

    def __repr__(self) -> str:
        return f"<Images {self._root} building={len(self._flights)}>"

    def layout(self, digest: str | None, engine: str | None = None) -> Layout:
        """Where image `digest`, or in its place the engine environment of that name, is; without either it is the platform's own
        interpreter with its packages.

        Raises BundleUnavailable when it is not on this node, Unsupported when its interpreter is gone since.
        """
        if digest is None and engine is not None:
            return self._engines.get(engine)
        if digest is None:
            return own_layout()
        image = self._root / digest
        try:
            body = json.loads((image / "image.json").read_bytes()) if _DIGEST.match(digest) else None
        except FileNotFoundError:
            body = None
        if body is None:
            raise BundleUnavailable(f"image {digest[:12]} was not built on this node: deploy the app again to build it")
        python = Path(body["python"])
        if not python.exists():
            raise Unsupported(f"image {digest[:12]} was built for {python}, which is gone: install it again, or `pilotlight deploy` anew")
        site = tuple(image / s for s in body["site"])
        return ImageLayout(python=python, prefix=Path(body["prefix"]), site=site, env=body["env"])

    async def build(self, spec: Mapping[str, Any], *, uid: int | None, part: Part) -> str:
        """Build the image that `spec` describes unless it is there; returns its digest.

        Callers at once share one build and all see its progress; when the last of them is cancelled the build is too.
        Raises ImageBuildFailed (`detail`: step, log_tail, log), Unsupported.
        """
        digest = image_digest(spec)
        if (self._root / digest).exists():
            return digest
        plan = parse_image(spec)
        flight = self._flights.get(digest) or self._take_off(digest, plan, uid)
        inbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(_MAX_BACKLOG)
        flight.listeners.append(inbox)
        try:
            while (body := await inbox.get()) is not None:
                await part(body)
            await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(inbox)
            if not flight.listeners and not flight.task.done():
                self._flights.pop(digest, None)
                flight.task.cancel()
                await asyncio.wait([flight.task])
        return digest

    def prune(self, keep: set[str]) -> list[str]:
        """Remove images not in `keep` and not being built; returns their digests."""
        present = [d.name for d in self._root.iterdir() if _DIGEST.match(d.name)] if self._root.exists() else []
        gone = sorted(set(present) - keep - self._flights.keys())
        for digest in gone:
            discard(self._root / digest)
            (self._root / f"{digest}.log").unlink(missing_ok=True)
        return gone

    def _take_off(self, digest: str, plan: ImagePlan, uid: int | None) -> _Flight:
        flight = _Flight(task=asyncio.create_task(self._fly(digest, plan, uid), name=f"build image {digest[:12]}"))
        self._flights[digest] = flight

        def land(task: asyncio.Task[None]) -> None:
            if self._flights.get(digest) is flight:
                del self._flights[digest]
            flight.tell(None)
            if not task.cancelled():
                task.exception()  # every listener raises it; with none left there is nobody to tell

        flight.task.add_done_callback(land)
        return flight

    async def _fly(self, digest: str, plan: ImagePlan, uid: int | None) -> None:
        async def report(body: Mapping[str, Any]) -> None:
            if (flight := self._flights.get(digest)) is not None:
                flight.tell(body)

        if not self._swept:
            self._swept = True
            await asyncio.to_thread(sweep, self._root)
        interpreter = await find_interpreter(plan.python, self._environ)
        try:
            async with (
                asyncio.timeout(self._build_timeout_s),
                staged_in_thread(self._root / digest) as temp,
                enclosed(f"b-{digest[:16]}", bounds=self._bounds, cgroups=self._cgroups) as enclosure,
            ):
                box = BuildBox(interpreter=interpreter, image=temp, uid=uid, enclosure=enclosure)
                log = self._root / f"{digest}.log"
                build = ImageBuild(plan, box, blobs=self._blobs, log=log, variables=build_variables(self._environ), report=report)
                env = await build.run(self._requirements, pip_config=user_config(self._environ))
                await asyncio.to_thread(_seal, temp, interpreter, env, uid)
        except TimeoutError as e:
            raise _failed(digest, f"it took longer than {self._build_timeout_s:g} s") from e
        except (OSError, ValueError) as e:
            raise _failed(digest, str(e)) from e


def own_layout() -> ImageLayout:
    """The platform's own interpreter, with the packages that this process sees."""
    own = own_interpreter()
    paths = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return ImageLayout(python=own.executable, prefix=own.prefix, site=tuple(p for p in paths if p.is_dir()), env={})


def runtime_requirements() -> list[str]:
    """The worker's requirements, pinned to what the platform itself runs with. Raises PackageNotFoundError."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in RUNTIME_PACKAGES]


def _seal(temp: Path, interpreter: Interpreter, env: Mapping[str, str], uid: int | None) -> None:
    """Make the built directories read-only and write down what they are."""
    for name in ("env", "files"):
        freeze(temp / name, owner_uid=uid)
        if uid is not None:
            os.chown(temp / name, os.geteuid(), os.getegid())
    site = [f"env/lib/python{interpreter.version}/site-packages", "files"]
    body = {"python": str(interpreter.executable), "prefix": str(interpreter.prefix), "site": site, "env": dict(env)}
    (temp / "image.json").write_text(json.dumps(body, sort_keys=True))
    temp.chmod(0o755)


def _failed(digest: str, message: str) -> ImageBuildFailed:
    return ImageBuildFailed(f"image {digest[:12]} could not be built: {message}", {"step": "image", "log_tail": []})

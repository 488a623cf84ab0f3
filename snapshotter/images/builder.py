"""One image build: creates a virtual environment step by step in a staging directory.

The user's steps run first, in order. The worker's own requirements come last, so that user steps
cannot replace them silently: if both pin one package differently, the build fails and names both
pins.

An image that begins with a container image has its root file system, and its Python unless the
description names one of this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pilotlight.core.image_steps import ABSOLUTE
from pilotlight.core.object_store import ObjectStore
from pilotlight.core.threads import finish_in_thread
from snapshotter.errors import BundleUnavailable, ImageBuildFailed, Unsupported
from snapshotter.images.base_rootfs import BaseRootfs, package_proxies, shift_owners
from snapshotter.images.blob_archives import is_there, local_archive
from snapshotter.images.build_log import BuildLog
from snapshotter.images.build_sandbox import BuildSandbox
from snapshotter.images.bundle_unpacking import UNPACKING, unpack
from snapshotter.images.oci import registry_base
from snapshotter.images.oci.registry_base import RegistryBase
from snapshotter.images.pip_cache import lend
from snapshotter.images.spec import BuildStep, ImagePlan
from snapshotter.linux.atomic_directory import expose, remove_tree

LOG_TAIL_LINES = 40
"""Lines of the log included in an error: enough for pip's final messages, not for the whole output
of a compiler."""
LOG_TAIL_BYTES = 64 * 1024
"""Limit for the same lines in JSON, where a line of 64 KiB may take 400 KiB."""
_MOST_ESCAPED = 12
"""Most bytes of one character in JSON: two halves of a surrogate pair, `\\ud83d\\ude00`."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*([<>=!~].*)\Z")
"""A plain requirement with a version (PEP 508): name, extras (dropped, since constraints must not
have any), specifier."""

APT_INSTALL = (
    *("/usr/bin/apt-get", "-y", "--no-install-recommends"),
    "--no-remove",
    # do not interpret an unknown name as a regular expression or a glob
    *("-o", "APT::Cmd::Pattern-Only=true"),
    *("install", "--"),
)
"""Followed by the package names. Never removes packages, neither by a modifier nor because of a
conflict."""
_PUT_PIP = """
cp -Rp -- "$1/pip/." "$2/lib/python$3/site-packages"
for name in pip pip3 "pip$3"; do
  printf '#!/bin/sh\\nexec "%s/bin/python" -m pip "$@"\\n' "$2" > "$2/bin/$name"
  chmod 755 "$2/bin/$name"
done
"""
"""Script for sh(1): $1 is the `given` directory, $2 the environment, $3 the interpreter's
version."""
Report = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Receives progress: `{"step", "index", "of", "text"}`."""


class ImageBuild:
    """One run of the steps. Owner: the task that calls `run`."""

    def __init__(
        self,
        plan: ImagePlan,
        box: BuildSandbox,
        *,
        blobs: ObjectStore,
        log: Path,
        variables: Mapping[str, str],
        report: Report,
        pip: Path | None = None,
        base: BaseRootfs | None = None,
    ) -> None:
        """`pip`: the result of `pip_of` for the interpreter; None: the build installs pip itself.
        `base`: for a sandbox with `ids`."""
        self._plan = plan
        self._box = box
        self._blobs = blobs
        self._floor = box.enclosure.bounds.floor
        self._pip_of = pip
        self._base = base
        self._container: RegistryBase | None = None
        self._has_lists = False
        self._log = BuildLog(log)
        self._variables = dict(variables)
        self._report = report
        self._image_env: dict[str, str] = {}
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._title = "virtual environment"
        self._index = 0
        self._steps = plan.steps[1:] if plan.container_image else plan.steps
        self._count = len(self._steps) + (2 if box.ids is None else 3)

    @property
    def box(self) -> BuildSandbox:
        """The sandbox, with the interpreter that the image has."""
        return self._box

    @property
    def base_digest(self) -> str:
        """The digest of the container image that it began with; "": none."""
        return "" if self._container is None else self._container.digest

    async def run(
        self, requirements: Sequence[str], *, pip_config: str, has_credentials: bool = False
    ) -> Mapping[str, str]:
        """Run all steps; return the image's environment variables. Raises ImageBuildFailed,
        Unsupported.

        `has_credentials`: credentials were removed from pip's configuration; the build's log notes
        this."""
        with self._log:
            return await self._run(
                requirements, pip_config=pip_config, has_credentials=has_credentials
            )

    async def _run(
        self, requirements: Sequence[str], *, pip_config: str, has_credentials: bool
    ) -> Mapping[str, str]:
        for step in self._plan.steps:
            if step.op == "copy" and not await self._is_there(step):
                raise self._failed(
                    f"{step.title}: {step.blob[:12]} is not in the blob store: deploy again to "
                    f"upload it"
                )
        await asyncio.to_thread(self._box.prepare)
        if self._plan.container_image:
            await self._begin(self._plan.steps[0].title)
            await self._unpack_base()
        elif self._box.ids is not None and self._base is not None:
            await self._begin("root file system")
            await self._base.copy(self._box.rootfs, self._box.ids, self._report_lines)
        self._variables["PIP_CONFIG_FILE"] = str(self._box.give("pip.conf", pip_config))
        await self._begin("virtual environment")
        if self._box.uid is not None and self._box.network.remark:
            await self._report_line(
                f"the build uses the host's network: {self._box.network.remark}"
            )
        if self._box.network.namespace is not None:
            await self._report_line(
                "the build can reach the internet, and only those private networks that "
                "snapshotter.egress_allowed of this machine lists"
            )
        if has_credentials:
            await self._report_line(
                "pip's configuration on this machine contains credentials: the build does not get "
                "them"
            )
        await self._environment()
        for step in self._steps:
            await self._begin(step.title)
            await self._do(step)
        await self._begin("runtime")
        await self._runtime(requirements)
        for name in ("tmp", "given"):
            await asyncio.to_thread(remove_tree, self._box.image / name)
        return self._image_env

    async def _unpack_base(self) -> None:
        """Make the root file system of a container image, and use its variables and its Python."""
        box, ids = self._box, self._box.ids
        if ids is None:
            raise self._failed("container images need a platform that runs as root")
        puller = dataclasses.replace(box, ids=None, lent=())
        argv = registry_base.pull_command(self._plan.container_image, puller.tmp / "base")
        if await puller.run(argv, variables=self._variables, on_lines=self._report_lines) != 0:
            raise self._failed(
                f"cannot get {self._plan.container_image} from its registry (see above)"
            )
        try:
            found = await registry_base.UNPACKING.run_until_cancelled(
                lambda stopped: registry_base.unpack(
                    box.image / "tmp",
                    "base",
                    box.rootfs,
                    max_entries=box.enclosure.bounds.entries,
                    floor=self._floor,
                    stopped=stopped,
                )
            )
        except BundleUnavailable as e:
            raise self._failed(f"{self._plan.container_image}: {e}") from e
        await finish_in_thread(shift_owners, box.rootfs, ids)
        await asyncio.to_thread(remove_tree, box.image / "tmp" / "base")
        self._container = found
        self._image_env |= found.variables
        self._variables |= found.variables
        await self._report_line(f"unpacked {found.digest}")
        if not self._plan.python:
            if found.interpreter is None:
                raise self._failed(
                    f"{self._plan.container_image} has no Python 3.11 or newer in its PATH: name a "
                    f'version of this machine, add_python="3.11"'
                )
            self._box = dataclasses.replace(box, interpreter=found.interpreter)
            await self._report_line(f"Python {found.interpreter.version} of the image")

    async def _environment(self) -> None:
        make = [str(self._box.python), "-I", "-m", "venv"]
        if self._container is not None:
            make.append("--system-site-packages")
        if self._pip_of is None:
            await self._must(*make, str(self._box.env))
            return
        await finish_in_thread(lend, self._pip_of, self._box.image / "given" / "pip")
        await self._must(*make, "--without-pip", str(self._box.env))
        places = (str(self._box.given), str(self._box.env), self._box.interpreter.version)
        await self._must("/bin/sh", "-ec", _PUT_PIP, "sh", *places)

    async def _do(self, step: BuildStep) -> None:
        match step.op:
            case "pip":
                if step.items or step.options:
                    await self._must(*self._pip("install"), *step.options, "--", *step.items)
            case "apt":
                await self._apt(step.items)
            case "run":
                for command in step.items:
                    await self._report_line(f"$ {command}")
                    await self._must("/bin/sh", "-c", command)
            case "copy":
                await self._copy(step)
            case "env":
                self._image_env |= step.values or {}
                self._variables |= step.values or {}

    async def _is_there(self, step: BuildStep) -> bool:
        try:
            return await is_there(self._blobs, step.blob)
        except BundleUnavailable as e:
            raise self._failed(f"{step.title}: {e}") from e

    async def _copy(self, step: BuildStep) -> None:
        """Unpack the archive where only the agent writes, then copy it as the commands' uid, so
        that links made by earlier steps affect only that uid."""
        name = f"copy-{self._index}"
        target = self._copy_target(step)
        parcel = self._box.image / "given" / name
        parcel.mkdir(mode=0o755)
        try:
            async with local_archive(
                self._blobs, step.blob, beside=self._box.image, floor=self._floor
            ) as archive:
                await UNPACKING.run(unpack, archive, step.blob, parcel, floor=self._floor)
            await asyncio.to_thread(expose, parcel)
        except (BundleUnavailable, OSError) as e:
            raise self._failed(f"{step.title}: {e}") from e
        await self._must("/bin/mkdir", "-p", "--", str(target))
        await self._must("/bin/cp", "-R", "--", f"{self._box.given / name}/.", str(target))
        await asyncio.to_thread(remove_tree, parcel)
        await self._report_line(f"copied {step.blob[:12]} to {step.target}")
        await self._link(PurePosixPath(step.target))

    async def _link(self, target: PurePosixPath) -> None:
        """Let later steps find what was copied to an absolute path."""
        if not target.is_absolute() or self._box.ids is not None:
            return
        if self._box.uid is None:
            await self._report_line(
                f"{target} is there in instances only: later steps do not see it, because without "
                f"root they share this machine's root directory"
            )
            return
        links = dict.fromkeys((*self._box.links, target.parts[1]))
        self._box = dataclasses.replace(self._box, links=tuple(links))

    def _copy_target(self, step: BuildStep) -> Path:
        """Where files are copied to in the sandbox: an absolute path is in the image's own root
        file system, or below ABSOLUTE of its files, to which links of the slot's root lead."""
        target = PurePosixPath(step.target)
        if not target.is_absolute():
            return self._box.files / target
        if self._box.ids is not None:
            return Path(target)
        return self._box.files / ABSOLUTE / target.relative_to("/")

    async def _apt(self, packages: Sequence[str]) -> None:
        if self._box.ids is None:
            await self._require_on_machine(packages)
            return
        if not self._has_lists:
            if settings := await package_proxies():
                self._variables["APT_CONFIG"] = str(self._box.give("apt.conf", settings))
            self._variables |= {"DEBIAN_FRONTEND": "noninteractive"}
            await self._must("/usr/bin/apt-get", "-q", "update")
            self._has_lists = True
        await self._must(*APT_INSTALL, *packages)

    async def _require_on_machine(self, packages: Sequence[str]) -> None:
        """Check the packages on this machine: without their own root file systems, images use the
        machine's."""
        missing = [p for p in packages if not await _is_installed(p)]
        if missing:
            raise Unsupported(
                f"cannot install the apt packages {' '.join(missing)}: {self._why_no_rootfs()}",
                {"step": self._title, "packages": missing},
            )
        await self._report_line(f"already installed on this machine: {' '.join(packages)}")

    def _why_no_rootfs(self) -> str:
        why = self._base.why_not() if self._base is not None else None
        return why or "the platform runs functions without users of their own"

    async def _runtime(self, requirements: Sequence[str]) -> None:
        """Install the worker's requirements within the user's pins, and check that no package ends
        up with a version that conflicts with them."""
        if not requirements:
            return
        pins = {
            _canonical(m[1]): f"{m[1]}{m[2]}"
            for m in map(_REQUIREMENT.match, self._user_packages())
            if m
        }
        ours = {_canonical(re.split(r"[<>=!~\[ ]", r, maxsplit=1)[0]): r for r in requirements}
        constraints = self._box.give("constraints.txt", "\n".join(pins.values()))
        if (
            await self._command(*self._pip("install"), "-c", str(constraints), "--", *requirements)
            != 0
        ):
            clashes = [
                f"the image pins {pins[name]}, the platform's worker requires {need}"
                for name, need in ours.items()
                if name in pins
            ]
            raise (
                self._clash(clashes)
                if clashes
                else self._failed("cannot install the worker's requirements")
            )
        complaints: list[str] = []

        async def collect(lines: Sequence[str]) -> None:
            complaints.extend(lines)
            await self._report_lines(lines)

        await self._box.run(
            [*self._pip("check", bar=False)], variables=self._variables, on_lines=collect
        )
        if clashes := [line for line in complaints if _canonical(_complained_about(line)) in ours]:
            raise self._clash(clashes)

    def _clash(self, clashes: list[str]) -> ImageBuildFailed:
        said = "; ".join(clashes)
        return self._failed(
            f"the image conflicts with the platform's worker: {said}. Relax the pin in "
            f"pip_install(...)",
            conflicts=clashes,
        )

    def _user_packages(self) -> list[str]:
        return [
            item.strip() for step in self._plan.steps if step.op == "pip" for item in step.items
        ]

    def _pip(self, command: str, *, bar: bool = True) -> list[str]:
        return [
            str(self._box.env / "bin" / "python"),
            "-m",
            "pip",
            command,
            *(("--progress-bar", "off") if bar else ()),
        ]

    async def _must(self, *argv: str) -> None:
        status = await self._command(*argv)
        if status != 0:
            raise self._failed(
                f"{self._title}: exited with status {status}{self._box.enclosure.complaint()}"
                f"{self._missing_here(argv)}"
            )

    def _missing_here(self, argv: Sequence[str]) -> str:
        """Name the copied files that this command names and steps do not see: those at absolute
        paths, where the commands share the machine's root directory."""
        copies = {step.target for step in self._plan.steps if step.op == "copy"}
        named = sorted(
            target
            for target in copies
            if PurePosixPath(target).is_absolute() and any(target in part for part in argv)
        )
        if not named or self._box.uid is not None:
            return ""
        return (
            f"; what was copied to {', '.join(named)} is there in instances only: copy it to a "
            f"relative path for steps, whose working directory has it"
        )

    async def _command(self, *argv: str) -> int:
        return await self._box.run(argv, variables=self._variables, on_lines=self._report_lines)

    async def _begin(self, title: str) -> None:
        self._title = title
        self._index += 1
        await self._report_line(f"== {title}")

    async def _report_line(self, line: str) -> None:
        await self._report_lines([line])

    async def _report_lines(self, lines: Sequence[str]) -> None:
        self._tail.extend(lines)
        self._log.write(lines)
        about = {"step": self._title, "index": self._index, "of": self._count}
        for line in lines:
            await self._report({**about, "text": line})

    def _failed(self, message: str, **detail: Any) -> ImageBuildFailed:
        body = {
            "step": self._title,
            "index": self._index,
            "log_tail": log_tail(list(self._tail)),
            "log": str(self._log.path),
            **detail,
        }
        return ImageBuildFailed(
            f"image step {self._index} of {self._count} failed: {message}", body
        )


def log_tail(lines: Sequence[str], *, max_bytes: int = LOG_TAIL_BYTES) -> list[str]:
    """The last lines that fit into `max_bytes` of JSON; the first of them may be truncated to its
    end."""
    tail, left = list[str](), max_bytes
    for line in reversed(lines):
        cost = len(json.dumps(line)) + 1
        if cost > left:
            if end := line[len(line) - left // _MOST_ESCAPED :]:
                tail.append(end)
            break
        tail.append(line)
        left -= cost
    return tail[::-1]


async def _is_installed(package: str) -> bool:
    """Whether dpkg lists `package` as installed."""
    query = shutil.which("dpkg-query")
    if query is None:
        return False
    child = await asyncio.create_subprocess_exec(
        query,
        "-W",
        "-f",
        "${Status}",
        "--",
        package,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await child.communicate()
    return child.returncode == 0 and b"ok installed" in out


def _complained_about(line: str) -> str:
    """The package that `pip check` reports: `… has requirement X, but you have NAME VERSION.`"""
    _, blamed, rest = line.partition("but you have ")
    return rest.split(" ")[0] if blamed else ""


def _canonical(name: str) -> str:
    """A project name normalized for comparison (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()

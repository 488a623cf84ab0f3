"""What the tests of snapshots share: a function that is at zero, and what a node must not keep when
nothing runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from pilotlight.cli.commands.operations.snapshot import drop_templates
from pilotlight.errors import NotFound
from pilotlight.protocol import HEADER_START
from snapshotter.criu.self_test import self_test
from snapshotter.linux.cgroups import Cgroups
from tests.e2e.harness import PlatformUnderTest, wait_for

ATTEMPTS = 4
"""How often a function is brought to zero before a test gives up: the autoscaler may bring back
what was stopped."""
DEPLOYED_S = 600.0
"""For a test of a module whose app makes and proves a dozen snapshots when it is deployed: 80 s
when idle, and it all gives way."""
# made with what processor time nothing else wants: other workers of pytest-xdist want most of it
SNAPSHOT_S = 480.0
"""For a function that starts processes, on a machine that does much else."""


class Frozen:
    """One app on a platform whose functions have snapshots."""

    def __init__(self, platform: PlatformUnderTest, app: str) -> None:
        self.platform = platform
        self.app = app

    def to_zero(self, function: str) -> None:
        """No instance and no Template of it: what is left is on the disk. Again and again: both may
        just be coming back."""

        def nothing() -> bool:
            with self.platform.client() as client:
                mine = [
                    i for i in client.instances(app=self.app) if i["labels"]["function"] == function
                ]
                for instance in (i for i in mine if i["state"] in ("STARTING", "READY")):
                    with contextlib.suppress(NotFound):
                        client.stop_instance(str(instance["id"]))
                return (
                    drop_templates(client, self.app, function) == 0
                    and not self.has_template(function)
                    and not mine
                )

        wait_for(nothing, f"{function} to be at zero")

    def call(self, address: str, body: Any = None) -> httpx.Response:
        """Call `Function.method`; anything but 200 fails with the logs."""
        answer = self.platform.post(f"{self.app}/{address}", body)
        if answer.status_code != 200:
            raise AssertionError(
                f"{address}: {answer.status_code} {answer.text}\n{self.platform.log_tails(40)}"
            )
        return answer

    def try_from_zero(self, address: str, body: Any = None) -> httpx.Response:
        """One call after `to_zero`, whatever its answer and its start."""
        self.to_zero(address.partition(".")[0])
        return self.platform.post(f"{self.app}/{address}", body)

    def call_from_zero(self, address: str, body: Any = None) -> httpx.Response:
        """The same, started for this call: the autoscaler may bring back what was stopped, then it
        is stopped again."""
        for _ in range(ATTEMPTS):
            self.to_zero(address.partition(".")[0])
            answer = self.call(address, body)
            if answer.headers[HEADER_START] not in ("WARM", "FORK", "WAKE"):
                return answer
        raise AssertionError(f"{address} was never at zero: {answer.headers[HEADER_START]}")

    def restored(self, address: str, body: Any = None) -> Any:
        """What it answers after a RESTORE."""
        answer = self.call_from_zero(address, body)
        if answer.headers[HEADER_START] != "RESTORE":
            raise AssertionError(
                f"{address} came up by "
                f"{answer.headers[HEADER_START]}\n{self.platform.log_tails(40)}"
            )
        return answer.json()

    def kill_agent(self) -> int:
        """kill -9 the node agent; its pid, for `wait_agent`."""
        return self.platform.kill("snapshotter")

    def wait_agent(self, killed: int) -> None:
        """Until another one answers."""
        self.platform.wait_restarted("snapshotter", killed)
        url, headers = f"{self.platform.url}/v1/templates", self.platform.headers
        wait_for(
            lambda: httpx.get(url, headers=headers, timeout=60).status_code == 200,
            "the node agent to answer",
        )

    def has_template(self, function: str) -> bool:
        """Whether one is resident."""
        return any(t["labels"]["function"] == function for t in self.platform.templates())

    def snapshots(self, function: str, *, state: str | None = "READY") -> list[dict[str, Any]]:
        """Its snapshots in that state, of all revisions."""
        with self.platform.client() as client:
            rows = client.snapshots(app=self.app)
        return [
            r
            for r in rows
            if r["labels"].get("function") == function and state in (None, r["state"])
        ]

    def wait_ready(self, function: str) -> dict[str, Any]:
        """Its proven snapshot."""
        return wait_for(
            lambda: self.snapshots(function), f"the snapshot of {function}", timeout_s=SNAPSHOT_S
        )[-1]

    def directory(self, snapshot: str) -> Path:
        """Where a snapshot lies."""
        return catalogue(self.platform) / snapshot

    def json(self, *words: str) -> Any:
        """What `pilotlight WORDS --json` prints."""
        return json.loads(self.platform.cli(*words, "--json").stdout)

    def metric(self, name: str, **labels: str) -> float:
        """A sum over the node agent's metric."""
        transport = httpx.HTTPTransport(
            uds=str(self.platform.local.paths.run / "metrics-snapshotter.sock")
        )
        with httpx.Client(transport=transport, timeout=60) as client:
            text = client.get("http://agent/metrics").text
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        return sum(
            float(value)
            for have, value in found
            if all(f'{k}="{v}"' in have for k, v in labels.items())
        )


def traces(platform: PlatformUnderTest) -> dict[str, list[str]]:
    """What the node agent keeps on the machine for what it runs; nothing when nothing runs. Slots
    that wait for a launch are no traces."""
    run, directory = platform.local.paths.run, catalogue(platform)
    cgroups = Cgroups.find(run)
    groups = sorted(cgroups.names())
    found = {
        "slots": [
            slot.name for slot in (run / "slots").iterdir() if (slot / "launch.json").exists()
        ],
        "cgroups": groups,
        "processes": [
            pid
            for name in groups
            for file in cgroups.group(name).procs
            for pid in pids_in(Path(file))
        ],
        "mounts": [
            line for line in Path("/proc/mounts").read_text().splitlines() if str(run) in line
        ],
        "staged": [
            path.name
            for path in directory.iterdir()
            if path.is_dir() and not path.name.startswith(("sn-", "quarantine"))
        ],
    }
    return {what: names for what, names in found.items() if names}


def pids_in(procs: Path) -> list[str]:
    """Processes of a cgroup; none when it goes away meanwhile."""
    try:
        return procs.read_text().split()
    except OSError:
        return []


def catalogue(platform: PlatformUnderTest) -> Path:
    """The directory of snapshots."""
    return platform.local.paths.home / "node" / "snapshots"


@contextlib.contextmanager
def environ(**values: str) -> Iterator[None]:
    """Variables of this process, for the commands that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def why_no_criu() -> str | None:
    """Why this machine cannot make snapshots; None: it can."""
    with tempfile.TemporaryDirectory(prefix="pl") as cache:
        found = asyncio.run(self_test(cache=Path(cache), environ=os.environ))
    return None if found.on else found.why

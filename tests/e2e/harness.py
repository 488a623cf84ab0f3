"""A whole platform for tests: the four real processes under the real supervisor, in a home of its
own, on free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from pilotlight.cli.supervisor import local_platform, run_platform, stale_processes
from pilotlight.cli.supervisor.supervisor import PROCESSES
from pilotlight.client.client import Client
from pilotlight.profile import Profile
from tests.e2e import command_line
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

STOP_S = 60.0
COMMAND_S = 540.0
"""The longest a command may take: a deploy of a dozen functions, whose snapshots are made while
everything else goes first."""
PATIENCE_S = 45.0
"""How long a test looks for something that is bound to happen, on a machine that is busy with other
things."""
APPS = Path(__file__).parent / "apps"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformUnderTest:
    """A running platform.

    Attributes:
        local: its configuration and directories.
        profile: an admin of it.
        profile_file: the same, as a profile file.
    """

    local: local_platform.LocalPlatform
    profile: Profile
    profile_file: Path

    @property
    def url(self) -> str:
        """Base URL."""
        return self.profile.url

    @property
    def headers(self) -> dict[str, str]:
        """What an HTTP call of the admin needs."""
        return {"authorization": f"Bearer {self.profile.api_key}"}

    def environ(self) -> dict[str, str]:
        """The environment in which `pilotlight` and the SDK mean this platform."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith("PILOTLIGHT_")
        }
        return {
            **kept,
            "PILOTLIGHT_CONFIG": str(self.profile_file),
            "PILOTLIGHT_HOME": str(self.local.paths.home),
            "NO_COLOR": "1",
        }

    def client(self) -> Client:
        """A client of it; the caller closes it."""
        return Client(self.profile)

    def cli(
        self, *words: str, input: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `pilotlight WORDS`; with `check`, a failure shows what it printed."""
        done = command_line.run(words, env=self.environ(), input=input, timeout_s=COMMAND_S)
        if check and done.returncode:
            raise AssertionError(
                f"pilotlight {' '.join(words)} ended with "
                f"{done.returncode}:\n{done.stdout}\n{done.stderr}\n{self.log_tails()}"
            )
        return done

    def deploy(self, file: str) -> None:
        """Deploy an app of tests/e2e/apps."""
        self.cli("deploy", str(APPS / file), "--no-wait")

    def post(
        self, function: str, body: Any = None, *, verb: str = "invoke", **options: Any
    ) -> httpx.Response:
        """`POST /v1/functions/{function}:{verb}` with a JSON body, as the admin unless `headers`
        say otherwise."""
        sent = {"json": {} if body is None else body} if "content" not in options else {}
        return httpx.post(
            f"{self.url}/v1/functions/{function}:{verb}",
            **{"headers": self.headers, "timeout": 60.0, "verify": NO_TLS, **sent, **options},
        )

    def result(self, function: str, body: Any = None) -> Any:
        """What the function answers; anything but 200 fails with the logs."""
        answer = self.post(function, body)
        if answer.status_code != 200:
            raise AssertionError(
                f"{function}: {answer.status_code} {answer.text}\n{self.log_tails()}"
            )
        return answer.json()

    def instances(self, app: str, function: str) -> list[dict[str, Any]]:
        """Live instances of a function, as the node agent tells."""
        with self.client() as client:
            return [
                i
                for i in client.instances(app=app)
                if i["labels"]["function"] == function and i["state"] == "READY"
            ]

    def templates(self) -> list[dict[str, Any]]:
        """Resident Templates, as the node agent tells."""
        return list(
            httpx.get(
                f"{self.url}/v1/templates", headers=self.headers, timeout=60, verify=NO_TLS
            ).json()["templates"]
        )

    def usage(self, where: str = "1", *values: object) -> list[dict[str, Any]]:
        """Usage records in the controller's ledger."""
        with contextlib.closing(
            sqlite3.connect(
                f"file:{self.local.paths.home}/controller/controller.db?mode=ro",
                uri=True,
                timeout=10,
            )
        ) as database:
            database.row_factory = sqlite3.Row
            return [
                dict(row) for row in database.execute(f"SELECT * FROM usage WHERE {where}", values)
            ]

    def kill(self, process: str) -> int:
        """kill -9 one of the four processes; returns the pid that it had."""
        pid = self.pid(process)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_restarted(self, process: str, pid: int) -> None:
        """Until another process has taken the place of `pid` and serves (the pid file is written by
        then)."""
        wait_for(lambda: self.pid(process) not in (0, pid), f"{process} to be back")
        if process == "activator":
            wait_for(self._is_reachable, "the activator to answer")

    def _is_reachable(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5, verify=NO_TLS).status_code == 200
        except httpx.HTTPError:
            return False

    def pid(self, process: str) -> int:
        """Pid of one of the four processes; 0 while it is down, or its file is being written."""
        try:
            return int((self.local.paths.run / f"{process}.pid").read_text().split()[0])
        except (FileNotFoundError, ValueError, IndexError):
            return 0

    def log_tails(self, lines: int = 15) -> str:
        """The end of each process's log, for a failure's message."""
        out = []
        for name in PROCESSES:
            file = self.local.logs / f"{name}.log"
            text = (
                file.read_text(errors="replace").splitlines()[-lines:]
                if file.exists()
                else ["(no log)"]
            )
            out += [f"--- {name}", *text]
        return "\n".join(out)


@contextlib.contextmanager
def platform_up(**sections: dict[str, object]) -> Iterator[PlatformUnderTest]:
    """Start a platform, `sections` over its defaults; stop it and remove its home at the end."""
    root = Path(tempfile.mkdtemp(prefix="pl"))
    root.chmod(0o755)
    home = root / "h"
    config = root / "platform.yaml"
    defaults: dict[str, dict[str, object]] = {
        "platform": {"home": str(home), "run": str(root / "r")},
        "activator": {"listen": f"127.0.0.1:{free_port()}"},
    }
    config.write_text(
        yaml.safe_dump(
            {
                name: {**defaults.get(name, {}), **sections.get(name, {})}
                for name in {**defaults, **sections}
            }
        )
    )
    platform = local_platform.find_platform(config=config, home=None, environ={}, cwd=root)
    try:
        yield from _run(platform, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run(platform: local_platform.LocalPlatform, root: Path) -> Iterator[PlatformUnderTest]:
    key = run_platform.prepare_home(platform)
    if key is None:
        raise AssertionError("a fresh home made no admin key")
    from pilotlight import profile

    mine = Profile(url=platform.url, api_key=key)
    file = profile.save(mine, path=root / "profile.toml")
    for _ in run_platform.detach(platform):
        pass
    try:
        yield PlatformUnderTest(local=platform, profile=mine, profile_file=file)
    finally:
        if (found := local_platform.find_running(platform)) is not None:
            stale_processes.terminate(found.pid, grace_s=STOP_S)


def wait_for(
    look: Callable[[], T | None], what: str, *, timeout_s: float = PATIENCE_S, poll_s: float = 0.02
) -> T:
    """Look until something true is seen, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}; last seen: {seen!r}")
        time.sleep(poll_s)
    return seen

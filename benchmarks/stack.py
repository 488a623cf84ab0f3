"""A platform of the benchmark's own: fresh home, free port, no metrics ports, gone afterwards.

Its PATH is where benchmarks find programs, so that it finds the CRIU that they checked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.harness import ROOT
from benchmarks.network import free_port
from benchmarks.programs import search_path
from pilotlight import profile
from pilotlight.client.client import Client
from pilotlight.protocol import HEADER_SERVER_TIMING, HEADER_START

CALL_TIMEOUT_S = 120.0
ZERO_TIMEOUT_S = 180.0
"""The autoscaler's stable window is a minute: a function that was busy may keep an instance that
long."""


class StackFailed(Exception):
    """Raised when a command of the platform failed; the message is what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered call. `start` is the StartKind that the platform reported, `timing` its
    Server-Timing in milliseconds."""

    status: int
    milliseconds: float
    start: str
    timing: Mapping[str, float]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running platform.

    Attributes:
        directory: holds everything of this run, the home included.
        config: its platform.yaml.
        url, api_key: how to call it.
    """

    directory: Path
    config: Path
    url: str
    api_key: str

    @property
    def headers(self) -> dict[str, str]:
        """What every call sends."""
        return {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}

    @property
    def client(self) -> Client:
        """A client; the caller closes it."""
        return Client(profile.Profile(url=self.url, api_key=self.api_key))

    def tenant(self, name: str, *, plan: str = "enterprise", **overrides: Any) -> Stack:
        """A new tenant's view of the platform: its commands and calls are that tenant's."""
        with self.client as client:
            made = client.create_tenant(name, plan=plan, overrides=overrides)
        directory = self.directory / name
        directory.mkdir()
        key = str(made["key"]["secret"])
        profile.save(profile.Profile(url=self.url, api_key=key), path=directory / "profile.toml")
        return replace(self, directory=directory, api_key=key)

    def command(self, *arguments: str) -> Any:
        """Run `pilotlight … --json` against this platform and return what it printed. Raises
        StackFailed."""
        return _command(self.config, self.directory, *arguments)

    def deploy(self, source: Path, *, app: str | None = None, **options: Any) -> Any:
        """Deploy a copy of `source`, with another app name and other options when given (see
        `variant`)."""
        folder = self.directory / "apps" / (app or source.stem)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / source.name
        file.write_text(variant(source.read_text(), app=app, **options))
        return self.command("deploy", str(file))

    def invoke_url(self, app: str, function: str) -> str:
        """Where a function is called."""
        return f"{self.url}/v1/functions/{app}/{function}:invoke"

    def invoke(self, app: str, function: str, arguments: Any) -> Answer:
        """One call (see `post`). Raises StackFailed unless it is answered 200."""
        path = f"/v1/functions/{app}/{function}:invoke"
        answer = post(
            self.url.removeprefix("http://"), path, json.dumps(arguments).encode(), self.headers
        )
        if answer.status != 200:
            raise StackFailed(f"{app}/{function} answered {answer.status}: {answer.body[:500]!r}")
        return answer

    def wait_zero(self, app: str) -> None:
        """Stop the app's instances and return once there are none. Raises StackFailed when some
        stay."""
        deadline = time.monotonic() + ZERO_TIMEOUT_S
        with self.client as client:
            while instances := client.instances(app=app):
                if time.monotonic() > deadline:
                    raise StackFailed(
                        f"{app} still has {len(instances)} instances after {ZERO_TIMEOUT_S:g} s"
                    )
                for instance in instances:
                    # it may be gone already: the loop looks again
                    with contextlib.suppress(Exception):
                        client.stop_instance(instance["id"])
                time.sleep(0.05)

    def instance_sockets(self, app: str) -> list[Path]:
        """Unix sockets of the app's live workers."""
        with self.client as client:
            return [Path(row["socket"]) for row in client.instances(app=app) if row.get("socket")]

    def restart(
        self,
        *,
        platform: Mapping[str, Any],
        variables: Mapping[str, str],
        between: Callable[[], None],
    ) -> None:
        """Stop it, do `between`, start it with other settings of section `platform` and other
        variables. Raises StackFailed."""
        self.command("down")
        between()
        settings = yaml.safe_load(self.config.read_text())
        settings["platform"] |= platform
        self.config.write_text(yaml.safe_dump(settings))
        _command(self.config, self.directory, "up", "--detach", variables=variables)

    def processes(self) -> dict[str, int]:
        """Pids by name."""
        return {name: pid for name, pid in self.command("status")["processes"].items() if pid}

    def run_directory(self) -> Path:
        """Where its sockets are."""
        return Path(self.command("status")["run"])


def post(host: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
    """One POST on a connection of its own, timed from before the connection to the last byte."""
    connection = http.client.HTTPConnection(host, timeout=CALL_TIMEOUT_S)
    started = time.perf_counter()
    try:
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        answered = response.read()
    finally:
        connection.close()
    return Answer(
        milliseconds=(time.perf_counter() - started) * 1000,
        status=response.status,
        start=response.headers.get(HEADER_START, "?"),
        timing=_server_timing(response.headers.get(HEADER_SERVER_TIMING, "")),
        body=answered,
    )


@contextlib.contextmanager
def running(
    *,
    activators: int = 1,
    redis_url: str | None = None,
    snapshotter: Mapping[str, Any] | None = None,
    prices: Mapping[str, Any] | None = None,
    activator: Mapping[str, Any] | None = None,
    platform: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """Start a platform, with settings of its sections and prices where given, and `variables` in
    its environment; stop it and remove its files afterwards.

    Raises StackFailed.
    """
    directory = Path(tempfile.mkdtemp(prefix="plb"))
    directory.chmod(0o755)  # workers of other uids pass through it
    config = directory / "platform.yaml"
    listen = f"127.0.0.1:{free_port()}"
    sections: dict[str, dict[str, Any]] = {
        "activator": {
            "listen": listen,
            "activators": activators,
            "redis_url": redis_url,
            **(activator or {}),
        },
        "controller": {},
        "snapshotter": dict(snapshotter or {}),
        "weight_cache": {},
    }
    for section in sections.values():
        section["metrics_listen"] = None
    if prices:
        sections["prices"] = dict(prices)
    sections["platform"] = {"home": str(directory / "home"), **(platform or {})}
    config.write_text(yaml.safe_dump(sections))
    try:
        _command(config, directory, "up", "--detach", variables=variables)
        found = profile.load(
            {profile_variable(): str(directory / "profile.toml"), "HOME": str(directory)}
        )
        yield Stack(directory=directory, config=config, url=found.url, api_key=found.api_key)
    finally:
        with contextlib.suppress(StackFailed):  # it never came up
            _command(config, directory, "down")
        shutil.rmtree(directory, ignore_errors=True)


def profile_variable() -> str:
    """Environment variable that names the profile file."""
    return "PILOTLIGHT_CONFIG"


def variant(source: str, *, app: str | None = None, **options: Any) -> str:
    """`source` with another app name, and keywords of its declarations replaced: the very example,
    under other conditions.

    Raises ValueError when there is nothing to change, so that a benchmark cannot silently measure
    something else."""
    if app is not None:
        source, n = re.subn(r'pilotlight\.App\("[^"]+"', f'pilotlight.App("{app}"', source)
        if n != 1:
            raise ValueError(f"{n} apps in the source, want 1")
    for name, value in options.items():
        source = re.sub(rf"(?<=[(,])\s*{name}=[^,()]+,?(?=[^\n]*\)\n)", "", source)
        source, n = re.subn(r"@app\.(function|cls)\(", rf"@app.\1({name}={value!r}, ", source)
        if not n:
            raise ValueError("no declaration in the source")
    return source


def _environment(directory: Path, variables: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith("PILOTLIGHT_")
    }
    modules = os.pathsep.join([str(ROOT), str(ROOT / "functions")])
    own = {
        "PYTHONPATH": modules,
        "PATH": search_path(),
        profile_variable(): str(directory / "profile.toml"),
        "NO_COLOR": "1",
    }
    return {**inherited, **variables, **own}


def _command(
    config: Path,
    directory: Path,
    *arguments: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    command = [sys.executable, "-m", "pilotlight", "--config", str(config), "--json", *arguments]
    run = subprocess.run(
        command,
        cwd=directory,
        env=_environment(directory, variables),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise StackFailed(
            f"pilotlight {' '.join(arguments)}: "
            f"{run.stderr.strip()[-2000:] or run.stdout.strip()[-2000:]}"
        )
    return json.loads(run.stdout) if run.stdout.strip() else None


def _server_timing(header: str) -> dict[str, float]:
    """`queue;dur=1.2, start;dur=30` as {"queue": 1.2, "start": 30.0}."""
    parts = (part.partition(";dur=") for part in header.replace(" ", "").split(","))
    return {name: float(value) for name, _, value in parts if value}

"""Other servers, each in an environment of its own under `.bench/peers`, pinned by the lock file
beside its script.

A script takes `--port` and serves the echo (or the model) there until SIGTERM. No lock file
contains torch: what a peer needs of it, it borrows from the project's own environment, so that
nothing pulls a build with CUDA.

Peers of the weight cache are no servers: `s3_*.py` and `load_*.py` take orders, see
`benchmarks/orders.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import BENCH_HOME, phase
from benchmarks.network import DidNotStart, free_port

HERE = Path(__file__).parent
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SITE_VARIABLE = "BENCH_PROJECT_SITE"
"""Names the project's site-packages to a peer's script."""


class PeerFailed(Exception):
    """Raised when a peer could not be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another server.

    Attributes:
        name: for tables.
        environment: its environment, and the lock file of that name.
        script, path, body: what runs there, and the request that it answers.
        variables: environment variables of the script.
        takes_orders: it answers lines of its standard input (`RunningPeer.ask`).
    """

    name: str
    environment: str
    script: str
    path: str
    body: str
    variables: Mapping[str, str] = field(default_factory=dict)
    takes_orders: bool = False


ECHO_BODY = '{"text": "a happy person"}'
RAY_ECHO = Peer(name="ray serve", environment="ray", script="ray_echo.py", path="/", body=ECHO_BODY)
RAY_ECHO_FAST = Peer(
    name="ray serve, throughput-optimised",
    environment="ray",
    script="ray_echo.py",
    path="/",
    body=ECHO_BODY,
    variables={"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
)
RAY_ECHO_HAPROXY = Peer(
    name="ray serve, throughput-optimised, HAProxy",
    environment="ray",
    script="ray_echo.py",
    path="/",
    body=ECHO_BODY,
    variables={"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"},
)
LITSERVE_ECHO = Peer(
    name="litserve",
    environment="litserve",
    script="litserve_echo.py",
    path="/predict",
    body=ECHO_BODY,
)
BENTOML_ECHO = Peer(
    name="bentoml", environment="bentoml", script="bentoml_echo.py", path="/echo", body=ECHO_BODY
)
RAY_EMBED = Peer(
    name="ray serve",
    environment="ray",
    script="ray_embed.py",
    path="/",
    body=ECHO_BODY,
    takes_orders=True,
)

ECHOES = (RAY_ECHO, RAY_ECHO_FAST, RAY_ECHO_HAPROXY, LITSERVE_ECHO, BENTOML_ECHO)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPeer:
    """A started peer; `orders` is its standard input, `says` its standard output, for scripts that
    take orders."""

    url: str
    process: subprocess.Popen[str]

    def ask(self, order: str) -> str:
        """Send a line, return the line that comes back. Raises DidNotStart when the script is
        gone."""
        assert self.process.stdin is not None  # pipes, see `running`
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise DidNotStart(f"{self.process.args!r} ended with status {self.process.wait()}")


def install(environment: str) -> Path:
    """Make an environment, once per lock file of that name; returns its interpreter. Raises
    PeerFailed."""
    directory = BENCH_HOME / "peers" / environment
    python, stamp, lock = (
        directory / "bin" / "python",
        directory / "installed.lock",
        HERE / f"{environment}.lock",
    )
    wanted = lock.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    with phase(f"installing {environment}"):
        _run(sys.executable, "-m", "venv", "--clear", str(directory))
        # No dependency is resolved: the lock is complete, and nothing can bring CUDA.
        _run(
            str(python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-qq",
            "--no-deps",
            "-r",
            str(lock),
        )
        stamp.write_text(wanted)
    return python


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[RunningPeer]:
    """Install and start `peer`; it answers when this yields. Raises PeerFailed or DidNotStart."""
    python = install(peer.environment)
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="plpeer", ignore_cleanup_errors=True) as home,
        (Path(home) / "log").open("w+") as log,
    ):
        own = {
            "HOME": home,
            SITE_VARIABLE: sysconfig.get_paths()["purelib"],
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        environment = {**os.environ, **own, **peer.variables}
        process = subprocess.Popen(
            [str(python), str(HERE / peer.script), "--port", str(port), "--home", home],
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            # a pipe that nobody reads would stop a server that logs
            stdout=subprocess.PIPE if peer.takes_orders else log,
            stderr=log,
            text=True,
            # a group of its own, so that whatever it starts can be ended with it
            start_new_session=True,
        )
        started = RunningPeer(url=f"http://127.0.0.1:{port}{peer.path}", process=process)
        try:
            _wait_answer(started, peer, Path(home) / "log")
            yield started
        finally:
            _stop(process)


def _wait_answer(started: RunningPeer, peer: Peer, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    request = urllib.request.Request(
        started.url, peer.body.encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as response:
                response.read()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as e:
            if started.process.poll() is not None or time.monotonic() > deadline:
                raise DidNotStart(f"{peer.name}: {log.read_text()[-2000:]}") from e
            time.sleep(0.1)  # another program's start can only be asked for


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its group, in which only its own children are
    process.wait()


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise PeerFailed(f"{' '.join(command)}: {run.stderr.strip()[-2000:]}")

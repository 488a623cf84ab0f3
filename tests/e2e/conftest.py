"""Fixtures that are whole platforms."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.e2e.clustered import RealCluster
from tests.e2e.harness import PlatformUnderTest, platform_up


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the ends of its platforms' logs."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            running = (
                value if isinstance(value, PlatformUnderTest) else getattr(value, "platform", None)
            )
            if isinstance(running, PlatformUnderTest):
                report.sections.append((f"logs of {name}", running.log_tails(60)))
    return report


@pytest.fixture(scope="session")
def platform() -> Iterator[PlatformUnderTest]:
    """One platform for all tests that only use it."""
    with platform_up() as running:
        yield running


@pytest.fixture(scope="session")
def mortal_platform() -> Iterator[PlatformUnderTest]:
    """One platform for all tests that kill parts of it, by turns: each has to leave it whole, and
    nothing of its own running. Webhooks may go to this machine."""
    with platform_up(controller={"webhooks": "any"}) as running:
        yield running


@pytest.fixture(scope="session")
def real_cluster(request: pytest.FixtureRequest) -> RealCluster | None:
    """The cluster of `--kubeconfig`; None: each module brings its own."""
    return RealCluster.given(request.config)


@pytest.fixture
def chooses_faults(real_cluster: RealCluster | None) -> None:
    """For tests that have a kubelet do what no API asks for."""
    if real_cluster is not None:
        pytest.skip("chooses faults: not on a real cluster")

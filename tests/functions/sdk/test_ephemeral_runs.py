"""Apps that live as long as the process that deployed them."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest

from pilotlight.client import sessions
from pilotlight.client.app_lease import LEASE_S, AppLease
from tests.fakes.fake_platform import FakePlatform
from tests.functions.sdk.conftest import Write


@pytest.fixture
def shop(module: Write) -> ModuleType:
    return module(
        """
        import pilotlight

        app = pilotlight.App("shop")

        @app.function()
        def price(item: str) -> int:
            return len(item)
        """
    )


def test_a_run_deploys_with_a_lease(platform: FakePlatform, shop: ModuleType) -> None:
    with shop.app.run(show_output=False) as run:
        assert platform.leases == {("main", run.name): LEASE_S}
    assert not platform.apps


def test_the_lease_is_renewed_until_it_is_closed(platform: FakePlatform, shop: ModuleType) -> None:
    shop.app.deploy(lease_s=60)
    lease = AppLease(sessions.client(), "shop", every_s=0.01)
    lease.start()
    assert platform.renewed.acquire(timeout=10)
    assert platform.renewed.acquire(timeout=10)
    lease.close()


def test_a_lost_app_is_reported_once(platform: FakePlatform, shop: ModuleType) -> None:
    shop.app.deploy(lease_s=60)
    lost = threading.Semaphore(0)
    lease = AppLease(sessions.client(), "shop", every_s=0.01, on_lost=lost.release)
    lease.start()
    assert platform.renewed.acquire(timeout=10)
    sessions.client().delete_app("shop")
    assert lost.acquire(timeout=10)
    assert not lost.acquire(timeout=0.2)
    lease.close()

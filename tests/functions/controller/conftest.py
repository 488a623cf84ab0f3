"""A controller in this process: its application over a fresh database, with a small node agent
behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pilotlight.controller import http_app
from pilotlight.controller.context import Context
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.object_store import DirectoryStore, ObjectStore
from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.settings import Paths
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from snapshotter.client import AgentClient
from tests.fakes.databases import empty_bytes, empty_sqlite, owned_sqlite
from tests.fakes.hooks import Receiver
from tests.fakes.small_cache import SmallCache
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, ManualClock, SmallAgent
from weight_cache.client import WeightCacheClient


@pytest.fixture
def clock() -> ManualClock:
    """The controller's wall clock."""
    return ManualClock()


@pytest.fixture(scope="session")
def empty_database() -> bytes:
    """A migrated SQLite database."""
    return empty_bytes()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store without any row."""
    opened = Store(empty_sqlite(tmp_path / "controller.db"), clock=clock)
    yield opened
    opened.close()


@dataclass(frozen=True)
class Controller:
    """A running controller and ways to ask it."""

    context: Context
    http: httpx.AsyncClient
    agent: SmallAgent
    cache: SmallCache
    clock: ManualClock
    key: str

    def client(self, key: str | None, *, environment: str | None = None) -> httpx.AsyncClient:
        """A client with another key (None: without one)."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if environment:
            headers["pilotlight-environment"] = environment
        return httpx.AsyncClient(
            transport=_transport(self.context), base_url="http://controller", headers=headers
        )

    async def new_key(self, **body: object) -> str:
        """The text of another key of the same tenant."""
        answer = await self.http.post("/v1/keys", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["secret"])

    async def tenant(self) -> str:
        """The first tenant's id."""
        return str((await self.http.get("/v1/whoami")).json()["tenant"]["id"])

    async def other_tenant(self, name: str = "acme") -> str:
        """The admin key of a new tenant."""
        answer = await self.http.post("/v1/tenants", json={"name": name})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["key"]["secret"])

    async def feed(self, after: int = 0, **params: float) -> dict[str, object]:
        """A page of the feed."""
        headers = {HEADER_PLATFORM_TOKEN: self.context.key.token}
        answer = await self.http.get(
            "/internal/feed", params={"after": after, **params}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def internal(self, path: str, body: object) -> httpx.Response:
        """POST as a process of the platform."""
        return await self.http.post(
            path, json=body, headers={HEADER_PLATFORM_TOKEN: self.context.key.token}
        )


def _transport(context: Context) -> httpx.ASGITransport:
    return httpx.ASGITransport(http_app.build_app(context), raise_app_exceptions=False)


@pytest.fixture
def blobs(tmp_path: Path) -> ObjectStore:
    """Where the controller's blobs lie."""
    return DirectoryStore(tmp_path / "blobs")


@pytest.fixture
async def controller(
    clock: ManualClock, blobs: ObjectStore, tmp_path: Path, short_tmp: Path
) -> AsyncIterator[Controller]:
    """A controller with its first key and one uploaded bundle."""
    async with running_controller(clock=clock, blobs=blobs, home=tmp_path, run=short_tmp) as found:
        yield found


@asynccontextmanager
async def running_controller(
    *,
    clock: ManualClock,
    blobs: ObjectStore,
    home: Path,
    run: Path,
    database: tuple[str, str] | None = None,
    issuers: Mapping[str, Issuer] | None = None,
    secrets: Mapping[str, str] | None = None,
    settings: ControllerSettings | None = None,
) -> AsyncIterator[Controller]:
    """The same, on whichever loop enters it. `database`: its URL, and the first key in it; None = a
    new one in `home`. `issuers`: by which people sign in, with the `secrets` of our clients there."""
    paths = Paths(home=home, run=run)
    agent = SmallAgent()
    server = await agent.serve(paths.socket("snapshotter"))
    cache = SmallCache()
    caching = await cache.serve(paths.socket("weight_cache"))
    bell = ChangeNotifier()
    url, key = database or owned_sqlite(home / "controller.db", now=clock())
    watched = Store(url, clock=clock, on_fed=bell.ring)
    context = Context(
        config=ControllerConfig(
            settings=settings or ControllerSettings(),
            paths=paths,
            trust="isolated",
            uid_base=20_000,
            issuers=issuers or {},
            issuer_secrets=secrets or {},
            dashboard_url="http://controller",
        ),
        store=watched,
        files=BlobStore(
            objects=blobs,
            incoming=home / "blobs" / "incoming",
            limit_bytes=1_000_000,
            read_bytes=70_000,
        ),
        key=PlatformKey.load_or_create(home / "platform.key"),
        agent=AgentClient(paths.socket("snapshotter")),
        cache=WeightCacheClient(paths.socket("weight_cache")),
        notifier=bell,
        metrics=Metrics(),
        clock=clock,
    )
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        transport=_transport(context), base_url="http://controller", headers=headers
    ) as http:
        assert (await http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)).status_code == 200
        yield Controller(context=context, http=http, agent=agent, cache=cache, clock=clock, key=key)
    await context.issuers.aclose()
    await context.agent.aclose()
    await context.cache.aclose()
    server.close()
    caching.close()
    watched.close()


@pytest.fixture
def registry(controller: Controller) -> CollectorRegistry:
    """The controller's metrics."""
    return controller.context.metrics.registry


@pytest.fixture(name="receiver")
async def _receiver() -> AsyncIterator[Receiver]:
    """A receiver of webhooks."""
    async with Receiver().serve() as receiver:
        yield receiver

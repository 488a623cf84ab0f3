"""Rows of docs/reference/dependencies.md that the controller sees: each is really taken away, and what the
row says is looked at."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pilotlight.controller import http_app
from pilotlight.controller.context import Context
from pilotlight.controller.database import tables
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.object_store.s3 import S3Store
from pilotlight.core.settings import Paths
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import USAGE_PATH
from snapshotter.client import AgentClient
from tests.fakes.faulty_objects import Fault, FaultyObjects, faulty_objects
from tests.fakes.hooks import OK, Receiver
from tests.fakes.postgres_server import PostgresServer
from tests.fakes.s3_server import OTHER_VARIABLES
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock
from tests.functions.controller.test_deliverer import Post
from weight_cache.client import WeightCacheClient

DATA = b"bytes of a bundle" * 100
DIGEST = hashlib.sha256(DATA).hexdigest()


async def at_once(_seconds: float) -> None:
    """No pause."""


@pytest.fixture(name="objects")
def _objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with faulty_objects() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        for name in OTHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield running


async def test_without_the_database_changes_are_503_until_it_is_back(
    mortal_postgres: PostgresServer, tmp_path: Path, short_tmp: Path
) -> None:
    store = Store(
        mortal_postgres.url.replace("postgresql://", "postgresql+psycopg://"), clock=ManualClock()
    )
    store.migrate()
    paths = Paths(home=tmp_path, run=short_tmp)
    context = Context(
        config=ControllerConfig(
            settings=ControllerSettings(), paths=paths, trust="isolated", uid_base=None
        ),
        store=store,
        files=BlobStore(
            objects=DirectoryStore(tmp_path / "blobs"),
            incoming=tmp_path / "incoming",
            limit_bytes=1000,
        ),
        key=PlatformKey.load_or_create(tmp_path / "platform.key"),
        agent=AgentClient(paths.socket("snapshotter")),
        cache=WeightCacheClient(paths.socket("weight_cache")),
        notifier=ChangeNotifier(),
        metrics=Metrics(),
        clock=ManualClock(),
    )
    transport = httpx.ASGITransport(http_app.build_app(context), raise_app_exceptions=False)
    headers = {HEADER_PLATFORM_TOKEN: context.key.token}
    async with httpx.AsyncClient(transport=transport, base_url="http://c", headers=headers) as http:
        mortal_postgres.kill()
        for _ in range(2):
            answer = await http.post(USAGE_PATH, json={"activator": "a-0", "records": []})
            assert (answer.status_code, answer.headers["content-type"]) == (
                503,
                "application/problem+json",
            )
            assert int(answer.headers["retry-after"]) >= 1
            assert "functions still work" in answer.json()["detail"]
        mortal_postgres.start()
        assert (
            await http.post(USAGE_PATH, json={"activator": "a-0", "records": []})
        ).status_code == 200
    await context.agent.aclose()
    await context.cache.aclose()
    store.close()


async def test_an_object_store_that_answers_500_is_asked_again_and_then_uploads_are_503(
    controller: Controller, objects: FaultyObjects
) -> None:
    bucket = S3Store(
        bucket=objects.bucket,
        prefix="p",
        client="boto3",
        attempts=3,
        timeout_s=5.0,
        part_bytes=100_000,
        pause=at_once,
    )
    files, context = controller.context.files, controller.context
    there = http_app.build_app(replace(context, files=replace(files, objects=bucket)))
    headers = dict(controller.http.headers)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(there, raise_app_exceptions=False),
        base_url="http://c",
        headers=headers,
    ) as http:
        objects.faults = [Fault(kind="status", method="PUT", status=500)]
        assert (await http.put(f"/v1/blobs/{DIGEST}", content=DATA)).status_code == 200, (
            "one is not noticed"
        )
        other = hashlib.sha256(DATA + b"!").hexdigest()
        objects.faults = [Fault(kind="status", method="PUT", status=500, times=99)]
        refused = await http.put(f"/v1/blobs/{other}", content=DATA + b"!")
        assert (refused.status_code, refused.headers["content-type"]) == (
            503,
            "application/problem+json",
        )
        assert int(refused.headers["retry-after"]) >= 1
        objects.faults = []
        assert (await http.put(f"/v1/blobs/{other}", content=DATA + b"!")).status_code == 200
    await bucket.aclose()


@pytest.fixture(name="post")
async def _post(store: Store, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Post]:
    post = Post(store, clock, PlatformKey.load_or_create(tmp_path / "platform.key"))
    yield post
    post.store.close()


async def test_a_webhook_that_is_down_holds_nobody_up_and_gets_its_message_later(
    post: Post,
) -> None:
    async with Receiver().serve() as receiver:
        url = receiver.url
    budget, _ = post.budget(url)  # nobody listens there any more
    post.spend()
    assert await post.run_once() == 1
    (alert,) = post.alerts()
    assert (alert.budget, alert.delivered_at, alert.attempts) == (budget.id, None, 1)
    assert alert.next_attempt_at == post.clock.now + 5
    post.spend("1.000000000000", "req-2/1")  # what is spent is counted whoever listens

    again = Receiver(reply=lambda _: OK)
    async with again.serve():
        with post.store.write() as write:
            write.sql.execute(tables.budgets.update().values(webhook=again.url))
        post.clock.now += 5
        assert await post.run_once() == 1
    (alert,) = post.alerts()
    assert alert.delivered_at == post.clock.now
    assert len(again.received) == 1

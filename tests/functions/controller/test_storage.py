"""What a tenant may store, build and pin; freeing it; and collecting blobs to which nothing
refers."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller import process
from pilotlight.controller.database import tables
from pilotlight.controller.deployments import dependency_checks
from pilotlight.controller.weights.blob_gc import collect_garbage
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.object_store import blob_key
from pilotlight.errors import InvalidInput, Unavailable
from pilotlight.spec.function import FunctionSpec, ImageSpec
from pilotlight.spec.record_json import from_json
from snapshotter.errors import ImageBuildFailed
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, refused, spec
from weight_cache.manifest import FileHash, Manifest
from weight_cache.sources.manifest_builder import build_manifest

IMAGE = {"python": "3.11", "steps": []}


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def put(http: httpx.AsyncClient, data: bytes) -> httpx.Response:
    return await http.put(f"/v1/blobs/{digest_of(data)}", content=data)


async def use(http: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await http.get("/v1/tenant")).json()["use"])


async def allow(controller: Controller, tenant: str, **overrides: int | None) -> None:
    answer = await controller.http.patch(f"/v1/tenants/{tenant}", json={"overrides": overrides})
    assert answer.status_code == 200, answer.text


async def deploy(
    http: httpx.AsyncClient, bundle: bytes = BUNDLE, app: str = "search", **changes: Any
) -> httpx.Response:
    body = {"functions": [spec(bundle=digest_of(bundle), **changes)]}
    return await http.post(f"/v1/apps/{app}/deploy", json=body)


async def has(http: httpx.AsyncClient, data: bytes | str) -> bool:
    digest = data if isinstance(data, str) else digest_of(data)
    return (await http.get(f"/v1/blobs/{digest}")).status_code == 200


async def push(
    http: httpx.AsyncClient, directory: Path, name: str | None, data: bytes
) -> tuple[str, str]:
    """Digests of a manifest and of its one file, sent, and named where `name` is given."""
    (directory / digest_of(data)[:8]).mkdir()
    (directory / digest_of(data)[:8] / "w.bin").write_bytes(data)
    raw = build_manifest(directory / digest_of(data)[:8]).to_bytes()
    whole = FileHash()
    whole.update(data)
    assert (
        await http.put(f"/v1/blobs/{whole.hexdigest()}?chunked=true", content=data)
    ).status_code == 200
    assert (await put(http, raw)).status_code == 200
    if name is not None:
        assert (
            await http.put(f"/v1/weights/{name}", json={"manifest": digest_of(raw)})
        ).status_code == 200
    return digest_of(raw), whole.hexdigest()


async def collect(controller: Controller) -> int:
    """One round of the janitor; how many blobs it deleted."""
    unused_since = controller.clock() - controller.context.config.settings.blob_grace_s
    _, deleted = await collect_garbage(
        controller.context.collector, controller.context.store, unused_since=unused_since
    )
    return deleted.blobs


def later(controller: Controller, seconds: float = 100_000.0) -> None:
    controller.clock.now += seconds


@pytest.fixture
async def acme(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    """A second tenant's client."""
    async with controller.client(await controller.other_tenant("acme")) as http:
        yield http


# -- stored_bytes ----------------------------------------------------------------------------------
async def test_tenant_at_its_bound_cannot_upload_but_can_delete_and_then_upload(
    controller: Controller, acme: httpx.AsyncClient, tmp_path: Path
) -> None:
    await allow(controller, "acme", stored_bytes=300_000)
    await push(acme, tmp_path, "old", b"o" * 200_000)
    used = (await use(acme))["stored_bytes"]

    over = await put(acme, b"n" * 150_000)
    detail = refused(over, 507)
    assert {str(used), "300000"} <= set(re.findall(r"[0-9]+", detail)), (
        "it names what is stored and the bound"
    )
    assert over.json()["type"].endswith("/storage-quota")
    assert (over.json()["quota"], over.json()["limit"], over.json()["used"]) == (
        "stored_bytes",
        300_000,
        used,
    )
    assert "weights delete" in over.json()["hint"]
    assert (await use(acme))["stored_bytes"] == used
    assert not list(controller.context.files.incoming.iterdir())
    assert (await put(controller.http, b"n" * 150_000)).status_code == 200, (
        "another tenant is not affected"
    )

    assert (await acme.delete("/v1/weights/old")).status_code == 204
    assert (await use(acme))["stored_bytes"] == 0
    assert (await put(acme, b"n" * 150_000)).json()["created"]


async def test_upload_of_unannounced_length_is_cut_off_at_the_bound(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await allow(controller, "acme", stored_bytes=100_000)
    data = b"x" * 400_000
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for begin in range(0, len(data), 10_000):
            sent += 10_000
            yield data[begin : begin + 10_000]

    over = await acme.put(f"/v1/blobs/{digest_of(data)}", content=pieces())
    assert "stored_bytes = 100000" in refused(over, 507)
    assert not list(controller.context.files.incoming.iterdir())
    small = b"y" * 90_000

    async def fitting() -> AsyncIterator[bytes]:
        yield small

    assert (await acme.put(f"/v1/blobs/{digest_of(small)}", content=fitting())).status_code == 200


async def test_uploads_at_once_share_the_bound(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await allow(controller, "acme", stored_bytes=100_000)
    answers = await asyncio.gather(*(put(acme, bytes([n]) * 30_000) for n in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [507] * 7
    assert (await use(acme))["stored_bytes"] == 90_000
    tenants = (await controller.http.get("/v1/tenants")).json()["tenants"]
    assert [controller.context.files.gate.coming_bytes(tenant["id"]) for tenant in tenants] == [
        0,
        0,
    ]


async def test_shared_blob_counts_whole_for_each_tenant_and_stays_until_the_last_gives_it_up(
    controller: Controller, acme: httpx.AsyncClient, tmp_path: Path
) -> None:
    before = (await use(controller.http))["stored_bytes"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    manifest, file = await push(controller.http, tmp_path / "a", "m", b"shared" * 10_000)
    await push(acme, tmp_path / "b", "m", b"shared" * 10_000)
    mine = (await use(controller.http))["stored_bytes"] - before
    assert mine == (await use(acme))["stored_bytes"] > 60_000

    await acme.delete("/v1/weights/m")
    assert (await use(acme))["stored_bytes"] == 0
    assert [await has(controller.http, one) for one in (file, manifest)] == [True, True]
    assert not await has(acme, file)
    await controller.http.delete("/v1/weights/m")
    assert await controller.context.files.objects.info(blob_key(file)) is None


async def test_lost_blob_can_be_sent_again_at_the_bound(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    data = b"d" * 50_000
    await put(acme, data)
    await allow(controller, "acme", stored_bytes=50_000)
    await controller.context.files.objects.delete(blob_key(digest_of(data)))
    assert (await put(acme, data)).status_code == 200
    assert (await use(acme))["stored_bytes"] == 50_000


# -- the floor of free disk ------------------------------------------------------------------------
async def test_upload_below_the_floor_of_the_disk_is_refused_and_leaves_nothing(
    controller: Controller, tmp_path: Path
) -> None:
    free = 1_000_000
    floor = DiskFloor(tmp_path, 900_000, free=lambda _: free)
    files = replace(controller.context.files, floor=floor)
    below = Controller(**{**vars(controller), "context": replace(controller.context, files=files)})
    async with below.client(controller.key) as http:
        assert (await put(http, b"a" * 50_000)).status_code == 200
        over = await put(http, b"b" * 200_000)
        assert "platform.disk_floor_bytes keeps 900000 for the journals" in refused(over, 507)

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal free
            yield b"c" * 50_000
            free = 800_000  # others write, too
            yield b"c"

        data = b"c" * 50_001
        assert "disk_floor_bytes" in refused(
            await http.put(f"/v1/blobs/{digest_of(data)}", content=pieces()), 507
        )
        assert not list(files.incoming.iterdir())
        assert (await http.post("/v1/keys", json={"name": "another"})).status_code == 201, (
            "the database goes on"
        )


# -- builds ----------------------------------------------------------------------------------------
async def build(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post("/v1/images", json=IMAGE)


async def test_builds_of_a_tenant_at_once_are_bounded(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await allow(controller, "acme", builds_at_once=1)
    controller.agent.build_may_end = asyncio.Event()
    first = asyncio.create_task(build(acme))
    await controller.agent.building.wait()
    second = await build(acme)
    assert "builds_at_once = 1" in refused(second, 429)
    assert int(second.headers["retry-after"]) > 0
    assert (await use(acme))["builds_at_once"] == 1
    other = asyncio.create_task(build(controller.http))
    controller.agent.build_may_end.set()
    assert ['"image"' in (await one).text for one in (first, other)] == [True, True]
    assert (await use(acme))["builds_at_once"] == 0
    assert '"image"' in (await build(acme)).text


async def test_build_that_failed_does_not_count(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await allow(controller, "acme", builds_at_once=1)
    controller.agent.build_failure = ImageBuildFailed("no such package", {})
    for _ in range(3):
        assert "no such package" in (await build(acme)).text


def uid_of_build(controller: Controller) -> int:
    """The uid for which the agent was asked to build last."""
    return int([args for verb, args in controller.agent.asked if verb == "build_image"][-1]["uid"])


def deleted_images(controller: Controller) -> list[dict[str, Any]]:
    """What the agent was asked to delete."""
    return [dict(args) for verb, args in controller.agent.asked if verb == "delete_image"]


async def test_image_counts_is_listed_and_can_be_deleted(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    controller.agent.image_bytes = 70_000
    await build(acme)
    assert (await use(acme))["stored_bytes"] == 70_000
    listed = (await acme.get("/v1/images")).json()["images"]
    assert [(row["digest"], row["size_bytes"], row["functions"]) for row in listed] == [
        ("ab" * 32, 70_000, [])
    ]
    assert (await controller.http.get("/v1/images")).json()["images"] == []
    assert (await controller.http.delete(f"/v1/images/{'ab' * 32}")).status_code == 404, (
        "another tenant's"
    )

    await put(acme, BUNDLE)
    assert (await deploy(acme, image="ab" * 32)).status_code == 200
    assert "main/search/hello" in refused(await acme.delete(f"/v1/images/{'ab' * 32}"), 409)
    await acme.delete("/v1/apps/search")
    assert (await acme.delete(f"/v1/images/{'ab' * 32}")).status_code == 204
    assert deleted_images(controller) == [{"digest": "ab" * 32, "uid": uid_of_build(controller)}]
    assert (await use(acme))["stored_bytes"] == 0


async def test_a_tenant_deletes_its_own_image_and_another_tenants_of_the_same_description_stays(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await build(acme)
    acmes = uid_of_build(controller)
    await build(controller.http)
    others = uid_of_build(controller)
    assert acmes != others
    assert (await acme.delete(f"/v1/images/{'ab' * 32}")).status_code == 204
    assert [args["uid"] for args in deleted_images(controller)] == [acmes]
    assert (await controller.http.delete(f"/v1/images/{'ab' * 32}")).status_code == 204
    assert [args["uid"] for args in deleted_images(controller)] == [acmes, others]


async def test_image_that_does_not_fit_is_not_kept(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await allow(controller, "acme", stored_bytes=10_000)
    controller.agent.image_bytes = 20_000
    assert "stored_bytes = 10000" in (await build(acme)).text
    assert deleted_images(controller) == [{"digest": "ab" * 32, "uid": uid_of_build(controller)}]
    assert (await use(acme))["stored_bytes"] == 0
    await put(acme, b"f" * 10_000)
    assert "stored_bytes = 10000" in refused(await build(acme), 507), (
        "a build does not begin when nothing is left"
    )


async def test_image_that_is_being_built_is_not_deleted(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    controller.agent.image = from_json(ImageSpec, IMAGE).digest()
    await build(acme)
    controller.agent.building.clear()
    controller.agent.build_may_end = asyncio.Event()
    again = asyncio.create_task(build(acme))
    await controller.agent.building.wait()
    assert "being built" in refused(await acme.delete(f"/v1/images/{controller.agent.image}"), 409)
    controller.agent.build_may_end.set()
    await again


async def test_a_build_of_another_tenant_does_not_keep_an_image_from_being_deleted(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    digest = controller.agent.image = from_json(ImageSpec, IMAGE).digest()
    await build(acme)
    acmes = uid_of_build(controller)
    controller.agent.building.clear()
    controller.agent.build_may_end = asyncio.Event()
    other = asyncio.create_task(build(controller.http))
    await controller.agent.building.wait()
    answer = await acme.delete(f"/v1/images/{digest}")
    controller.agent.build_may_end.set()
    await other
    assert answer.status_code == 204, answer.text
    assert deleted_images(controller) == [{"digest": digest, "uid": acmes}]
    assert [
        one["digest"] for one in (await controller.http.get("/v1/images")).json()["images"]
    ] == [digest]


async def test_without_uids_an_image_that_another_tenant_builds_is_forgotten_and_its_files_stay(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    with controller.context.store.write() as write:
        write.sql.execute(sa.update(tables.tenants).values(uid=None))
    digest = controller.agent.image = from_json(ImageSpec, IMAGE).digest()
    await build(acme)
    controller.agent.building.clear()
    controller.agent.build_may_end = asyncio.Event()
    other = asyncio.create_task(build(controller.http))
    await controller.agent.building.wait()
    answer = await acme.delete(f"/v1/images/{digest}")
    controller.agent.build_may_end.set()
    await other
    assert answer.status_code == 204, answer.text
    assert deleted_images(controller) == []
    assert (await controller.http.delete(f"/v1/images/{digest}")).status_code == 204
    assert deleted_images(controller) == [{"digest": digest, "uid": None}]


async def test_an_upload_under_an_images_digest_does_not_keep_the_image(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    await build(acme)
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        begun.set()
        await may_end.wait()
        yield b"y"

    upload = asyncio.create_task(
        controller.http.put(f"/v1/blobs/{controller.agent.image}", content=slow())
    )
    await begun.wait()
    answer = await acme.delete(f"/v1/images/{controller.agent.image}")
    may_end.set()
    await upload
    assert answer.status_code == 204, answer.text


# -- pins ------------------------------------------------------------------------------------------
async def test_pins_are_bounded_by_the_plan(
    controller: Controller, acme: httpx.AsyncClient, tmp_path: Path
) -> None:
    await allow(controller, "acme", pinned_bytes=150_000)
    await push(acme, tmp_path, "one", b"1" * 100_000)
    await push(acme, tmp_path, "two", b"2" * 100_000)
    assert (await acme.post("/v1/weights/one/pin")).status_code == 200
    over = await acme.post("/v1/weights/two/pin")
    assert "100000 bytes pinned" in refused(over, 507)
    assert "weights unpin" in over.json()["hint"]
    assert (await acme.post("/v1/weights/one/pin")).status_code == 200, "it is pinned already"
    assert (await use(acme))["pinned_bytes"] == 100_000
    await acme.post("/v1/weights/one/unpin")
    assert (await acme.post("/v1/weights/two/pin")).status_code == 200


# -- collecting ------------------------------------------------------------------------------------
async def test_blob_without_a_reference_is_collected_after_the_grace(
    controller: Controller, tmp_path: Path
) -> None:
    assert (await deploy(controller.http)).status_code == 200
    manifest, file = await push(controller.http, tmp_path, "m", b"weights" * 1000)
    stray = b"uploaded, and never deployed"
    await put(controller.http, stray)
    later(controller, 80_000)
    assert await collect(controller) == 0
    later(controller)
    assert await collect(controller) == 1
    assert await controller.context.files.objects.info(blob_key(digest_of(stray))) is None
    assert not await has(controller.http, stray)
    for needed in (BUNDLE_DIGEST, manifest, file):
        assert await has(controller.http, needed)
    assert (await put(controller.http, stray)).json()["created"], "it can be sent again"
    assert await has(controller.http, stray)


async def test_who_asks_for_a_blob_keeps_it_for_another_grace(controller: Controller) -> None:
    later(controller)
    assert (await controller.http.head(f"/v1/blobs/{BUNDLE_DIGEST}")).status_code == 200
    assert await collect(controller) == 0
    assert (await deploy(controller.http)).status_code == 200
    later(controller)
    assert await collect(controller) == 0
    assert await has(controller.http, BUNDLE)


async def test_deploy_between_mark_and_sweep_keeps_its_blobs(controller: Controller) -> None:
    """A deploy that comes between two looks of a sweep either finds its blobs, or fails and changes
    nothing."""
    later(controller)
    sweeping, deploying = await asyncio.gather(collect(controller), deploy(controller.http))
    if deploying.status_code == 200:
        assert sweeping == 0
        assert await has(controller.http, BUNDLE)
    else:
        assert deploying.json()["missing"] == {"blob": BUNDLE_DIGEST}
        assert (await put(controller.http, BUNDLE)).json()["created"]
        assert (await deploy(controller.http)).status_code == 200


async def test_deploy_checks_files_of_weights_again_in_its_transaction(
    controller: Controller, tmp_path: Path
) -> None:
    manifest, file = await push(controller.http, tmp_path, None, b"weights" * 1000)
    store, files, tenant = (
        controller.context.store,
        controller.context.files,
        await controller.tenant(),
    )
    specs = [from_json(FunctionSpec, spec(weights=[{"name": "w", "manifest": manifest}]))]

    def look() -> dict[str, Manifest]:
        with store.read() as sql:
            return dependency_checks.check_weights(sql, files, tenant=tenant, specs=specs)

    manifests = await anyio.to_thread.run_sync(look)
    with store.write() as write:  # a sweep, between that look and the transaction of the deploy
        write.sql.execute(sa.delete(tables.blob_owners).where(tables.blob_owners.c.digest == file))
    with store.read() as sql, pytest.raises(InvalidInput, match="was not uploaded"):
        dependency_checks.check_dependencies(
            sql,
            tenant=tenant,
            environment="main",
            specs=specs,
            manifests=manifests,
            bundle_max_bytes=1_000_000,
        )


async def test_upload_during_the_deletion_of_the_same_blob_ends_with_the_blob_there(
    controller: Controller,
) -> None:
    stray = b"deleted and sent at the same time"
    await put(controller.http, stray)
    later(controller)
    for _ in range(5):
        await asyncio.gather(collect(controller), put(controller.http, stray))
        assert await has(controller.http, stray), "the answer 200 means that it is there"
        later(controller)


async def test_files_stay_while_a_manifest_names_them(
    controller: Controller, tmp_path: Path
) -> None:
    """Two manifests share a file: it goes with the last of them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, file = await push(controller.http, tmp_path / "a", "first", b"w" * 5000)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "w.bin").write_bytes(b"w" * 5000)
    (tmp_path / "two" / "more.bin").write_bytes(b"m" * 100)
    raw, whole = build_manifest(tmp_path / "two").to_bytes(), FileHash()
    whole.update(b"m" * 100)
    await controller.http.put(f"/v1/blobs/{whole.hexdigest()}?chunked=true", content=b"m" * 100)
    await put(controller.http, raw)
    assert (
        await controller.http.put("/v1/weights/second", json={"manifest": digest_of(raw)})
    ).status_code == 200
    await controller.http.delete("/v1/weights/first")
    assert not await has(controller.http, first)
    assert await has(controller.http, file)
    await controller.http.delete("/v1/weights/second")
    assert [await has(controller.http, one) for one in (file, whole.hexdigest())] == [False, False]


async def test_nothing_is_collected_while_a_manifest_in_use_cannot_be_read(
    controller: Controller, tmp_path: Path
) -> None:
    """An empty blob store (a file system that is not mounted) must not look like weights without
    files."""
    manifest, file = await push(controller.http, tmp_path, "m", b"w" * 5000)
    stray = b"stray"
    await put(controller.http, stray)
    later(controller)
    await controller.context.files.objects.delete(blob_key(manifest))
    with pytest.raises(Unavailable, match=manifest):
        await controller.context.collector.collect(
            tenant=await controller.tenant(), unused_since=controller.clock()
        )
    assert await collect(controller) == 0
    assert [await has(controller.http, one) for one in (file, stray)] == [True, True]


async def test_sweep_that_was_killed_goes_on_later(controller: Controller) -> None:
    """Killed after the mark: the bytes go with the next sweep. Killed after the bytes went: the row
    does."""
    first, second = b"first stray", b"second stray"
    for data in (first, second):
        await put(controller.http, data)
    later(controller)
    await controller.context.collector.collect(
        tenant=await controller.tenant(), unused_since=controller.clock() - 86_400
    )
    await controller.context.files.objects.delete(blob_key(digest_of(second)))
    rows = sa.select(tables.blobs.c.digest).where(tables.blobs.c.deleting_at.is_not(None))
    with controller.context.store.read() as sql:
        assert {digest_of(first), digest_of(second)} <= set(sql.execute(rows).scalars())
    assert (await put(controller.http, second)).status_code == 200, (
        "a blob whose deletion was cut off is taken in again"
    )
    assert await has(controller.http, second)
    await collect(controller)
    assert not await has(controller.http, first)
    assert await has(controller.http, second)
    with controller.context.store.read() as sql:
        assert set(sql.execute(rows).scalars()) == set()


async def test_old_revisions_are_pruned_and_cannot_serve_until_deployed_again(
    controller: Controller,
) -> None:
    bundles = [b"bundle %d" % n for n in range(5)]
    for bundle in bundles:
        await put(controller.http, bundle)
        assert (await deploy(controller.http, bundle)).status_code == 200
    aliased = await controller.http.put(
        "/v1/apps/search/functions/hello/aliases/good", json={"revision": "v2"}
    )
    assert aliased.status_code == 200, aliased.text
    later(controller)
    assert await collect(controller) == 1, "only the bundle that was never deployed"
    trial = (
        await controller.http.post("/v1/apps/search:prune", json={"keep": 1, "dry_run": True})
    ).json()
    done = (await controller.http.post("/v1/apps/search:prune", json={"keep": 1})).json()
    kept = {1, 4}
    assert trial["revisions"] == done["revisions"] == 5 - len(kept)
    assert done["freed_bytes"] == sum(
        len(bundle) for n, bundle in enumerate(bundles) if n not in kept
    )
    assert [await has(controller.http, bundle) for bundle in bundles] == [
        n in kept for n in range(5)
    ]

    back = await controller.http.post("/v1/apps/search/functions/hello:rollback", json={"to": "v1"})
    assert "was pruned" in refused(back, 409)
    await put(controller.http, bundles[0])
    again = await deploy(controller.http, bundles[0])
    assert (again.status_code, again.json()["functions"][0]["created"]) == (200, False)
    later(controller)
    assert await collect(controller) == 0


async def test_app_that_was_deleted_frees_its_bundle_and_can_come_back(
    controller: Controller,
) -> None:
    await deploy(controller.http)
    await controller.http.delete("/v1/apps/search")
    assert not await has(controller.http, BUNDLE)
    missing = await deploy(controller.http)
    assert missing.json()["missing"] == {"blob": BUNDLE_DIGEST}
    await put(controller.http, BUNDLE)
    assert (await deploy(controller.http)).status_code == 200


async def test_collect_by_hand_tells_before_it_frees(
    controller: Controller, acme: httpx.AsyncClient
) -> None:
    stray = b"stray"
    await put(acme, stray)
    assert (await acme.post("/v1/storage:collect", json={})).json()["count"] == 0, (
        "it was uploaded a moment ago"
    )
    trial = (await acme.post("/v1/storage:collect", json={"unused_s": 0, "dry_run": True})).json()
    assert (trial["count"], trial["size_bytes"], trial["blobs"]) == (1, 5, [digest_of(stray)])
    assert await has(acme, stray)
    assert (await acme.post("/v1/storage:collect", json={"unused_s": 0})).json()[
        "deleted_bytes"
    ] == 5
    assert not await has(acme, stray)
    assert await has(controller.http, BUNDLE), "another tenant's stray blob stays"
    assert (await acme.post("/v1/storage:collect", json={"all_tenants": True})).status_code == 403
    everybody = await controller.http.post(
        "/v1/storage:collect", json={"all_tenants": True, "unused_s": 0}
    )
    assert everybody.json()["blobs"] == [BUNDLE_DIGEST]


async def test_janitor_counts_what_it_deletes(controller: Controller) -> None:
    later(controller)
    await process._collect(controller.context)
    value = controller.context.metrics.registry.get_sample_value
    assert value("pilotlight_controller_blobs_deleted_total") == 1
    assert value("pilotlight_controller_blob_bytes_deleted_total") == len(BUNDLE)


async def test_storage_keys_are_shown_and_belong_to_tenants(controller: Controller) -> None:
    await allow(controller, "default", stored_bytes=5_000_000)
    shown = (await controller.http.get("/v1/quotas")).json()["tenant"]
    assert shown["stored_bytes"] == 5_000_000
    assert {"builds_at_once", "pinned_bytes", "log_bytes"} <= set(shown)
    function = await controller.http.put(
        "/v1/quotas/functions/search/hello", json={"stored_bytes": 5}
    )
    assert "stored_bytes" in refused(function, 400)
    assert shown["pinned_bytes"] is None

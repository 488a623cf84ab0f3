"""Volumes: commits of nodes and clients, what is kept when something is killed, bounds, and who may
reach what."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller import http_app
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import chunks, volumes
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.volumes.entries import CHUNK_BYTES, Entry, EntryInvalid, by_path
from pilotlight.errors import Conflict, NotFound, StorageFull, StorageQuotaExceeded, Unavailable
from pilotlight.spec.quotas import UNLIMITED
from snapshotter.errors import VolumeFailed
from snapshotter.volumes import mover_process
from snapshotter.volumes.disk_guard import VolumeDiskGuard
from snapshotter.volumes.node_volumes import MOVERS_OF_TENANT
from tests.fakes.stored_bytes import checked_usage
from tests.fakes.volume_node import HeadsOf, VolumeNode, serve_by, write
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

MAIN = "main"


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(path: str, data: bytes = b"", **changes: Any) -> dict[str, Any]:
    """A file's entry, as a client sends it."""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    body = {"path": path, "kind": "file", "mode": 0o644, "size_bytes": len(data)}
    return {**body, "modified_ns": 0, "chunks": list(map(digest_of, pieces)), **changes}


class Story:
    """A controller, a tenant and nodes."""

    def __init__(self, controller: Controller, tenant: str, tmp_path: Path) -> None:
        self.controller, self.tenant = controller, tenant
        self.scope = EnvironmentRef(tenant=tenant, environment=MAIN)
        self._tmp_path = tmp_path
        self.nodes: list[VolumeNode] = []
        self.service = controller.context.volumes

    def node(self, name: str = "n1") -> VolumeNode:
        """A node with a home of its own, which is the controller's agent from now on."""
        context = self.controller.context
        transport = httpx.ASGITransport(http_app.build_app(context), raise_app_exceptions=False)
        heads = HeadsOf(transport, context.key.node_token)
        node = VolumeNode(self._tmp_path / name, self._tmp_path / "blobs", heads)
        serve_by(context, node)
        self.nodes.append(node)
        return node

    async def committed(self, name: str = "data") -> dict[str, bytes]:
        """Content of every committed file, each of whose chunks is in the store."""
        found = {}
        with self.controller.context.store.read() as sql:
            volume = volumes.find(sql, self.scope, name=name)
            rows = [Entry.from_json(json.loads(row)) for row in volumes.manifest(sql, volume)]
        for one in rows:
            if one.kind == "file":
                _, pieces = await self.service.content(self.scope, name, one.path)
                found[one.path] = b"".join([piece async for piece in pieces])
        return found

    async def use(self) -> int:
        """What counts in `stored_bytes` for volumes."""
        with self.controller.context.store.read() as sql:
            checked_usage(sql, self.tenant)
            table = tables.volume_chunks
            query = sa.select(table.c.size_bytes).where(table.c.tenant == self.tenant)
            return sum(sql.execute(query).scalars())


@pytest.fixture
async def story(controller: Controller, tmp_path: Path) -> AsyncIterator[Story]:
    agent = controller.context.agent
    answer = await controller.http.put("/v1/volumes/data")
    assert answer.status_code == 200, answer.text
    told = Story(controller, await controller.tenant(), tmp_path)
    yield told
    serve_by(controller.context, agent)
    for node in told.nodes:
        await node.aclose()


async def test_what_a_node_commits_is_on_another_node(story: Story) -> None:
    first = story.node("n1")
    here = await first.mount(story.tenant, "data")
    write(here, "a/b.bin", b"x" * (CHUNK_BYTES + 5))
    write(here, "empty", b"")
    (here / "link").symlink_to("a/b.bin")
    done = await story.service.commit_node(story.scope, "data")
    assert (done["version"], done["uploaded_bytes"]) == (1, CHUNK_BYTES + 5)
    there = await story.node("n2").mount(story.tenant, "data")
    assert (there / "a/b.bin").read_bytes() == b"x" * (CHUNK_BYTES + 5)
    assert (there / "link").readlink() == Path("a/b.bin")
    assert (there / "empty").read_bytes() == b""
    assert (await story.service.commit_node(story.scope, "data"))["version"] == 1


async def test_a_commit_sends_what_changed(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "big", b"a" * CHUNK_BYTES + b"b" * CHUNK_BYTES)
    await story.service.commit_node(story.scope, "data")
    write(here, "big", b"a" * CHUNK_BYTES + b"c" * CHUNK_BYTES)
    write(here, "copy", b"a" * CHUNK_BYTES)
    done = await story.service.commit_node(story.scope, "data")
    assert done["uploaded_bytes"] == CHUNK_BYTES
    (here / "copy").unlink()
    assert (await story.service.commit_node(story.scope, "data"))["removed"] == 1
    assert set(await story.committed()) == {"big"}


async def test_of_two_writers_the_last_one_wins_file_by_file(story: Story) -> None:
    first = story.node("n1")
    one = await first.mount(story.tenant, "data")
    second = story.node("n2")
    two = await second.mount(story.tenant, "data")
    write(one, "shared", b"of the first")
    write(one, "first", b"1")
    write(two, "shared", b"of the second")
    write(two, "second", b"2")
    serve_by(story.controller.context, first)
    await story.service.commit_node(story.scope, "data")
    serve_by(story.controller.context, second)
    await story.service.commit_node(story.scope, "data")
    assert await story.committed() == {"shared": b"of the second", "first": b"1", "second": b"2"}
    serve_by(story.controller.context, first)
    await story.service.reload_node(story.scope, "data")
    assert (one / "shared").read_bytes() == b"of the second"
    assert (one / "second").read_bytes() == b"2"


async def test_reload_keeps_changes_that_are_not_committed(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    for name in ("changed", "removed", "same"):
        write(here, name, b"before")
    await story.service.commit_node(story.scope, "data")
    write(here, "changed", b"mine!")
    (here / "removed").unlink()
    opened = (here / "same").open("rb")
    put = [Entry.from_json(entry(n, b"theirs")) for n in ("changed", "removed", "same", "new")]
    await upload(story, b"theirs")
    await story.service.commit_client(story.scope, "data", put=put, remove=[], remove_trees=[])
    done = await story.service.reload_node(story.scope, "data")
    assert sorted(done["kept"]) == ["changed", "removed"]
    assert (here / "changed").read_bytes() == b"mine!"
    assert not (here / "removed").exists()
    assert ((here / "same").read_bytes(), (here / "new").read_bytes()) == (b"theirs", b"theirs")
    assert opened.read() == b"before"  # an open file stays as it was
    opened.close()
    await story.service.commit_node(story.scope, "data")
    assert await story.committed() == {"changed": b"mine!", "same": b"theirs", "new": b"theirs"}


async def upload(story: Story, data: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    await story.service.upload(story.tenant, digest_of(data), pieces())


class _Died(BaseException):
    """Stands for the end of the controller's process."""


@pytest.mark.slow  # ten commits, each with two processes of the node
async def test_killed_at_every_step_a_commit_loses_nothing_that_was_committed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are each transaction and each operation of the node; the process ends before or
    after it."""
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "kept", b"first")
    write(here, "changed", b"first")
    await story.service.commit_node(story.scope, "data")
    before = await story.committed()
    steps, number = 1, 0
    while number < 2 * steps:
        step = 0

        def dying(work: Callable[..., Any], last: int = number) -> Callable[..., Any]:
            async def run(*args: Any, **options: Any) -> Any:
                nonlocal step
                step += 1
                if (step, 0) == (last // 2 + 1, last % 2):
                    raise _Died
                result = await work(*args, **options)
                if (step, 1) == (last // 2 + 1, last % 2):
                    raise _Died
                return result

            return run

        write(here, "changed", f"in attempt {number}")
        write(here, f"new-{number}", b"n" * number)
        service = story.service
        with monkeypatch.context() as patch:
            patch.setattr(service, "write", dying(service.write))
            patch.setattr(node, "upload_volume", dying(node.upload_volume))
            patch.setattr(node, "commit_volume", dying(node.commit_volume))
            try:
                await service.commit_node(story.scope, "data")
            except _Died:
                pass
            else:
                steps = step
                break
        steps = max(steps, step + 1)
        found = await story.committed()
        after = {**before, "changed": f"in attempt {number}".encode()}
        assert found["kept"] == b"first"
        assert found["changed"] in (before["changed"], after["changed"])
        before = found
        number += 1
    assert steps == 5  # reserve, upload, mark, apply, tell
    await story.service.commit_node(story.scope, "data")
    found = await story.committed()
    assert found["changed"] == f"in attempt {number}".encode()
    assert {f"new-{n}" for n in range(number)} <= found.keys()


async def test_a_killed_mover_is_an_error_and_the_next_commit_succeeds(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "a", b"1")
    real = asyncio.create_subprocess_exec

    async def killed(*argv: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await real(*argv, **options)
        os.kill(child.pid, signal.SIGKILL)
        return child

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", killed)
        with pytest.raises(Unavailable, match="ended with status -9"):
            await story.service.commit_node(story.scope, "data")
    await story.service.commit_node(story.scope, "data")
    assert await story.committed() == {"a": b"1"}


async def test_a_mover_that_takes_too_long_is_ended(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "a", b"1")
    monkeypatch.setattr(mover_process, "MAX_S", 0.0)
    with pytest.raises(Unavailable, match="ended with status -9"):
        await story.service.commit_node(story.scope, "data")


async def test_one_tenants_movers_leave_turns_to_others(story: Story) -> None:
    node = story.node().volumes
    async with contextlib.AsyncExitStack() as held:
        for _ in range(MOVERS_OF_TENANT):
            await held.enter_async_context(node.turn("t-1"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), node.turn("t-1"):
                pass
        async with asyncio.timeout(20.0), node.turn("t-2"):
            pass
    async with asyncio.timeout(20.0), node.turn("t-1"):
        pass


async def test_a_file_that_is_too_large_is_refused_before_it_is_read(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    with (here / "sparse").open("wb") as file:
        file.truncate(2 * 1024**4)
    async with asyncio.timeout(20.0):
        with pytest.raises(Conflict, match="sparse: 2199023255552 bytes"):
            await story.service.commit_node(story.scope, "data")


async def test_a_commit_of_too_many_bytes_is_refused_before_it_is_held_in_memory(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    for number in range(3):
        write(here, str(number), b"x" * 10)
    monkeypatch.setattr(volumes, "MAX_BYTES", 29)
    with pytest.raises(StorageQuotaExceeded, match="would have size_bytes = 30"):
        await story.service.commit_node(story.scope, "data")
    monkeypatch.setattr(volumes, "MAX_BYTES", 30)
    assert (await story.service.commit_node(story.scope, "data"))["changed"] == 3


async def test_a_commit_leaves_the_journals_their_disk(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "a", b"1")
    node.floor.floor_bytes = 2**62
    with pytest.raises(StorageFull, match="disk_floor_bytes"):
        await story.service.commit_node(story.scope, "data")
    node.floor.floor_bytes = 0
    await story.service.commit_node(story.scope, "data")
    assert await story.committed() == {"a": b"1"}


@pytest.mark.parametrize("op", ["scan", "upload", "sync"])
async def test_a_full_disk_or_store_says_so_and_nothing_is_committed(
    story: Story, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "a", b"1")
    await story.service.commit_node(story.scope, "data")
    write(here, "a", b"22")

    async def full(*_: Any, **__: Any) -> None:
        raise VolumeFailed("No space left on device", {"reason": "disk_full"})

    if op == "scan":
        (here.parent / "scan.json.new").symlink_to("/dev/full")
    else:
        name = "upload_volume" if op == "upload" else "reload_volume"
        monkeypatch.setattr(node, name, full)
    verb = story.service.reload_node if op == "sync" else story.service.commit_node
    with pytest.raises(StorageFull, match="No space left"):
        await verb(story.scope, "data")
    assert await story.committed() == {"a": b"1"}


async def test_unused_chunks_are_collected_and_used_ones_are_not(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    write(here, "a", b"old")
    await story.service.commit_node(story.scope, "data")
    write(here, "a", b"newer")
    await story.service.commit_node(story.scope, "data")
    assert await story.use() == 8
    assert await story.service.collect_all(before=story.controller.clock()) == 0
    story.controller.clock.now += 1
    assert await story.service.collect_all(before=story.controller.clock()) == 1
    assert (await story.use(), await story.committed()) == (5, {"a": b"newer"})
    assert (await story.controller.http.delete("/v1/volumes/data")).status_code == 204
    assert await story.use() == 0
    blobs = story.controller.context.files.objects
    assert await blobs.keys("volumes/") == []
    assert not here.exists()


async def test_a_volume_deleted_while_mounted_is_removed_from_the_node_later(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    node.running = {(story.tenant, MAIN, "data")}
    write(here, "a", b"1")
    await story.controller.http.delete("/v1/volumes/data")
    assert (here / "a").read_bytes() == b"1"
    with pytest.raises(NotFound, match="no volume 'data'"):
        await story.service.commit_node(story.scope, "data")
    await story.controller.http.put("/v1/volumes/data")
    other = await node.mount(story.tenant, "data")
    assert (other != here, list(other.iterdir())) == (True, [])
    node.running = set()
    await node.volumes.sweep()
    assert (here.exists(), other.exists()) == (False, True)


async def test_the_plan_bounds_bytes_and_files(story: Story) -> None:
    node = story.node()
    here = await node.mount(story.tenant, "data")
    http = story.controller.http
    limits = {"overrides": {"stored_bytes": 100, "volume_files": 2}}
    name = (await http.get("/v1/whoami")).json()["tenant"]["name"]
    assert (await http.patch(f"/v1/tenants/{name}", json=limits)).status_code == 200
    write(here, "large", b"x" * 200)
    with pytest.raises(StorageQuotaExceeded, match="stored_bytes"):
        await story.service.commit_node(story.scope, "data")
    assert (await story.use(), await story.committed()) == (0, {})
    write(here, "large", b"")
    write(here, "second", b"")
    write(here, "third", b"")
    with pytest.raises(Conflict, match="more than 2 files"):
        await story.service.commit_node(story.scope, "data")
    answer = await http.post(
        "/v1/volumes/data/commit", json={"put": [entry(name) for name in "abc"]}
    )
    assert "volume_files" in refused(answer, 507)
    assert await story.committed() == {}


async def test_a_client_uploads_what_is_missing_and_commits(story: Story) -> None:
    http, data = story.controller.http, b"content"
    body = {"put": [entry("d/f", data)]}
    answer = await http.post("/v1/volumes/data/commit", json=body)
    assert (answer.status_code, answer.json()["missing"]) == (409, [digest_of(data)])
    wrong = await http.put(f"/v1/volume-chunks/{digest_of(b'other')}", content=data)
    assert "digest is" in refused(wrong, 400)
    assert (await http.put(f"/v1/volume-chunks/{digest_of(data)}", content=data)).status_code == 200
    assert (await http.post("/v1/volumes/data/commit", json=body)).json() == {"version": 1}
    assert (await http.get("/v1/volumes/data/content?path=d/f")).content == data
    listed = (await http.get("/v1/volumes/data/files?path=d")).json()["entries"]
    assert [(e["path"], e["size_bytes"]) for e in listed] == [("d/f", 7)]
    lied = {"put": [entry("d/g", data, size_bytes=6)]}
    assert (await http.post("/v1/volumes/data/commit", json=lied)).status_code == 409
    gone = await http.post("/v1/volumes/data/commit", json={"remove_trees": ["d"]})
    assert (gone.status_code, await story.committed()) == (200, {})


async def test_another_tenant_or_environment_neither_names_reads_nor_fills_it(
    story: Story,
) -> None:
    http, data = story.controller.http, b"secret"
    await http.put(f"/v1/volume-chunks/{digest_of(data)}", content=data)
    await http.post("/v1/volumes/data/commit", json={"put": [entry("f", data)]})
    used = await story.use()
    stranger = story.controller.client(await story.controller.other_tenant())
    await http.post("/v1/environments", json={"name": "staging"})
    key = await story.controller.new_key(scope="deploy", environment="staging")
    async with stranger, story.controller.client(key) as elsewhere:
        for client in (stranger, elsewhere):
            assert (await client.get("/v1/volumes")).json() == {"volumes": []}
            assert (await client.get("/v1/volumes/data/content?path=f")).status_code == 404
            assert (await client.delete("/v1/volumes/data")).status_code == 404
        # a chunk that only another tenant has is missing, whatever its digest
        await stranger.put("/v1/volumes/data")
        theirs = await stranger.post("/v1/volumes/data/commit", json={"put": [entry("f", data)]})
        assert (theirs.status_code, theirs.json()["missing"]) == (409, [digest_of(data)])
        await stranger.put(f"/v1/volume-chunks/{digest_of(b'x')}", content=b"x")
    assert await story.use() == used


async def test_internal_paths_need_the_platforms_token(story: Story) -> None:
    path = f"/internal/volumes/{story.tenant}/main/data"
    for ask in (
        story.controller.http.get(path),
        story.controller.http.get(f"{path}/manifest"),
        story.controller.http.post(f"{path}/commit"),
    ):
        assert (await ask).status_code == 403


async def test_a_deploy_needs_its_volumes_and_an_environment_keeps_them(story: Story) -> None:
    http = story.controller.http
    mounts: dict[str, Any] = {"volumes": [{"name": "other", "path": "/data"}]}
    answer = await http.post("/v1/apps/a/deploy", json={"functions": [spec(**mounts)]})
    assert "there is no volume 'other'" in refused(answer, 400)
    for path in ("/etc/x", "data", "/data/../etc", "/"):
        bad: dict[str, Any] = {"volumes": [{"name": "data", "path": path}]}
        answer = await http.post("/v1/apps/a/deploy", json={"functions": [spec(**bad)]})
        assert "volumes" in refused(answer, 400)
    await http.post("/v1/environments", json={"name": "staging"})
    async with story.controller.client(story.controller.key, environment="staging") as staging:
        await staging.put("/v1/volumes/held")
    assert "held" in refused(await http.delete("/v1/environments/staging"), 409)


async def test_a_file_replaces_a_directory_and_the_reverse(story: Story) -> None:
    async def commit(**body: Any) -> None:
        answer = await story.controller.http.post("/v1/volumes/data/commit", json=body)
        assert answer.status_code == 200, answer.text

    await commit(put=[entry("a/b"), entry("a/c/d"), entry("a.b")])
    await commit(put=[entry("a")])
    assert set(await story.committed()) == {"a", "a.b"}
    await commit(put=[entry("a/b")])
    assert set(await story.committed()) == {"a/b", "a.b"}
    await commit(put=[entry("a%/b"), entry("ab/c"), entry("A%/c")])
    await commit(put=[entry("a%")])  # a path is no pattern, and its case counts
    assert set(await story.committed()) == {"a/b", "a.b", "a%", "ab/c", "A%/c"}
    listed = (await story.controller.http.get("/v1/volumes/data/files")).json()["entries"]
    assert [e["path"] for e in listed] == ["A%", "a", "a%", "a.b", "ab"]
    await commit(put=[entry("a/d")], remove=["a", "a/b"])  # a directory that is not empty stays
    assert {"a/d", "a.b"} <= set(await story.committed())


def unused(write_: Write, tenant: str) -> list[str]:
    """Mark all chunks to which nothing refers."""
    referenced = volumes.chunks_of_tenant(write_.sql, tenant=tenant)
    return chunks.mark_unused(write_, tenant=tenant, before=float("inf"), referenced=referenced)


def test_chunks_that_are_deleted_are_uploaded_again(story: Story) -> None:
    with story.controller.context.store.write() as write_:
        sizes = {"a" * 64: 3}
        tenant = story.tenant
        assert chunks.reserve(write_, UNLIMITED, tenant=tenant, sizes=sizes) == ["a" * 64]
        chunks.mark_stored(write_, tenant=tenant, digests=sizes)
        assert chunks.reserve(write_, UNLIMITED, tenant=tenant, sizes=sizes) == []
        assert unused(write_, tenant) == ["a" * 64]
        assert chunks.missing(write_.sql, tenant=tenant, sizes=sizes) == ["a" * 64]
        assert chunks.reserve(write_, UNLIMITED, tenant=tenant, sizes=sizes) == ["a" * 64]
        chunks.forget(write_, tenant=tenant, digests=sizes)  # not those that are wanted again
        chunks.mark_stored(write_, tenant=tenant, digests=sizes)
        assert chunks.missing(write_.sql, tenant=tenant, sizes=sizes) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["path", "kind", "chunks", "mode", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(body=_JSON | st.fixed_dictionaries({"path": st.text(max_size=20), "kind": _JSON}))
def test_rubbish_entries_are_refused_by_their_own_error(body: Any) -> None:
    try:
        found = Entry.from_json(body)
    except EntryInvalid:
        return
    assert Entry.from_json(found.to_json()) == found
    assert ".." not in found.path.split("/")


@pytest.mark.parametrize(
    "body",
    [
        entry("../x"),
        entry("/x"),
        entry("a//b"),
        entry("a\0b"),
        entry("\ud800"),
        entry("/".join("d" * 65)),
        entry("n" * 256),
        entry("x", size_bytes=5),
        entry("x", size_bytes=-1),
        entry("x", mode=0o4755),
        entry("x", kind="device"),
        entry("x", chunks=["zz"], size_bytes=1),
        {"path": "l", "kind": "link", "target": "/etc/passwd"},
        {"path": "a/l", "kind": "link", "target": "../../x"},
        {"path": "l", "kind": "link", "target": ""},
    ],
)
def test_entries_that_no_volume_can_have(body: dict[str, Any]) -> None:
    with pytest.raises(EntryInvalid):
        Entry.from_json(body)


def test_a_manifest_has_no_path_twice_and_none_below_a_file() -> None:
    file = Entry.from_json(entry("a"))
    with pytest.raises(EntryInvalid, match="twice"):
        by_path([file, file])
    with pytest.raises(EntryInvalid, match="below"):
        by_path([file, Entry.from_json(entry("a/b"))])


async def test_a_disk_below_its_floor_loses_what_is_not_mounted_then_who_fills_it(
    story: Story, tmp_path: Path
) -> None:
    node, http = story.node(), story.controller.http
    await http.put("/v1/volumes/other")
    kept_at = await node.mount(story.tenant, "other")
    here_at = await node.mount(story.tenant, "data")
    for at, size in ((kept_at, 10), (here_at, 100_000)):
        write(at, "file", b"x" * size)
    await story.service.commit_node(story.scope, "other")
    key = (story.tenant, MAIN, "data")
    node.running = {key}
    ended: list[tuple[str, str, str]] = []
    floor = DiskFloor(tmp_path, 1, free=lambda _: 0 if here_at.exists() else 10)

    def end(one: tuple[str, str, str]) -> int:
        ended.append(one)
        node.running.discard(one)
        return 1

    guard = VolumeDiskGuard(node.volumes, floor, end_users=end)
    await guard.make_room()
    assert (kept_at.exists(), here_at.exists(), ended) == (False, True, [key])
    await guard.make_room()
    assert not here_at.exists()
    again = await node.mount(story.tenant, "other")
    assert (again / "file").read_bytes() == b"x" * 10


@pytest.mark.skipif(os.geteuid() != 0, reason="the mover gives up root")
async def test_a_tree_that_is_swapped_for_links_leads_nowhere(story: Story, tmp_path: Path) -> None:
    """Between a scan and the upload, and before a reload."""
    node = story.node()
    here = await node.mount(story.tenant, "data")
    (tmp_path / "secret").mkdir()
    secret = tmp_path / "secret" / "f"
    secret.write_bytes(b"of the platform")
    secret.chmod(0o600)
    write(here, "d/f", b"of the tenant!!")
    volume = here.parent.name
    parts = [part async for part in node.scan_volume(volume, max_entries=10)]
    digests = [d for part in parts for e in part.get("put", ()) for d in e.get("chunks", ())]
    (here / "d").rename(here / "was")
    (here / "d").symlink_to(tmp_path / "secret")
    with pytest.raises(VolumeFailed, match="changed while it was committed"):
        await node.upload_volume(volume, digests)
    (here / "d").unlink()
    (here / "d").mkdir()
    (here / "d" / "f").symlink_to(secret)
    with pytest.raises(VolumeFailed, match="changed while it was committed"):
        await node.upload_volume(volume, digests)
    (here / "d" / "f").unlink()
    (here / "d").rmdir()
    (here / "d").symlink_to(tmp_path / "secret")
    await upload(story, b"theirs")
    put = [Entry.from_json(entry("d/f", b"theirs"))]
    await story.service.commit_client(story.scope, "data", put=put, remove=[], remove_trees=[])
    await story.service.reload_node(story.scope, "data")
    assert secret.read_bytes() == b"of the platform"
    write(here, "hidden", b"x")
    (here / "hidden").chmod(0)
    os.chown(here / "hidden", 0, 0)  # a file that is not the tenant's is not read
    (here / "d").unlink()
    with pytest.raises(Conflict, match="hidden cannot be read"):
        await story.service.commit_node(story.scope, "data")

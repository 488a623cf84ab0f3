"""RESTORE through the agent, with real slots, real CRIU and the small worker: what comes back, what
it falls back to, what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from snapshotter.client import AgentClient
from snapshotter.criu import working_set
from snapshotter.errors import AgentUnavailable, SnapshotRefused, StartFailed, Unsupported
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Cgroups
from snapshotter.snapshots import readahead
from snapshotter.starts.template_boot import BEHIND_S
from snapshotter.types import InstanceInfo, InstanceState, LaunchSpec, SnapshotState, StartKind
from tests.fakes.agent_home import MIB, AgentHome, ask, begin
from tests.fakes.cluster_snapshots import Pods, ReportingNode
from tests.fakes.databases import empty_sqlite
from tests.fakes.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("criu")]


class SlowHome(AgentHome):
    """Its workers take 0.2 s to boot: RESTORE is always expected to be faster."""

    def launch(self, revision: str = "f-1@v1-abc", **changes: Any) -> LaunchSpec:
        entry = changes.pop("entry", {})
        boot = ["pause:0.2", *changes.pop("boot", []), *entry.pop("boot", [])]
        return super().launch(
            revision, entry={"boot": boot, "wake": changes.pop("wake", []), **entry}, **changes
        )


@pytest.fixture
def home(short_tmp: Path) -> AgentHome:
    return SlowHome(short_tmp)


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest) -> None:
    """But where the end of that patience is what a test waits for."""
    if "hang" not in request.node.name:
        request.getfixturevalue("patient_restores")


async def from_disk(client: AgentClient, launch: LaunchSpec, **changes: Any) -> InstanceInfo:
    """A start with nothing of the revision in memory."""
    await client.drop_template(launch.revision)
    return await begin(client, launch, **changes)


async def test_a_revision_with_a_snapshot_comes_back_from_it(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=[f"allocate:{8 * MIB}"])
    made = await client.checkpoint(launch)
    assert (made.state, made.in_place, made.revision) == (
        SnapshotState.READY,
        False,
        launch.revision,
    )
    assert {"quiesce", "dump", "publish", "prove"} <= set(made.phases_ms)

    info = await from_disk(client, launch, secret_env={"TOKEN": "s3cret"})

    assert info.start_kind is StartKind.RESTORE
    assert list(info.phases_ms) == ["slot", "prefetch", "restore", "revive", "serve", "wake"]
    assert await ask(info, "/restored") is True
    assert await ask(info, "/hoard") == 8 * MIB
    assert await ask(info, "/env/TOKEN") == "s3cret"


async def test_a_secret_that_an_instance_was_given_is_in_no_image(home: AgentHome) -> None:
    launch, secret = home.launch(boot=["remember:known"]), "planted-f7a1c9"
    async with home.agent(snapshots=True, snapshot_builds_per_hour=0), home.client() as client:
        infos = [
            await begin(client, launch, secret_env={"TOKEN": secret, "LONG": secret * 5000})
            for _ in range(3)
        ]
        assert [await ask(info, "/env/TOKEN") for info in infos] == [secret] * 3
        assert [len(await ask(info, "/env/LONG")) for info in infos] == [5000 * len(secret)] * 3
        (template,) = await client.templates()

        made = await client.checkpoint(launch)

        assert [t.pid for t in await client.templates()] == [template.pid]
    files = [
        p.read_bytes()
        for p in (home.paths.home / "node/snapshots" / made.id).rglob("*")
        if p.is_file()
    ]
    assert any(b"known" in content for content in files)
    assert not any(secret.encode() in content for content in files)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_what_an_instance_changed_is_in_no_image(
    home: AgentHome, client: AgentClient, when: str
) -> None:
    """Instances share the slot's files with their Template: a snapshot is made of a slot in which
    none has run."""
    launch = home.launch(boot=["write:/tmp/note=booted"], wake=["booted:write:/tmp/note=changed"])
    template = await client.prepare(launch)
    if when == "before":
        assert await ask(await begin(client, launch), "/read/tmp/note") == "changed"
    making = asyncio.create_task(client.checkpoint(launch))
    if when == "meanwhile":
        while not making.done():
            await client.stop((await begin(client, launch)).id, grace_s=0)
    await making
    assert [t.pid for t in await client.templates()] == [template.pid]

    info = await from_disk(client, launch)

    assert info.start_kind is StartKind.RESTORE
    assert await ask(info, "/read/tmp/note") == "booted"


async def test_a_template_comes_back_behind_the_first_instance(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch()
    made = await client.checkpoint(launch)
    manifest = home.paths.home / "node/snapshots" / made.id / "manifest.json"
    proof = json.loads(manifest.read_text())["proof"]
    assert working_set.decode(proof["working_set"])
    assert any("libc.so" in path for path in readahead.decode(proof["file_parts"]))
    first = await from_disk(client, launch)

    while not await client.templates():
        await asyncio.sleep(0.01)
    second = await begin(client, launch)

    assert (first.start_kind, second.start_kind) == (StartKind.RESTORE, StartKind.FORK)
    assert first.pid != second.pid
    assert await ask(second, "/restored") is True


@pytest.mark.slow  # real dumps and restores
async def test_a_template_that_is_dropped_while_it_comes_back_does_not_come(
    home: AgentHome, client: AgentClient
) -> None:
    gone, other = home.launch(), home.launch("f-2@v1-def")
    for launch in (gone, other):
        await client.checkpoint(launch)
    first = await from_disk(client, gone)
    await client.drop_template(gone.revision)
    await client.stop(first.id, grace_s=0)

    await from_disk(client, other)
    while not (templates := await client.templates()):
        await asyncio.sleep(0.01)
    assert [t.revision for t in templates] == [other.revision]
    assert (await begin(client, gone)).start_kind is StartKind.RESTORE
    while gone.revision not in [t.revision for t in await client.templates()]:
        await asyncio.sleep(0.01)


async def test_prepare_restores_a_template(home: AgentHome, client: AgentClient) -> None:
    launch = home.launch()
    await client.checkpoint(launch)
    await client.drop_template(launch.revision)

    template = await client.prepare(launch)

    assert "restore" in template.phases_ms
    assert (await begin(client, launch)).start_kind is StartKind.FORK


@pytest.mark.parametrize("pages", ["lazy", "eager"])
async def test_eight_starts_at_once_from_zero_are_forked_from_one_restored_worker(
    home: AgentHome, pages: str
) -> None:
    launch = home.launch(boot=[f"allocate:{16 * MIB}"])
    async with (
        home.agent(snapshots=True, snapshot_pages=pages, parked_per_template=1),
        home.client() as client,
    ):
        made = await client.checkpoint(launch)
        await client.drop_template(launch.revision)

        infos = await asyncio.gather(
            *(begin(client, launch, secret_env={"TOKEN": str(n)}) for n in range(8))
        )

        assert {i.start_kind for i in infos} == {StartKind.RESTORE}
        assert all({"restore", "fork"} <= set(i.phases_ms) for i in infos)
        assert len({i.pid for i in infos}) == 8
        [template] = await client.templates()
        assert template.forks == 8
        assert {Path(i.socket).parent.name for i in infos} == {slot_of(home)}
        assert all(await asyncio.gather(*(ask(i, "/restored") for i in infos)))
        assert await asyncio.gather(*(ask(i, "/hoard") for i in infos)) == [16 * MIB] * 8
        assert [await ask(i, "/env/TOKEN") for i in infos] == [str(n) for n in range(8)]
        [snapshot] = await client.snapshots()
        assert (snapshot.id, snapshot.restores >= 8) == (made.id, True)
        while not (await client.templates())[0].parked:  # once all of its memory is there
            await asyncio.sleep(0.01)
        assert (await client.templates())[0].pss_bytes > 16 * MIB / 16
        assert (await begin(client, launch)).start_kind is StartKind.FORK


def slot_of(home: AgentHome) -> str:
    """The only slot in which anything was launched."""
    [record] = (home.paths.run / "slots").glob("s-*/housing.json")
    return record.parent.name


async def test_starts_that_wait_go_on_without_the_one_that_began_to_restore(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch()
    await client.checkpoint(launch)
    await client.drop_template(launch.revision)
    async with home.client() as other:
        first = asyncio.create_task(begin(other, launch))
        while not [i for i in await client.instances() if i.state is InstanceState.STARTING]:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(begin(client, launch)) for _ in range(3)]
        await asyncio.sleep(0.005)
        first.cancel()
        await asyncio.wait([first])

    infos = await asyncio.gather(*waiting)

    assert {i.start_kind for i in infos} == {StartKind.RESTORE}
    assert len(await client.instances()) == 3


async def test_where_a_template_has_no_room_each_start_restores_a_worker_of_its_own(
    home: AgentHome,
) -> None:
    launch = home.launch()
    async with home.agent(snapshots=True, template_memory_bytes=MIB), home.client() as client:
        await client.checkpoint(launch)
        await client.drop_template(launch.revision)

        infos = await asyncio.gather(*(begin(client, launch) for _ in range(3)))

        assert {i.start_kind for i in infos} == {StartKind.RESTORE}
        assert len({Path(i.socket).parent for i in infos}) == 3
        assert await client.templates() == []


async def test_starts_that_waited_for_a_worker_that_is_no_good_are_all_cold(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(wake=["restored:raise:stale"])
    await client.checkpoint(launch)
    await client.drop_template(launch.revision)

    infos = await asyncio.gather(*(begin(client, launch) for _ in range(3)))

    assert {i.start_kind for i in infos} == {StartKind.COLD}
    assert not any(await asyncio.gather(*(ask(i, "/restored") for i in infos)))


async def test_a_cold_start_has_a_snapshot_made_behind_its_back(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch())

    while not [s for s in await client.snapshots() if s.state is SnapshotState.READY]:
        await asyncio.sleep(0.02)
    assert info.start_kind is StartKind.COLD
    await client.stop(info.id, grace_s=0)
    assert (await from_disk(client, home.launch())).start_kind is StartKind.RESTORE


async def test_a_worker_that_cannot_be_forked_is_restored_one_to_one(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=["thread"])
    made = await client.checkpoint(launch)
    assert made.in_place

    infos = await asyncio.gather(*(begin(client, launch) for _ in range(3)))

    assert {i.start_kind for i in infos} == {StartKind.RESTORE}
    assert len({i.pid for i in infos}) == 3
    await ask(infos[0], "/print/here")
    assert await client.templates() == []


@pytest.mark.parametrize("tells", [True, False])
async def test_what_stands_in_the_way_is_told_each_time_and_no_start_fails(
    home: AgentHome, client: AgentClient, tells: bool
) -> None:
    launch = home.launch(entry={"boot": ["refuse:TCP to 10.0.0.2:443"], "tells": tells})

    for _ in range(2):
        with pytest.raises(SnapshotRefused, match=r"10\.0\.0\.2:443") as e:
            await client.checkpoint(launch)
        assert [reason["kind"] for reason in e.value.detail["reasons"]] == ["connection"]
    assert (await begin(client, launch)).start_kind is StartKind.FORK
    assert await client.snapshots() == []


async def test_a_copy_that_answers_differently_is_quarantined_and_never_served(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=["wrong"])

    with pytest.raises(SnapshotRefused, match="answered differently"):
        await client.checkpoint(launch)

    [snapshot] = await client.snapshots()
    assert (snapshot.state, "differently" in snapshot.reason) == (SnapshotState.QUARANTINED, True)
    assert (await from_disk(client, launch)).start_kind is StartKind.COLD


async def test_deleted_snapshots_are_gone_and_the_next_start_is_cold(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch("f-7@v1", snapshot=True)
    made = await client.checkpoint(launch)

    heard: list[Mapping[str, Any]] = []

    async def hear(cost: Mapping[str, Any]) -> None:
        heard.append(cost)

    assert (await client.prove_snapshot(made.id, hear)).state is SnapshotState.READY
    [cost] = heard
    assert cost["build"].startswith(f"proof-{made.id}-")
    assert 0 < cost["cpu_ns"] < 60 * 10**9
    assert await client.delete_snapshots(function="f-8") == 0
    assert await client.delete_snapshots(function="f-7") == 1
    assert await client.delete_snapshots(snapshot_id=made.id) == 0
    assert (await from_disk(client, launch)).start_kind is StartKind.COLD


async def test_a_function_that_is_kept_off_the_disk_is_never_on_it(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(snapshot=False)

    with pytest.raises(SnapshotRefused, match="snapshot=False"):
        await client.checkpoint(launch)
    assert [(await from_disk(client, launch)).start_kind for _ in range(2)] == [StartKind.COLD] * 2
    assert await client.snapshots() == []


async def test_without_snapshots_on_the_node_everything_works_as_before(home: AgentHome) -> None:
    async with home.agent(snapshots=False), home.client() as client:
        with pytest.raises(Unsupported, match="snapshots: false"):
            await client.checkpoint(home.launch())
        assert (await begin(client, home.launch())).start_kind is StartKind.COLD
        assert (await begin(client, home.launch())).start_kind is StartKind.FORK
        assert await client.snapshots() == []
        assert (await client.capabilities())["node"]["snapshots"]["on"] is False


async def test_watchers_hear_of_snapshots(home: AgentHome, client: AgentClient) -> None:
    heard: list[tuple[str, str]] = []

    async def listen() -> None:
        async for event in client.watch():
            heard.append((event.kind, event.reason))  # noqa: PERF401  # it never ends

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    made = await client.checkpoint(home.launch())
    await client.delete_snapshots(snapshot_id=made.id)
    await until(lambda: ("snapshot_gone", "deleted") in heard)
    listening.cancel()
    assert [kind for kind, _ in heard if kind.startswith("snapshot")] == [
        "snapshot_ready",
        "snapshot_gone",
    ]


async def test_another_node_fetches_the_copy_and_restores_it(
    home: AgentHome, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    async with home.agent(snapshots=True, snapshot_store=store), home.client() as client:
        made = await client.checkpoint(home.launch())
        await until(lambda: bool(list((tmp_path / "store").glob("snapshots/*/*/*.json"))))
    shutil.rmtree(home.paths.home / "node/snapshots")
    async with home.agent(snapshots=True, snapshot_store=store), home.client() as client:
        info = await begin(client, home.launch())
        assert (info.start_kind, next(iter(info.phases_ms))) == (StartKind.RESTORE, "fetch")
        assert [s.id for s in await client.snapshots()] == [made.id]


@pytest.mark.slow  # a worker that is booted, dumped and restored twice
async def test_on_a_node_of_a_cluster_a_worker_is_booted_for_a_snapshot_and_does_not_stay(
    home: AgentHome,
) -> None:
    """Its functions run in pods: there is no Template of them."""
    async with home.agent(snapshots=True, is_cluster=True) as agent, home.client() as client:
        assert agent.snapshots.want(home.launch())
        found = agent.snapshots.infos
        await until(lambda: [i.state for i in found({})] == [SnapshotState.READY], timeout_s=60)
        assert await client.templates() == []


@pytest.mark.slow  # two agents, two homes, a dump and three restores by the real CRIU
async def test_made_on_one_node_of_a_cluster_it_is_restored_on_another(
    short_tmp: Path, tmp_path: Path
) -> None:
    first, second = SlowHome(short_tmp / "a"), SlowHome(short_tmp / "b")
    labels = {"tenant": "t-1", "app": "a", "function": "f"}
    launch = first.launch(boot=[f"allocate:{8 * MIB}"], labels=labels)
    database = Store(empty_sqlite(tmp_path / "controller.db"), clock=time.time)
    reports = NodeReports()
    register = SnapshotRegister(database, reports, Pods(("f-1", "a")).has, max_bytes=1 << 30)
    store = str(tmp_path / "store")
    async with (
        first.agent(snapshots=True, snapshot_store=store, is_cluster=True) as one,
        second.agent(snapshots=True, snapshot_store=store, is_cluster=True) as two,
        first.client() as at_first,
        second.client() as at_second,
    ):
        a, b = (
            ReportingNode.of(name, agent.snapshots, reports, register)
            for name, agent in (("a", one), ("b", two))
        )
        made = await at_first.checkpoint(launch)
        await a.tell(now=time.time())
        await until(lambda: any(s.copy for s in a.orders.reported()))
        await a.tell(now=time.time())
        await b.tell(now=time.time())
        info = await begin(at_second, launch)
        assert (info.start_kind, next(iter(info.phases_ms))) == (StartKind.RESTORE, "fetch")
        assert await ask(info, "/hoard") == 8 * MIB

        await b.tell(now=time.time())
        quarantined = await at_second.quarantine_snapshot(made.id, reason="it misbehaves")
        assert quarantined.state is SnapshotState.QUARANTINED
        await b.tell(now=time.time())
        await a.tell(now=time.time())
        await until(lambda: [s.is_ready for s in a.orders.reported()] == [False])
        assert (await from_disk(at_first, launch)).start_kind is StartKind.COLD
        await a.orders.aclose()
        await b.orders.aclose()
    database.close()


@pytest.mark.parametrize("by", ["id", "function"])
async def test_a_deleted_snapshot_has_no_copy_left(
    home: AgentHome, tmp_path: Path, by: str
) -> None:
    store = tmp_path / "store"
    async with home.agent(snapshots=True, snapshot_store=str(store)), home.client() as client:
        made = await client.checkpoint(home.launch())
        other = await client.checkpoint(home.launch("f-2@v1-abc"))
        wanted = {"snapshot_id": made.id} if by == "id" else {"function": "f-1"}
        assert await client.delete_snapshots(**wanted) == 1
        await until(lambda: [p.stem for p in store.glob("snapshots/*/*/*.json")] == [other.id])
        assert await client.delete_snapshots(snapshot_id=other.id) == 1
        await until(lambda: not [p for p in store.rglob("*") if p.is_file()])


async def test_a_snapshot_survives_the_agent(home: AgentHome) -> None:
    async with home.agent(snapshots=True), home.client() as client:
        made = await client.checkpoint(home.launch())
    async with home.agent(snapshots=True), home.client() as client:
        assert (await begin(client, home.launch())).start_kind is StartKind.RESTORE
        assert [s.id for s in await client.snapshots()] == [made.id]


# -- faults


async def test_a_damaged_image_is_never_served_and_its_start_is_cold(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch()
    made = await client.checkpoint(launch)
    [pages] = (home.paths.home / "node/snapshots" / made.id / "images").glob("pages-*.img")
    raw = bytearray(pages.read_bytes())
    raw[len(raw) // 2] ^= 1
    pages.write_bytes(raw)

    info = await from_disk(client, launch)

    assert info.start_kind is StartKind.COLD
    states = {s.id: s.state for s in await client.snapshots()}
    assert states[made.id] is SnapshotState.QUARANTINED


@pytest.mark.parametrize(
    "change", [{"env": {"MODE": "other"}}, {"memory_bytes": 300 * MIB}, {"uid": 20002}]
)
async def test_a_launch_that_differs_is_not_served_from_the_snapshot(
    home: AgentHome, client: AgentClient, change: dict[str, Any]
) -> None:
    await client.checkpoint(home.launch())

    assert (await from_disk(client, home.launch(**change))).start_kind is StartKind.COLD


async def test_other_sources_of_ours_miss_by_name(
    home: AgentHome, caplog: pytest.LogCaptureFixture
) -> None:
    async with home.agent(snapshots=True), home.client() as client:
        await client.checkpoint(home.launch())
    with (home.runtime["pilotlight"] / "worker/boot.py").open("a") as f:
        f.write("# another release\n")
    async with home.agent(snapshots=True), home.client() as client:
        with caplog.at_level("INFO"):
            assert (await begin(client, home.launch())).start_kind is StartKind.COLD
    assert "field=runtime" in caplog.text


async def test_a_file_that_the_process_holds_and_that_changed_is_noticed_before_criu_starts(
    home: AgentHome, client: AgentClient, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="pl", dir="/usr/local") as name:
        Path(name).chmod(0o755)
        library = Path(name) / "library.so"
        library.write_text("one")
        library.chmod(0o644)
        launch = home.launch(boot=[f"open:{library}"])
        await client.checkpoint(launch)
        assert (await from_disk(client, launch)).start_kind is StartKind.RESTORE
        library.write_text("two")

        with caplog.at_level("INFO"):
            assert (await from_disk(client, launch)).start_kind is StartKind.COLD

    assert f"field=file:{library}" in caplog.text


@pytest.mark.slow  # real dumps and restores
async def test_a_hook_that_hangs_after_a_restore_falls_to_cold_in_time(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(wake=["restored:hang"], startup_timeout_s=10.0)
    await client.checkpoint(launch)

    info = await from_disk(client, launch)

    assert (info.start_kind, info.state) == (StartKind.COLD, InstanceState.READY)
    assert len(await client.instances()) == 1


@pytest.mark.parametrize("step", ["raise:stale", "hang"])
@pytest.mark.slow  # real dumps and restores
async def test_a_hook_that_fails_in_forks_of_a_restored_template_falls_to_cold_too(
    home: AgentHome, client: AgentClient, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    launch = home.launch(wake=[f"restored:{step}"], startup_timeout_s=10.0)
    await client.checkpoint(launch)
    await client.drop_template(launch.revision)
    assert "restore" in (await client.prepare(launch)).phases_ms

    info, again = await begin(client, launch), await begin(client, launch)

    assert [i.start_kind for i in (info, again)] == [StartKind.COLD, StartKind.FORK]
    assert await ask(info, "/restored") is False
    assert [
        record.args[1]  # type: ignore[index]
        for record in caplog.records
        if record.msg.startswith("rung.failed")
    ] == [StartKind.FORK]


@pytest.mark.slow  # real dumps and restores
async def test_a_template_that_comes_back_from_a_snapshot_that_is_no_good_takes_no_place_of_one_that_is_booted(
    home: AgentHome, client: AgentClient, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="pl", dir="/usr/local") as name:
        Path(name).chmod(0o755)
        flag = Path(name) / "flag"
        flag.touch(mode=0o644)
        launch = home.launch(
            boot=["pause:1.5"], wake=[f"restored:pause:{BEHIND_S}", f"restored:read:{flag}"]
        )
        await client.checkpoint(launch)
        # a Template comes back behind it
        assert (await from_disk(client, launch)).start_kind is StartKind.RESTORE
        flag.unlink()

        info = await begin(client, launch)

    assert info.start_kind is StartKind.COLD
    # not the Template's forks as well
    assert len([record for record in caplog.records if record.msg.startswith("rung.failed")]) == 1
    [template] = await client.templates()
    assert "restore" not in template.phases_ms


async def test_a_hook_that_raises_after_a_restore_falls_to_cold_and_the_third_time_quarantines(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(wake=["restored:raise:stale"])
    made = await client.checkpoint(launch)

    for _ in range(3):
        info = await from_disk(client, launch)
        assert info.start_kind is StartKind.COLD
        await client.stop(info.id, grace_s=0)

    assert {s.id: s.state for s in await client.snapshots()}[made.id] is SnapshotState.QUARANTINED


async def test_a_hook_that_always_raises_is_not_held_against_the_snapshot(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(wake=["raise:no database"])
    await client.checkpoint(launch)

    for _ in range(3):
        with pytest.raises(StartFailed, match="no database"):
            await from_disk(client, launch)
    assert [s.state for s in await client.snapshots()] == [SnapshotState.READY]


async def test_a_full_disk_refuses_the_snapshot_and_leaves_nothing(home: AgentHome) -> None:
    directory = home.paths.home / "node/snapshots"
    directory.mkdir(parents=True)
    await run("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory))
    try:
        async with home.agent(snapshots=True), home.client() as client:
            launch = home.launch(boot=[f"allocate:{16 * MIB}"])
            with pytest.raises(SnapshotRefused, match=r"disk") as e:
                await client.checkpoint(launch)
            assert e.value.detail["reasons"][0]["kind"] == "disk"
            assert [p.name for p in directory.iterdir() if not p.name.startswith(".lock")] == []
            assert (await begin(client, launch)).start_kind is StartKind.FORK
    finally:
        await run("umount", str(directory))


async def run(*argv: str) -> None:
    child = await asyncio.create_subprocess_exec(*argv)
    assert await child.wait() == 0


def criu_processes(home: AgentHome) -> list[int]:
    """Of this home's slots: those whose working directory descriptor lies in one of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == "criu" and any(
                os.readlink(fd).startswith(str(home.paths.run)) for fd in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


async def killing_criu(home: AgentHome, nth: int) -> None:
    """SIGKILL the nth CRIU that is seen in this home's slots."""
    seen: set[int] = set()
    while True:
        for pid in criu_processes(home):
            if pid in seen:
                continue
            seen.add(pid)
            if len(seen) == nth:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "nth", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)]
)
async def test_a_criu_that_is_killed_while_a_snapshot_is_made_leaves_none_that_is_served(
    home: AgentHome, client: AgentClient, nth: int
) -> None:
    """1: the dump. 2: the eager proof. 3: the one that records the working set, without which the
    snapshot is good."""
    launch = home.launch(boot=[f"allocate:{32 * MIB}"])
    killing = asyncio.create_task(killing_criu(home, nth))
    with contextlib.suppress(SnapshotRefused):
        await client.checkpoint(launch)
    killing.cancel()

    ready = [s for s in await client.snapshots() if s.state is SnapshotState.READY]
    info = await from_disk(client, launch)
    assert info.start_kind is (StartKind.RESTORE if ready else StartKind.COLD)
    assert await ask(info, "/hoard") == 32 * MIB


async def test_a_criu_that_is_killed_while_it_restores_costs_the_caller_only_time(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=[f"allocate:{64 * MIB}"])
    await client.checkpoint(launch)
    await client.drop_template(launch.revision)
    killing = asyncio.create_task(killing_criu(home, 1))

    info = await begin(client, launch)

    killing.cancel()
    assert info.start_kind in (StartKind.COLD, StartKind.RESTORE)
    assert await ask(info, "/hoard") == 64 * MIB


MAKING: dict[str, Callable[[AgentHome], bool]] = {
    "staged": lambda home: any((home.paths.home / "node/snapshots").glob(".tmp-*")),
    "dumping": lambda home: any((home.paths.home / "node/snapshots").glob(".tmp-*/images/*")),
    "dumped": lambda home: any((home.paths.home / "node/snapshots").glob(".tmp-*/files.tar")),
    "published": lambda home: any((home.paths.home / "node/snapshots").glob("sn-*")),
    "proving": lambda home: any((home.paths.run / "slots").glob("*/criu/restore.log")),
}


@pytest.mark.parametrize(
    "step",
    [
        "dumping",
        *(pytest.param(step, marks=pytest.mark.soak) for step in MAKING if step != "dumping"),
    ],
)
@pytest.mark.slow  # real dumps and restores
async def test_an_agent_killed_while_it_makes_a_snapshot_leaves_nothing_and_the_next_one_makes_it(
    home: AgentHome, step: str
) -> None:
    launch = home.launch(boot=[f"allocate:{32 * MIB}"])
    with home.agent_process(snapshots=True) as process:
        async with home.client() as client:
            asking = asyncio.create_task(client.checkpoint(launch))
            await until(lambda: MAKING[step](home) or asking.done())
            process.kill()
            await asyncio.to_thread(process.wait)
            with pytest.raises((AgentUnavailable, AssertionError)):
                assert not await asking

    async with home.agent(snapshots=True), home.client() as client:
        assert list((home.paths.home / "node/snapshots").glob(".tmp-*")) == []
        await until(lambda: criu_processes(home) == [])
        assert (await client.checkpoint(launch)).state is SnapshotState.READY
        assert (await from_disk(client, launch)).start_kind is StartKind.RESTORE
        assert len(await client.snapshots()) == 1
    assert leftovers(home) == []


@pytest.mark.parametrize("step", [pytest.param("furnished", marks=pytest.mark.soak), "restoring"])
@pytest.mark.slow  # real dumps and restores
async def test_an_agent_killed_while_it_restores_leaves_nothing(home: AgentHome, step: str) -> None:
    launch = home.launch(boot=[f"allocate:{32 * MIB}"])
    with home.agent_process(snapshots=True) as process:
        async with home.client() as client:
            await client.checkpoint(launch)
            await client.drop_template(launch.revision)
            asking = asyncio.create_task(begin(client, launch))
            pattern = "*/criu" if step == "furnished" else "*/criu/restore.log"
            await until(lambda: any((home.paths.run / "slots").glob(pattern)))
            process.kill()
            await asyncio.to_thread(process.wait)
            with pytest.raises(AgentUnavailable):
                await asking

    async with home.agent(snapshots=True), home.client() as client:
        await until(lambda: criu_processes(home) == [])
        assert await client.instances() == []
        assert (await begin(client, launch)).start_kind in (StartKind.RESTORE, StartKind.FORK)
    assert leftovers(home) == []


@pytest.mark.timeout(240)  # 51 starts, each of a second on a busy machine
@pytest.mark.slow  # real dumps and restores
@pytest.mark.soak
async def test_fifty_restores_leave_no_process_mount_socket_group_or_descriptor(
    home: AgentHome,
) -> None:
    async with home.agent(snapshots=True), home.client() as client:
        launch = home.launch()
        await client.checkpoint(launch)
        await client.drop_template(launch.revision)
        before = None
        for i in range(51):
            info = await from_disk(client, launch)
            assert info.start_kind is StartKind.RESTORE
            await client.stop(info.id, grace_s=0)
            if i == 0:
                before = await settled(home, client, launch)
        assert await settled(home, client, launch) == before
    assert leftovers(home) == []


async def settled(home: AgentHome, client: AgentClient, launch: LaunchSpec) -> dict[str, int]:
    """What there is once the background work of the last start is over and the revision is out of
    memory."""
    while not await client.templates():
        await asyncio.sleep(0.01)
    await client.drop_template(launch.revision)
    slots = home.paths.run / "slots"
    await until(
        lambda: len(list(slots.iterdir())) == 1 and not Cgroups.find(home.paths.run).names()
    )
    before: dict[str, int] = {}
    after = counted(home)
    async with asyncio.timeout(30):
        while before != after:  # a spare slot is made a moment after each start
            await asyncio.sleep(0.5)
            before, after = after, counted(home)
    return after


def counted(home: AgentHome) -> dict[str, int]:
    """What there is of an agent, besides memory."""
    slots = home.paths.run / "slots"
    return {
        "processes": len(processes_of(home)),
        # other tests have theirs
        "mounts": Path("/proc/self/mounts").read_text().count(str(home.paths.home.parent)),
        "groups": len(Cgroups.find(home.paths.run).names()),
        "sockets": len(list(slots.glob("*/i-*.sock"))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "work": len(list((home.paths.home / "node/snapshots").iterdir())),
    }


def processes_of(home: AgentHome) -> list[int]:
    """All below this agent but the threads of it: spawner, shims and what lives in their slots."""
    return proc.process_tree(os.getpid())[1:]


def leftovers(home: AgentHome) -> list[str]:
    """Slots on disk after an agent has ended, and processes that still name this home."""
    found = [str(p) for p in (home.paths.run / "slots").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = (
                [os.readlink(fd) for fd in (process / "fd").iterdir()]
                if int(process.name) != os.getpid()
                else []
            )
        except OSError:
            continue
        found += [
            f"{process.name}: {path}" for path in held if path.startswith(str(home.paths.run))
        ]
    return found

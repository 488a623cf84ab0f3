"""Watches that do not end, against an API server that does everything to end them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.kubernetes import watch_stream
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterUnreachable, Forbidden, KindMissing
from pilotlight.kubernetes.kinds import CONFIG_MAP, POD, SERVICE
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import WatchChange, version_of
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.server import ApiServer
from tests.functions.cluster.conftest import IMPATIENT

LABELS = {"seen": "yes"}


def config_map(name: str, **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": LABELS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class Told:
    """What a reflector was told; a change that contradicts the one before it fails at once."""

    def __init__(self) -> None:
        self.changes: list[WatchChange] = []
        self._there: dict[str, str] = {}
        self._arrived = asyncio.Event()

    def __call__(self, change: WatchChange) -> None:
        self.changes.append(change)
        self._arrived.set()
        if change.type == "SYNCED":
            return
        meta = change.object["metadata"]
        assert (meta["name"] in self._there) == (change.type != "ADDED"), (
            f"{change.type} of {meta['name']} out of turn"
        )
        if change.type == "DELETED":
            del self._there[meta["name"]]
            return
        assert self._there.get(meta["name"]) != meta["resourceVersion"], (
            f"{meta['name']} told twice"
        )
        self._there[meta["name"]] = meta["resourceVersion"]

    def count(self, type: str) -> int:
        return sum(change.type == type for change in self.changes)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._arrived.clear()
            await self._arrived.wait()


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncIterator[tuple[Reflector, Told]]:
    told = Told()
    async with Reflector(cluster, CONFIG_MAP, selector="seen=yes", on_change=told) as seen:
        await seen.wait_synced(30)
        yield seen, told


def data_of(seen: Reflector) -> dict[str, Any]:
    return {item["metadata"]["name"]: item.get("data", {}) for item in seen.items()}


async def open_watch(api_server: ApiServer) -> None:
    while not api_server.watches:
        await asyncio.sleep(0.001)


async def test_changes_come_as_they_happen(cluster: Cluster, api_server: ApiServer) -> None:
    api_server.put(config_map("a", x="1"))
    async with watched(cluster) as (seen, told):
        assert (seen.is_synced, data_of(seen)) == (True, {"a": {"x": "1"}})
        api_server.put(config_map("a", x="2"))
        api_server.put(config_map("b"))
        await cluster.delete(CONFIG_MAP, "b", "default")
        await told.until(lambda: told.count("DELETED") == 1)
        assert [c.type for c in told.changes] == ["ADDED", "SYNCED", "MODIFIED", "ADDED", "DELETED"]
        assert api_server.requests.count(verb="list", resource="configmaps") == 1
        assert "kind" in told.changes[0].object


async def test_an_object_that_leaves_the_selector_is_gone(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(config_map("a"))
    async with watched(cluster) as (seen, told):
        await cluster.patch(CONFIG_MAP, "a", "default", {"metadata": {"labels": {"seen": None}}})
        await told.until(lambda: told.count("DELETED") == 1)
        assert len(seen.store) == 0


async def test_a_watch_that_is_cut_again_and_again_loses_nothing_and_lists_once(
    cluster: Cluster, api_server: ApiServer
) -> None:
    """A minute of a cut each second, sixty times as fast."""
    api_server.faults.cut_watches_every_s = 0.016
    api_server.put(config_map("steady"))
    async with watched(cluster) as (seen, told):
        for index in range(60):
            api_server.put(config_map("a", x=str(index)))
            api_server.put(config_map(f"b{index}"))
            if index % 3 == 0:
                await cluster.delete(CONFIG_MAP, f"b{index}", "default")
            await asyncio.sleep(0.005)
        await told.until(
            lambda: data_of(seen).get("a") == {"x": "59"} and told.count("DELETED") == 20
        )
        assert sorted(data_of(seen)) == sorted(
            ["steady", "a", *(f"b{index}" for index in range(60) if index % 3)]
        )
        assert told.count("ADDED") == 62  # steady, a, b0 … b59
        while api_server.requests.count(verb="watch", resource="configmaps") <= 5:
            await asyncio.sleep(0.001)
        assert told.count("SYNCED") == 1
        # a cut costs no listing
        assert api_server.requests.count(verb="list", resource="configmaps") == 1


@pytest.mark.parametrize("as_status", [True, False])
async def test_a_version_that_is_too_old_is_listed_anew_and_only_the_difference_is_told(
    cluster: Cluster, api_server: ApiServer, *, as_status: bool
) -> None:
    api_server.faults.watch_gone_as_status = as_status
    for name in ("kept", "changed", "deleted", "replaced"):
        api_server.put(config_map(name))
    async with watched(cluster) as (seen, told):
        await open_watch(api_server)
        told.changes.clear()
        # however often, it leads to no listing
        fault = api_server.faults.add(Fault(status=503, verb="watch"))
        api_server.cut_connections()
        async with await Cluster.connect(cluster.settings) as other:
            await other.patch(CONFIG_MAP, "changed", "default", {"data": {"x": "1"}})
            await other.delete(CONFIG_MAP, "deleted", "default")
            await other.delete(CONFIG_MAP, "replaced", "default")
            await other.create(config_map("replaced"))
        api_server.store.compact()
        api_server.faults.remove(fault)
        await told.until(lambda: told.count("SYNCED") == 1)
        assert sorted((c.type, c.key[1]) for c in told.changes if c.type != "SYNCED") == [
            ("ADDED", "replaced"),
            ("DELETED", "deleted"),
            ("DELETED", "replaced"),
            ("MODIFIED", "changed"),
        ]
        assert sorted(data_of(seen)) == ["changed", "kept", "replaced"]


async def test_an_answer_that_is_no_list_does_not_say_that_nothing_is_there(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(config_map("a", x="1"))
    async with watched(cluster) as (seen, told):
        await open_watch(api_server)
        fault = api_server.faults.add(
            Fault(status=200, verb="list", resource="configmaps", times=1)
        )
        api_server.put(config_map("b"))
        await told.until(lambda: told.count("ADDED") == 2)
        api_server.expire_watches()
        await told.until(lambda: told.count("SYNCED") == 2)
        assert (fault.times, told.count("DELETED"), sorted(data_of(seen))) == (0, 0, ["a", "b"])


async def test_410_in_the_middle_of_a_watch(cluster: Cluster, api_server: ApiServer) -> None:
    async with watched(cluster) as (seen, told):
        await open_watch(api_server)
        api_server.expire_watches()
        await told.until(lambda: told.count("SYNCED") == 2)
        api_server.put(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        assert list(data_of(seen)) == ["a"]


async def test_while_the_server_is_away_the_cache_keeps_what_it_knew_and_then_catches_up(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(config_map("a", x="1"))
    async with watched(cluster) as (seen, told):
        await open_watch(api_server)
        await api_server.stop()
        for _ in range(20):  # many attempts fail
            await asyncio.sleep(0.005)
            assert data_of(seen) == {"a": {"x": "1"}}
        api_server.put(config_map("a", x="2"))
        await api_server.start()
        await told.until(lambda: data_of(seen) == {"a": {"x": "2"}})
        assert told.count("SYNCED") == 1  # it went on where it was
        assert seen.is_synced


async def test_bookmarks_keep_a_quiet_watch_fresh(
    cluster: Cluster, api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' changes make our version old; with bookmarks a cut still costs no listing."""
    heard: list[str] = []

    def hear(item: Mapping[str, Any]) -> str:
        heard.append(version_of(item))
        return heard[-1]

    monkeypatch.setattr(watch_stream, "version_of", hear)
    api_server.reader.bookmark_s = 0.005
    async with watched(cluster) as (_, told):
        await open_watch(api_server)
        for index in range(50):
            # not ours
            api_server.put(
                {
                    **config_map(f"x{index}"),
                    "metadata": {"name": f"x{index}", "namespace": "default"},
                }
            )
        before = api_server.requests.count(verb="watch", resource="configmaps")
        version = int((await cluster.list(CONFIG_MAP)).resource_version)
        while str(version) not in heard:
            await asyncio.sleep(0.001)
        api_server.cut_connections()
        while api_server.requests.count(verb="watch", resource="configmaps") == before:
            await asyncio.sleep(0.001)
        asked = [one.path for one in api_server.requests if one.verb == "watch"][-1]
        assert f"resourceVersion={version}" in asked
        assert told.count("SYNCED") == 1


async def test_a_connection_that_died_without_a_word_is_opened_anew(
    api_server: ApiServer, tmp_path: Path
) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    hasty = dataclasses.replace(IMPATIENT, silence_s=0.02)
    async with (
        await Cluster.connect(settings, patience=hasty) as cluster,
        watched(cluster) as (seen, told),
    ):
        while api_server.requests.count(verb="watch") < 4:
            await asyncio.sleep(0.005)
        api_server.put(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        assert api_server.requests.count(verb="list", resource="configmaps") == 1
        assert len(seen.store) == 1


@pytest.mark.slow  # the kernel counts the time between its probes in seconds
async def test_packets_that_are_dropped_on_the_way_are_noticed(
    api_server: ApiServer, tmp_path: Path
) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    hasty = dataclasses.replace(IMPATIENT, lost_s=3.0, attempt_s=0.2)
    async with (
        await Cluster.connect(settings, patience=hasty) as cluster,
        watched(cluster) as (seen, told),
    ):
        await open_watch(api_server)
        api_server.partition(is_cut=True)
        async with asyncio.timeout(10):
            while not cluster.away_s:
                await asyncio.sleep(0.05)
        api_server.partition(is_cut=False)
        api_server.put(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        assert (len(seen.store), cluster.away_s) == (1, 0.0)


async def test_refusals_that_do_not_end_lead_to_a_new_listing(
    cluster: Cluster, api_server: ApiServer
) -> None:
    async with watched(cluster) as (_, told):
        await open_watch(api_server)
        api_server.faults.add(Fault(status=500, verb="watch", times=6))
        api_server.cut_connections()
        await told.until(lambda: told.count("SYNCED") == 2)


async def test_a_server_that_lags_behind_is_asked_again_with_the_same_version(
    cluster: Cluster, api_server: ApiServer
) -> None:
    async with watched(cluster) as (_, told):
        await open_watch(api_server)
        api_server.faults.add(
            Fault(
                status=504,
                message="Too large resource version: 9, current: 8",
                verb="watch",
                times=3,
            )
        )
        api_server.cut_connections()
        await open_watch(api_server)
        api_server.put(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        assert told.count("SYNCED") == 1
        asked = [one.path for one in api_server.requests if one.verb == "watch"]
        assert len(asked) == 5
        assert len({path.split("resourceVersion=")[1].split("&")[0] for path in asked}) == 1


async def test_what_needs_somebody_to_act_is_said_at_once(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.remove_kind("services.serving.knative.dev")
    api_server.rights.deny("list", "pods")
    with pytest.raises(KindMissing):
        async with aclosing(cluster.watch(SERVICE)) as changes:
            await anext(changes)
    with pytest.raises(Forbidden):
        async with aclosing(cluster.watch(POD)) as changes:
            await anext(changes)


async def test_a_reflector_waits_for_a_right_and_says_what_it_waits_for(
    api_server: ApiServer, tmp_path: Path
) -> None:
    denied = api_server.rights.deny("list", "configmaps")
    waits: list[float] = []
    granted = asyncio.Event()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        await granted.wait()

    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    async with (
        await Cluster.connect(settings, patience=IMPATIENT, sleep=wait) as cluster,
        Reflector(cluster, CONFIG_MAP) as seen,
    ):
        while not waits:
            await asyncio.sleep(0.001)
        with pytest.raises(Forbidden, match="configmaps"):
            await seen.wait_synced(0.05)
        assert "waiting (may not list" in repr(seen)
        api_server.rights.denied.remove(denied)
        granted.set()
        await seen.wait_synced(30)
        assert seen.error is None
        assert waits[0] == 15.0


async def test_waiting_for_a_server_that_is_away_ends(
    cluster: Cluster, api_server: ApiServer
) -> None:
    await api_server.stop()
    async with Reflector(cluster, CONFIG_MAP) as seen:
        with pytest.raises(ClusterUnreachable):
            await seen.wait_synced(0.05)


async def test_listeners_come_and_go(cluster: Cluster, api_server: ApiServer) -> None:
    async with watched(cluster) as (seen, told):
        heard: list[WatchChange] = []
        stop = seen.subscribe(heard.append)
        api_server.put(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        stop()
        stop()
        api_server.put(config_map("b"))
        await told.until(lambda: told.count("ADDED") == 2)
        assert [change.key[1] for change in heard] == ["a"]

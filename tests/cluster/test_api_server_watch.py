"""Watches of the tests' API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fakes.kubernetes.raw import MERGE, RawClient
from tests.fakes.kubernetes.server import ApiServer

OWN = {"own": "yes"}
"""Labels: a real cluster's controllers put objects into each new namespace."""


async def _make(raw: RawClient, namespace: str, name: str, **labels: str) -> str:
    body = {"metadata": {"name": name, "labels": labels}}
    return (await raw.ask("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)).version


async def _next(events: AsyncIterator[dict[str, Any]]) -> tuple[str, str]:
    async with asyncio.timeout(20):
        event = await anext(events)
    return event["type"], event["object"].get("metadata", {}).get("name", "")


@pytest.mark.api_server
async def test_a_watch_goes_on_from_a_version(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    start = await _make(raw, namespace, "before")
    await _make(raw, namespace, "a", **OWN)
    async with raw.watch(path, resourceVersion=start, labelSelector="own=yes") as events:
        assert await _next(events) == ("ADDED", "a")
        await raw.ask("PATCH", f"{path}/a", {"data": {"k": "v"}}, media=MERGE)
        assert await _next(events) == ("MODIFIED", "a")
        await raw.ask("DELETE", f"{path}/a")
        assert await _next(events) == ("DELETED", "a")


@pytest.mark.api_server
async def test_an_object_that_leaves_the_selector_is_deleted_for_it(
    raw: RawClient, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    start = await _make(raw, namespace, "a", team="x")
    async with raw.watch(path, resourceVersion=start, labelSelector="team=x") as events:
        await raw.ask("PATCH", f"{path}/a", {"metadata": {"labels": {"team": "y"}}}, media=MERGE)
        assert await _next(events) == ("DELETED", "a")
        await raw.ask("PATCH", f"{path}/a", {"metadata": {"labels": {"team": "x"}}}, media=MERGE)
        assert await _next(events) == ("ADDED", "a")


@pytest.mark.api_server
async def test_a_watch_ends_when_it_said(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    start = await _make(raw, namespace, "a", **OWN)
    how = {"labelSelector": "own=yes", "timeoutSeconds": "1"}
    async with raw.watch(path, resourceVersion=start, **how) as events:
        assert [event async for event in events if event["type"] != "BOOKMARK"] == []


async def test_bookmarks_carry_the_newest_version(
    api_server: ApiServer, raw: RawClient, namespace: str
) -> None:
    api_server.reader.bookmark_s = 0.05
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    start = await _make(raw, namespace, "a")
    newest = await _make(raw, "default", "elsewhere")
    async with raw.watch(path, resourceVersion=start, allowWatchBookmarks="true") as events:
        event = await anext(events)
    assert (event["type"], event["object"]["metadata"]["resourceVersion"]) == ("BOOKMARK", newest)


async def test_too_old_a_version_is_gone(
    api_server: ApiServer, raw: RawClient, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    start = await _make(raw, namespace, "a")
    await _make(raw, namespace, "b")
    page = await raw.ask("GET", path, query={"limit": "1"})
    await _make(raw, namespace, "c")
    api_server.store.compact()
    async with raw.watch(path, resourceVersion=start) as events:
        event = await anext(events)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
        "ERROR",
        410,
        "Expired",
    )
    late = await raw.ask(
        "GET", path, query={"limit": "1", "continue": page.body["metadata"]["continue"]}
    )
    assert late.status == 410
    api_server.faults.watch_gone_as_status = True
    assert (
        await raw.ask("GET", path, query={"watch": "true", "resourceVersion": start})
    ).status == 410


async def test_an_open_watch_is_told_that_it_is_gone(
    api_server: ApiServer, raw: RawClient, namespace: str
) -> None:
    start = await _make(raw, namespace, "a")
    async with raw.watch(
        f"/api/v1/namespaces/{namespace}/configmaps", resourceVersion=start
    ) as events:
        api_server.expire_watches()
        assert (await anext(events))["object"]["code"] == 410
        assert [event async for event in events] == []


async def test_watches_are_cut(api_server: ApiServer, raw: RawClient, namespace: str) -> None:
    api_server.faults.cut_watches_every_s = 0.05
    start = await _make(raw, namespace, "a")
    with pytest.raises(aiohttp.ClientError):
        async with raw.watch(
            f"/api/v1/namespaces/{namespace}/configmaps", resourceVersion=start
        ) as events:
            await anext(events)


async def test_a_watch_from_nothing_begins_with_what_is_there(
    api_server: ApiServer, raw: RawClient, namespace: str
) -> None:
    await _make(raw, namespace, "a")
    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    async with raw.watch(f"/api/v1/namespaces/{namespace}/configmaps", **query) as events:
        assert [await _next(events), await _next(events)] == [
            ("ADDED", "a"),
            ("ADDED", "kube-root-ca.crt"),
        ]
        marked = await anext(events)
    assert marked["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}

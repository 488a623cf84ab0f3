"""Changes of traffic in the control plane: compare-and-set, checked whole or not at all, published
and written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import traffic
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import FunctionRoute
from pilotlight.spec import traffic as documents
from pilotlight.spec.traffic import Shadow, TrafficDocument
from tests.fakes.traffic_points import revision_at
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec


async def deployed(controller: Controller, count: int = 2) -> list[str]:
    """Revisions of `search/hello` in the order of their deploys; the last one serves."""
    out = []
    for number in range(count):
        body = {"functions": [spec(env={"N": str(number)})]}
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert answer.status_code == 200, answer.text
        out.append(str(answer.json()["functions"][0]["revision"]))
    return out


async def place(controller: Controller) -> AppRef:
    return AppRef(
        tenant=await controller.tenant(),
        uid=None,
        environment="main",
        app="search",
        actor="k-1",
        request="req-1",
    )


async def published(controller: Controller) -> FunctionRoute:
    changes: Any = (await controller.feed())["changes"]
    return FunctionRoute.from_json(
        next(change["value"] for change in changes if change["kind"] == "function")
    )


def weighed(weights: Mapping[str, int]) -> traffic.TrafficEdit:
    return lambda document: replace(document, weights=dict(weights))


async def test_a_deploy_is_a_document_of_one_revision(controller: Controller) -> None:
    (only,) = await deployed(controller, 1)
    where = await place(controller)
    with controller.context.store.read() as sql:
        document = traffic.find(sql, where, "hello")
    assert document.weights == {only: 100}
    assert document.salt == where.function_id("hello")
    assert documents.from_json((await published(controller)).document) == replace(
        document, tags={"stable": only}
    )


async def test_a_change_is_published_with_the_revisions_that_it_names_and_stands_in_the_history(
    controller: Controller,
) -> None:
    first, second, third, fourth, fifth = await deployed(controller, 5)
    where = await place(controller)

    def edit(document: TrafficDocument) -> TrafficDocument:
        return replace(
            document,
            weights={second: 90, third: 10},
            tags={"next": first},
            shadow=Shadow(revision=fourth),
        )

    with controller.context.store.write() as write:
        before = traffic.find(write.sql, where, "hello")
        after = traffic.change(
            write,
            where,
            "hello",
            edit,
            expected=before.generation,
            action="traffic.set",
            message="a look at v3",
        )
    assert after.generation == before.generation + 1
    route = await published(controller)
    assert dict(route.traffic) == {second: 90, third: 10}
    assert set(route.revisions) == {first, second, third, fourth}
    told = documents.validate_document(
        documents.from_json(route.document), revisions=route.revisions
    )
    assert told == replace(after, tags={"next": first, "stable": second})
    history = (await controller.http.get("/v1/apps/search/history")).json()["history"][0]
    assert (history["action"], history["message"], history["functions"][0]["revision"]) == (
        "traffic.set",
        "a look at v3",
        second,
    )
    audit = (await controller.http.get("/v1/audit", params={"action": "traffic.set"})).json()[
        "entries"
    ][0]
    assert audit["before"]["weights"] == {fifth: 100}
    assert audit["after"]["weights"] == {second: 90, third: 10}
    assert audit["subject"] == "main/search/hello"


async def test_of_two_operators_at_once_the_second_is_told(controller: Controller) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    with controller.context.store.read() as sql:
        seen = traffic.find(sql, where, "hello").generation
    with controller.context.store.write() as write:
        traffic.change(
            write,
            where,
            "hello",
            weighed({first: 50, second: 50}),
            expected=seen,
            action="traffic.set",
        )
    with (
        controller.context.store.write() as write,
        pytest.raises(Conflict, match="has changed") as caught,
    ):
        traffic.change(
            write, where, "hello", weighed({first: 100}), expected=seen, action="traffic.set"
        )
    assert caught.value.detail["generation"] == seen + 1
    assert dict((await published(controller)).traffic) == {first: 50, second: 50}


async def test_what_cannot_be_followed_changes_nothing(controller: Controller) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    before = await published(controller)
    for edit, says in (
        (weighed({first: 60, second: 60}), "add up to 120"),
        (weighed({first: 50, "v9-000000": 50}), "no revision"),
        (lambda document: replace(document, tags={"gone": "v9-000000"}), "no revision"),
        (
            lambda document: replace(document, weights={first: 30, second: 70}, max_candidate=20),
            "max_candidate",
        ),
    ):
        with controller.context.store.write() as write, pytest.raises(InvalidInput, match=says):
            traffic.change(write, where, "hello", edit, action="traffic.set")
    assert await published(controller) == before


async def test_segments_follow_the_weights_whatever_an_edit_says_of_them(
    controller: Controller,
) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        at_5 = traffic.change(
            write, where, "hello", weighed({second: 95, first: 5}), action="rollout.step"
        )
        at_10 = traffic.change(
            write, where, "hello", weighed({second: 90, first: 10}), action="rollout.step"
        )
    moved = [
        p for p in range(100) if revision_at(at_5.segments, p) != revision_at(at_10.segments, p)
    ]
    assert len(moved) == 5
    assert all(revision_at(at_10.segments, p) == first for p in moved)


async def test_no_change_is_no_entry_and_no_generation(controller: Controller) -> None:
    await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        before = traffic.find(write.sql, where, "hello")
        assert (
            traffic.change(write, where, "hello", lambda document: document, action="traffic.set")
            == before
        )
        entries = write.sql.execute(sa.select(tables.deployments.c.action)).scalars().all()
    assert "traffic.set" not in entries


async def test_without_an_action_nothing_is_written_down_by_it(controller: Controller) -> None:
    first, _ = await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        count = (
            len(write.sql.execute(sa.select(tables.deployments)).all()),
            len(write.sql.execute(sa.select(tables.audit)).all()),
        )
        traffic.change(write, where, "hello", weighed({first: 100}), action="")
        assert (
            len(write.sql.execute(sa.select(tables.deployments)).all()),
            len(write.sql.execute(sa.select(tables.audit)).all()),
        ) == count


async def test_aliases_are_published_as_tags_and_own_tags_win(controller: Controller) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    function_id = where.function_id("hello")
    with controller.context.store.write() as write:
        for name, revision in (("good", first), ("next", first)):
            row = {
                "function": function_id,
                "name": name,
                "revision": revision,
                "updated_by": "k-1",
                "updated_at": 0.0,
            }
            write.sql.execute(sa.insert(tables.aliases).values(**row))
        document = traffic.change(
            write, where, "hello", lambda d: replace(d, tags={"next": second}), action="traffic.tag"
        )
    route = await published(controller)
    assert documents.from_json(route.document).tags == {
        "good": first,
        "next": second,
        "stable": second,
    }
    assert set(route.revisions) == {first, second}
    assert document.tags == {"next": second}


async def test_a_function_that_was_removed_has_no_traffic_and_comes_back_without_its_old_names(
    controller: Controller,
) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        traffic.change(
            write,
            where,
            "hello",
            lambda d: replace(d, tags={"old": first}, pins={"default": first}),
            action="traffic.set",
        )
    assert (await controller.http.delete("/v1/apps/search")).status_code == 204
    with controller.context.store.write() as write, pytest.raises(NotFound):
        traffic.change(write, where, "hello", weighed({second: 100}), action="traffic.set")
    await controller.http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)
    await deployed(controller, 1)
    with controller.context.store.read() as sql:
        document = feed_publisher.traffic_document(sql, where.function_id("hello"))
    assert (document.weights, document.tags, document.pins) == ({first: 100}, {}, {})


async def test_a_shadow_that_begins_to_answer_callers_is_one_no_longer(
    controller: Controller,
) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        traffic.change(
            write,
            where,
            "hello",
            lambda d: replace(d, shadow=Shadow(revision=first)),
            action="traffic.change",
        )
        after = traffic.change(
            write, where, "hello", weighed({first: 10, second: 90}), action="rollout.step"
        )
    assert after.shadow is None


async def test_a_change_that_goes_back_says_so_until_the_next_one(controller: Controller) -> None:
    first, second = await deployed(controller)
    where = await place(controller)
    with controller.context.store.write() as write:
        assert traffic.change(
            write, where, "hello", weighed({first: 100}), action="rollout.rollback"
        ).at_once
        # no change
        assert traffic.change(
            write, where, "hello", weighed({first: 100}), action="traffic.change"
        ).at_once
        assert not traffic.change(
            write, where, "hello", weighed({second: 100}), action="traffic.change"
        ).at_once

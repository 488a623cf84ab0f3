"""Which revision answers a call: the order of what decides, units that stay where they are, and
documents that cannot be followed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from activator.routing.api_keys import Principal
from activator.routing.route_table import RouteTable
from activator.routing.traffic_split import MAX_UNITS, FunctionRouter
from pilotlight import errors
from pilotlight.protocol import FeedChange, FunctionRoute, KeyRecord
from pilotlight.spec import traffic
from pilotlight.spec.function import PUBLIC
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates
from pilotlight.spec.traffic import Arm, ExperimentTraffic, Segment, Shadow
from tests.fakes.routes import TENANT, change, empty_table, route_of, spec_of, split_route
from tests.fakes.traffic_points import revision_at, unit_point

V1, V2, V3 = "v1-aaaaaa", "v2-bbbbbb", "v3-cccccc"
RATES = Rates(version="test")
NAME = f"{TENANT}/main/shop/hello"


def caller(key: str = "k-1", *, tenant: str = TENANT, name: str = "default") -> Principal:
    return Principal(KeyRecord(id=key, hash="", tenant=tenant, scope="invoke"), tenant_name=name)


def routed(weights: Mapping[str, int], **more: Any) -> FunctionRouter:
    return FunctionRouter(split_route(spec_of(), weights, **more), RATES)


def user(number: int) -> dict[bytes, bytes]:
    return {b"x-user": f"u-{number}".encode()}


def chosen(where: FunctionRouter, count: int = 300, **more: Any) -> list[str]:
    return [where.choose(caller(), user(n), **more).target.revision for n in range(count)]


HALVES = ExperimentTraffic(
    id="x-1",
    salt="s-1",
    unit="header:x-user",
    percent=100,
    arms=(Arm(name="a", revision=V1, share=50), Arm(name="b", revision=V2, share=50)),
)


def test_one_revision_is_one_choice_for_everybody() -> None:
    only = routed({V1: 100}, tags={"next": V2}, named=(V2,))
    assert only.is_plain
    assert only.choose(caller(), {}) is only.only
    assert only.only is not None
    assert (only.only.target.revision, only.only.mark, only.only.head, only.only.line) == (
        V1,
        "",
        b"",
        b"",
    )


def test_requests_draw_by_weight_and_units_stay() -> None:
    by_request = routed({V1: 75, V2: 25})
    assert (
        0.15
        < Counter(by_request.choose(caller(), {}).target.revision for _ in range(2000))[V2] / 2000
        < 0.35
    )
    sticky = routed({V1: 75, V2: 25}, sticky="header:x-user")
    assert chosen(sticky) == chosen(sticky)
    assert 0.15 < Counter(chosen(sticky, 2000))[V2] / 2000 < 0.35


def test_the_same_unit_stands_where_the_document_says_whatever_activator_asks() -> None:
    route = split_route(spec_of(), {V1: 60, V2: 40}, sticky="header:x-user")
    document = traffic.from_json(route.document)
    expected = [
        revision_at(document.segments, unit_point(document.salt, f"u-{n}")) for n in range(200)
    ]
    assert chosen(FunctionRouter(route, RATES), 200) == expected


def test_units_may_be_keys_or_tenants() -> None:
    by_key, by_tenant = (
        routed({V1: 50, V2: 50}, sticky="key"),
        routed({V1: 50, V2: 50}, sticky="tenant"),
    )
    keys = [caller(f"k-{n}") for n in range(100)]
    of_keys = [by_key.choose(one, {}).target.revision for one in keys]
    assert set(of_keys) == {V1, V2}
    assert of_keys == [by_key.choose(one, user(n)).target.revision for n, one in enumerate(keys)]
    assert len({by_tenant.choose(one, {}).target.revision for one in keys}) == 1


def test_a_request_without_its_unit_draws_anew() -> None:
    sticky = routed({V1: 50, V2: 50}, sticky="header:x-user")
    assert len({sticky.choose(caller(), {}).target.revision for _ in range(200)}) == 2
    by_key = routed({V1: 50, V2: 50}, sticky="key")
    assert len({by_key.choose(caller(""), {}).target.revision for _ in range(200)}) == 2


def test_what_is_remembered_of_units_is_bounded() -> None:
    sticky = routed({V1: 50, V2: 50}, sticky="header:x-user")
    chosen(sticky, MAX_UNITS + 10)
    assert repr(sticky).endswith(", 10 units cached>")


def test_a_tag_or_a_name_beats_the_pin_which_beats_the_experiment_which_beats_the_weights() -> None:
    where = routed(
        {V1: 100}, named=(V2, V3), tags={"next": V3}, pins={"acme": V3}, experiment=HALVES
    )
    assert where.choose(caller(), user(1), "next").target.revision == V3
    assert where.choose(caller(), user(1), V2).target.revision == V2
    pinned = where.choose(caller(tenant=TENANT, name="acme"), user(1))
    assert (pinned.target.revision, pinned.is_override, pinned.arm) == (V3, True, "")
    in_arm = where.choose(caller(), user(1))
    assert (in_arm.experiment, in_arm.is_override) == ("x-1", False)
    outside = FunctionRouter(
        split_route(spec_of(), {V1: 100}, named=(V2,), experiment=replace(HALVES, percent=0)), RATES
    )
    assert outside.choose(caller(), user(1)).experiment == ""


def test_an_unknown_tag_names_those_that_there_are_and_other_tenants_may_not_ask() -> None:
    where = routed({V1: 100}, named=(V2,), tags={"next": V2, "old": V2})
    with pytest.raises(errors.NotFound, match="its tags are next, old"):
        where.choose(caller(), {}, "nowhere")
    with pytest.raises(errors.NotFound, match="pilotlight traffic tag shop/hello"):
        routed({V1: 100}).choose(caller(), {}, "nowhere")
    with pytest.raises(errors.Forbidden):
        where.choose(caller(tenant="t-2", name="acme"), {}, "next")


def test_arms_share_the_units_and_a_larger_experiment_keeps_those_it_had() -> None:
    def arms(percent: float) -> dict[int, str]:
        where = routed({V1: 100}, named=(V2,), experiment=replace(HALVES, percent=percent))
        found = {n: where.choose(caller(), user(n)) for n in range(2000)}
        return {n: choice.arm for n, choice in found.items() if choice.arm}

    small, large = arms(10), arms(30)
    assert small.items() <= large.items()
    assert 0.06 < len(small) / 2000 < 0.14
    assert 0.4 < Counter(large.values())["b"] / len(large) < 0.6


def test_a_choice_in_an_arm_names_it_everywhere_and_the_unit_nowhere() -> None:
    choice = routed({V1: 100}, named=(V2,), experiment=HALVES).choose(caller(), user(7))
    assert len(choice.unit) == 16
    assert choice.unit == traffic.hash_unit("s-1", "u-7").hex()
    assert json.loads("{" + choice.mark[1:] + "}") == {
        "experiment": "x-1",
        "arm": choice.arm,
        "unit": choice.unit,
    }
    assert choice.head == b"pilotlight-arm: %b\r\n" % choice.arm.encode()
    assert choice.line == b"\r\npilotlight-arm: %b" % choice.arm.encode()
    assert b"u-7" not in choice.head + choice.mark.encode()


def test_an_experiment_without_units_assigns_each_request_and_says_so() -> None:
    where = routed({V1: 100}, named=(V2,), experiment=replace(HALVES, unit="request"))
    found = [where.choose(caller(), user(1)) for _ in range(200)]
    assert {choice.arm for choice in found} == {"a", "b"}
    assert {choice.unit for choice in found} == {""}


def test_copies_go_to_the_shadow_of_calls_that_it_does_not_answer_itself() -> None:
    where = routed(
        {V1: 50, V3: 50},
        named=(V2,),
        shadow=Shadow(revision=V2, percent=20),
        tags={"next": V2, "old": V1},
    )
    copied = where.choose(caller(), {}).shadow
    assert copied is not None
    assert (copied.target.revision, copied.percent, copied.target.is_shadow) == (V2, 20, True)
    assert where.choose(caller(), {}, "next").shadow is None
    assert where.choose(caller(), {}, "old").shadow is None
    assert routed({V1: 100}, named=(V2,), shadow=Shadow(revision=V2, percent=0)).is_plain


def test_a_revision_that_is_only_named_keeps_nothing_warm_and_the_way_back_does() -> None:
    kept = spec_of(scaling=Scaling(min_instances=2))
    where = FunctionRouter(
        split_route(kept, {V1: 100}, named=(V2, V3), tags={"next": V2}, shadow=Shadow(revision=V3)),
        RATES,
    )
    assert {name: target.spec.scaling.min_instances for name, target in where.targets.items()} == {
        V1: 2,
        V2: 0,
        V3: 0,
    }
    rolling = routed({V1: 90, V2: 10}, stable=V1)
    assert {
        name: (t.spec.scaling.min_instances, t.is_stable) for name, t in rolling.targets.items()
    } == {V1: (1, True), V2: (0, False)}
    pinned = FunctionRouter(split_route(kept, {V1: 100}, named=(V2,), pins={"acme": V2}), RATES)
    assert pinned.targets[V2].spec.scaling.min_instances == 2


# -- in the table ----------------------------------------------------------------------------------
def address() -> FunctionAddress:
    return FunctionAddress(
        tenant=TenantId(TENANT), environment="main", app="shop", function="hello"
    )


def broken(route: FunctionRoute, **members: Any) -> FeedChange:
    return change(9, replace(route, document={**route.document, **members}))


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"weights": {V1: 90}}, id="weights do not add up"),
        pytest.param({"weights": {V1: 50, "v9-999999": 50}}, id="a weight on an unknown revision"),
        pytest.param(
            {"weights": {V1: 60, V2: 40}, "segments": []}, id="other weights than the route's"
        ),
        pytest.param({"tags": {"gone": "v9-999999"}}, id="a tag to nowhere"),
        pytest.param({"pins": {"acme": "v9-999999"}}, id="a pin to nowhere"),
        pytest.param(
            {"shadow": {"revision": "v9-999999", "percent": 100, "max_compute": 0.1}},
            id="a shadow that is not there",
        ),
        pytest.param(
            {"segments": [{"revision": V1, "begin": 0, "end": 50}]}, id="a hole in the segments"
        ),
        pytest.param(
            {"experiment": {"id": "x", "salt": "s", "unit": "key", "percent": 10, "arms": []}},
            id="an experiment without arms",
        ),
        pytest.param({"sticky": 7}, id="a unit that is no text"),
        pytest.param({"colour": "red"}, id="a member that there is not"),
        pytest.param({"weights": None}, id="no weights at all"),
    ],
)
def test_a_broken_document_is_refused_and_the_last_good_one_stays(members: dict[str, Any]) -> None:
    table = empty_table()
    good = split_route(spec_of(), {V1: 90, V2: 10})
    assert table.apply(change(1, good))
    assert not table.apply(broken(good, **members))
    assert dict(table.routed(address()).document.weights) == {V1: 90, V2: 10}
    assert table.refused == 1


def test_a_route_without_a_document_is_its_weights() -> None:
    table = empty_table()
    table.apply(change(1, route_of(spec_of(), revision=V1)))
    assert table.routed(address()).document.segments == (Segment(revision=V1, begin=0, end=100),)
    assert table.routed(address()).is_plain


def left_by(table: RouteTable, route: FunctionRoute) -> frozenset[str]:
    told: dict[str, frozenset[str]] = {}
    table.on_function = told.__setitem__
    table.apply(change(5, route))
    return told[NAME]


def test_a_revision_without_traffic_is_kept_while_anything_names_it() -> None:
    table = empty_table()
    table.apply(change(1, split_route(spec_of(), {V1: 50, V2: 50})))
    assert (
        left_by(table, split_route(spec_of(), {V2: 100}, named=(V1,), tags={"old": V1}))
        == frozenset()
    )
    assert {target.revision for target in table.targets_of(NAME)} == {V1, V2}
    assert left_by(table, split_route(spec_of(), {V2: 100})) == {f"f-shop-hello@{V1}"}
    assert {target.revision for target in table.targets_of(NAME)} == {V2}


def test_what_waits_for_a_revision_that_is_gone_gets_another() -> None:
    table = empty_table()
    table.apply(change(1, split_route(spec_of(), {V2: 100}, named=(V1,), tags={"old": V1})))
    assert table.target(address(), V1).revision == V1
    assert table.target(address(), V3).revision == V2


def test_another_tenant_sees_a_function_only_when_every_revision_that_may_answer_it_is_shared() -> (
    None
):
    table = empty_table()
    open_, closed = spec_of(access=(PUBLIC,)), spec_of()
    foreign = caller("k-2", tenant="t-2", name="acme")
    route = split_route(open_, {V1: 100}, named=(V2,), tags={"next": V2})
    hidden = split_route(closed, {V2: 100}).revisions[V2]
    table.apply(change(1, replace(route, revisions={**route.revisions, V2: hidden})))
    # a tag is not for them
    assert table.routed_for(foreign, address()).document.weights == {V1: 100}
    arms = replace(HALVES, unit="key")
    route = split_route(open_, {V1: 100}, named=(V2,), experiment=arms)
    table.apply(change(2, replace(route, revisions={**route.revisions, V2: hidden})))
    with pytest.raises(errors.NotFound):
        table.routed_for(foreign, address())

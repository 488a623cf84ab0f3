"""Checks of arguments that would take long run in another process, up to a deadline, and delay
nobody else's calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from activator.arguments.validator import INLINE_COST, ArgumentValidator, CheckTooExpensive
from activator.settings import ActivatorSettings
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from tests.activator.conftest import PATIENCE_S, Edge
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, route_of, spec_of

DEADLINE_S = 2.0
"""Where a test waits for it."""


def _slow_schema(parts: int) -> dict[str, Any]:
    """A schema of some kilobytes that compares each item of `x` with `parts` lists."""
    lists = [{"items": {"not": {"enum": [n, f"x{n}", [n]]}}} for n in range(parts)]
    return {"type": "object", "properties": {"x": {"allOf": lists}}}


def _nested_schema(levels: int) -> dict[str, Any]:
    """Each level evaluates the one below it again."""
    schema: dict[str, Any] = {"properties": {"a": True}}
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": {"type": "integer"}}
    return schema


_BRANCH = {"items": {"$ref": "#/$defs/a"}}
RECURSIVE = {
    "$defs": {"a": {"allOf": [_BRANCH, {**_BRANCH, "maxItems": 9}, {**_BRANCH, "maxItems": 8}]}},
    "additionalProperties": {"$ref": "#/$defs/a"},
}
NESTED = "[" * 40 + "]" * 40


@pytest.fixture(name="deadline_s")
def _deadline_s() -> float:
    """Of a check; short only where a test waits for it."""
    return PATIENCE_S


@pytest.fixture(name="settings")
def _settings(deadline_s: float) -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=2**20, body_timeout_s=PATIENCE_S, argument_check_s=deadline_s
    )


def _deploy(edge: Edge, name: str, schema: Mapping[str, Any]) -> None:
    edge.add(route_of(spec_of(name, methods=(MethodSpec(schema=schema, parameters=("x",)),))))


def _check(edge: Edge, name: str) -> ArgumentValidator:
    address = FunctionAddress(
        tenant=TenantId(TENANT), environment="main", app="shop", function=name
    )
    return edge.table.target(address).check("")


@pytest.mark.parametrize(
    "schema,body",
    [
        pytest.param(
            _slow_schema(2000), json.dumps({"x": [[-1]] * 40_000}), id="schema times argument"
        ),
        pytest.param(
            _nested_schema(24),
            json.dumps({f"p{n}": 1 for n in range(2000)}),
            id="small argument, nested schema",
        ),
    ],
)
@pytest.mark.parametrize("deadline_s", [DEADLINE_S])
@pytest.mark.slow  # waits for the deadline of a check
async def test_an_endless_check_is_refused_at_its_deadline_and_delays_nobody(
    edge: Edge, schema: Mapping[str, Any], body: str
) -> None:
    _deploy(edge, "slow", schema)
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 1})

    slow = asyncio.create_task(edge.call("shop/slow:invoke", content=body))
    waits, held = [], []
    while not slow.done():
        began, computed = time.monotonic(), time.thread_time()
        assert (await edge.call(json={"x": 1})).status_code == 200
        waits.append(time.monotonic() - began)
        held.append(time.thread_time() - computed)
        await asyncio.sleep(0.005)

    answer = await slow
    assert (answer.status_code, "took more than 2 s" in answer.json()["detail"]) == (400, True)
    waits.sort()
    print(
        f"{len(waits)} calls meanwhile: median {waits[len(waits) // 2] * 1e3:.1f} ms, slowest "
        f"{waits[-1] * 1e3:.1f} ms"
    )
    assert max(held) < 0.25, (
        "the loop computes for no longer; what the machine does beside it is another matter"
    )
    assert waits[len(waits) // 2] < DEADLINE_S / 4
    assert edge.arguments.overruns == 1


async def test_a_large_argument_is_checked_elsewhere_with_the_same_result(edge: Edge) -> None:
    _deploy(
        edge,
        "numbers",
        {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"}}}},
    )
    many = [1] * INLINE_COST

    fits = await edge.call("shop/numbers:invoke", json={"x": many})
    wrong = await edge.call("shop/numbers:invoke", json={"x": [*many, "no"]})
    no_json = await edge.call("shop/numbers:invoke", content=b"[" * 60_000)

    assert [answer.status_code for answer in (fits, wrong, no_json)] == [200, 400, 400]
    assert wrong.json()["errors"] == [
        {"parameter": "x", "message": '"no" is not of type "integer"'}
    ]
    assert edge.arguments.overruns == 0


async def test_a_pattern_that_backtracks_runs_elsewhere_and_a_linear_one_does_not(
    edge: Edge,
) -> None:
    _deploy(edge, "ahead", {"type": "object", "properties": {"x": {"pattern": "^(?=a)a+$"}}})
    _deploy(edge, "plain", {"type": "object", "properties": {"x": {"pattern": "^(a+)+$"}}})

    for name in ("ahead", "plain"):
        for text, status in (("aaa", 200), ("aab", 400)):
            assert (await edge.call(f"shop/{name}:invoke", json={"x": text})).status_code == status

    ahead, plain = (_check(edge, name) for name in ("ahead", "plain"))
    plain.check(b'{"x": "aaa"}')
    with pytest.raises(CheckTooExpensive):
        ahead.check(b'{"x": "aaa"}')


async def test_arguments_nested_in_a_schema_that_refers_to_itself_are_checked_elsewhere(
    edge: Edge,
) -> None:
    _deploy(edge, "tree", RECURSIVE)

    assert (await edge.call("shop/tree:invoke", content=f'{{"x": {NESTED}}}')).status_code in (
        200,
        400,
    )
    with pytest.raises(CheckTooExpensive):
        _check(edge, "tree").check(f'{{"x": {NESTED}}}'.encode())


async def test_a_caller_that_leaves_does_not_end_the_process_of_its_check(edge: Edge) -> None:
    _deploy(
        edge,
        "numbers",
        {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"}}}},
    )
    body = {"x": [1] * INLINE_COST}
    leaving = [asyncio.create_task(edge.call("shop/numbers:invoke", json=body)) for _ in range(3)]
    await until(lambda: "1 checks running" in repr(edge.arguments))
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)

    assert (await edge.call("shop/numbers:invoke", json=body)).status_code == 200
    assert edge.arguments.overruns == 0


@pytest.mark.slow  # starts processes, and ends one in the middle of a check
async def test_one_tenant_has_one_expensive_check_at_a_time(edge: Edge) -> None:
    """So the checks of another tenant find the second process free."""
    edge.add_key("pl_other", tenant="other")
    _deploy(edge, "slow", _slow_schema(2000))
    method = MethodSpec(
        schema={"type": "object", "properties": {"x": {"items": {"type": "integer"}}}},
        parameters=("x",),
    )
    edge.add(route_of(spec_of("numbers", methods=(method,)), tenant="other"))
    body = json.dumps({"x": [1] * INLINE_COST})
    await edge.call("shop/numbers:invoke", key="pl_other", content=body)

    slow = [
        asyncio.create_task(
            edge.call("shop/slow:invoke", content=json.dumps({"x": [[-1]] * 40_000}))
        )
        for _ in range(4)
    ]
    await until(lambda: "1 checks running, 3 waiting" in repr(edge.arguments))
    answer = await edge.call("shop/numbers:invoke", key="pl_other", content=body)

    assert (answer.status_code, sum(task.done() for task in slow)) == (200, 0)
    assert "1 checks running" in repr(edge.arguments)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    # those that waited for their turn have left
    await until(lambda: "1 checks running, 0 waiting" in repr(edge.arguments))
    await edge.arguments.aclose()

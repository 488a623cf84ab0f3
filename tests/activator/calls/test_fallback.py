"""What answers when a function cannot, through the whole edge: variants, other functions, kept and
declared answers."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from pilotlight.protocol import CONTENT_PICKLE
from pilotlight.spec.function import Clocks, MethodSpec
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import MAX_FALLBACKS, Fallback, RetryPolicy, Variant
from snapshotter import errors as agent_errors
from tests.activator.conftest import Edge
from tests.activator.test_gateway import problem_of, until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, route_of, spec_of

STATIC = Fallback(kind="static", body={"label": "unknown"})
CACHED = Fallback(kind="cached", max_age_s=60)
DEGRADED = "pilotlight-degraded"


def to(function: str) -> Fallback:
    return Fallback(kind="function", function=function)


async def says_small(request: WorkerRequest) -> WorkerAnswer:
    return WorkerAnswer(body=b'"small"')


async def raises(request: WorkerRequest) -> WorkerAnswer:
    return WorkerAnswer(status=500, body=b'{"type":"function-raised"}', outcome="raised")


def broken(edge: Edge, *names: str) -> None:
    for name in names:
        edge.fleet.broken[name] = agent_errors.StartFailed(f"{name} cannot be imported")


async def test_a_static_answer_is_given_at_no_cost_and_marked(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(STATIC,))))
    broken(edge, "hello")
    answer = await edge.call(json={"x": 1})

    assert (answer.status_code, answer.json(), answer.headers[DEGRADED]) == (
        200,
        {"label": "unknown"},
        "static",
    )
    assert answer.headers["pilotlight-cost"] == "0"
    assert not await edge.settle()


async def test_an_answer_of_the_function_itself_is_not_marked(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(STATIC,))))

    assert DEGRADED not in (await edge.call(json={"x": 1})).headers
    assert DEGRADED not in (await edge.call(json={"x": 1})).headers


async def test_another_function_answers_and_is_charged_as_itself(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(to("small"),))))
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = says_small
    broken(edge, "hello")
    answer = await edge.call(json={"x": 1})
    (record,) = (await edge.settle()).values()

    assert (answer.status_code, answer.json(), answer.headers[DEGRADED]) == (
        200,
        "small",
        "function=small",
    )
    assert (record.function, record.degraded, record.status) == ("small", "function=small", 200)
    assert answer.headers["x-request-id"] == record.call
    assert float(answer.headers["pilotlight-cost"]) == float(record.cost)


async def test_a_function_of_another_app_may_be_named(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(to("other/small"),))))
    edge.add(route_of(spec_of("small"), app="other"))
    edge.fleet.behaviours["small"] = says_small
    broken(edge, "hello")

    assert (await edge.call(json={"x": 1})).json() == "small"


async def test_rungs_are_tried_in_order_until_one_answers(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(to("gone"), to("broken"), to("raising"), CACHED, STATIC))))
    edge.add(route_of(spec_of("broken")))
    edge.add(route_of(spec_of("raising")))
    edge.fleet.behaviours["raising"] = raises
    broken(edge, "hello", "broken")
    answer = await edge.call(json={"x": 1})
    records = await edge.settle()

    assert (answer.status_code, answer.headers[DEGRADED]) == (200, "static")
    assert [(r.function, r.status) for r in records.values()] == [("raising", 500)], (
        "what ran is charged"
    )


async def test_where_no_rung_answers_the_caller_learns_what_failed_and_of_each_rung_why(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of(fallback=(to("gone"), CACHED))))
    broken(edge, "hello")
    answer = await edge.call(json={"x": 1})
    problem = problem_of(answer)

    assert (answer.status_code, str(problem["type"]).rpartition("/")[2]) == (502, "start-failed")
    assert [str(why).partition(":")[0] for why in problem["fallbacks"]] == [  # type: ignore[attr-defined]
        "function=gone",
        "cached",
    ]
    assert "hello cannot be imported" in str(problem["detail"])


async def test_fallbacks_that_go_round_are_refused_with_their_way(edge: Edge) -> None:
    edge.add(route_of(spec_of("a", fallback=(to("b"),))))
    edge.add(route_of(spec_of("b", fallback=(to("c"),))))
    edge.add(route_of(spec_of("c", fallback=(to("a"),))))
    broken(edge, "a", "b", "c")
    answer = await edge.call("shop/a:invoke", json={"x": 1})

    assert answer.status_code == 502
    assert "form a cycle: shop/a → shop/b → shop/c → shop/a" in str(problem_of(answer)["fallbacks"])
    assert len(edge.fleet.started) == 3


async def test_a_function_that_falls_back_to_itself_is_tried_once(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(to("hello"), STATIC))))
    broken(edge, "hello")
    answer = await edge.call(json={"x": 1})

    assert answer.headers[DEGRADED] == "static"
    assert len(edge.fleet.started) == 1


async def test_the_rungs_of_one_call_are_bounded_however_they_are_nested(edge: Edge) -> None:
    names = [f"f{n}" for n in range(12)]
    for name, following in zip(names, [*names[1:], "end"], strict=True):
        edge.add(route_of(spec_of(name, fallback=(to(following),))))
    broken(edge, *names)
    answer = await edge.call("shop/f0:invoke", json={"x": 1})

    assert f"at most {MAX_FALLBACKS} fallbacks" in str(problem_of(answer)["fallbacks"])
    assert len(edge.fleet.started) == 1 + MAX_FALLBACKS


async def test_the_last_good_answer_to_the_same_arguments_is_given_again(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(CACHED,))))
    await edge.call(json={"x": 1})
    await edge.call(json={"x": 2})  # a warm one
    broken(edge, "hello")
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    await until(
        lambda: not any(scaled.throttler.instances for scaled in edge.scaler.revisions.values())
    )

    for x in (1, 2):
        answer = await edge.call(json={"x": x})
        assert (answer.json(), answer.headers[DEGRADED], answer.headers["pilotlight-cost"]) == (
            {"x": x},
            "cached",
            "0",
        )
    assert (await edge.call(json={"x": 3})).status_code == 502


async def test_a_kept_answer_is_for_the_tenant_that_got_it(edge: Edge) -> None:
    edge.add_tenant("acme")
    edge.add_tenant("other", tenant="t-2")
    edge.add_key("pl_other", tenant="t-2", scope="invoke")
    edge.add(route_of(spec_of(fallback=(CACHED,), access=("other",))))
    await edge.call(json={"x": 1})
    broken(edge, "hello")
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    await until(
        lambda: not any(scaled.throttler.instances for scaled in edge.scaler.revisions.values())
    )
    theirs = await edge.client.post(
        f"{edge.url}/t/acme/v1/functions/shop/hello:invoke",
        headers={"authorization": "Bearer pl_other"},
        json={"x": 1},
    )

    assert theirs.status_code == 502
    assert (await edge.call(json={"x": 1})).headers[DEGRADED] == "cached"


async def test_a_fallbacks_own_kept_answer_is_its_own(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(to("small"),))))
    edge.add(route_of(spec_of("small", fallback=(CACHED,))))
    edge.fleet.behaviours["small"] = says_small
    await edge.call("shop/small:invoke", json={"x": 1})
    broken(edge, "hello", "small")
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    await until(
        lambda: not any(scaled.throttler.instances for scaled in edge.scaler.revisions.values())
    )
    answer = await edge.call(json={"x": 1})

    assert (answer.json(), answer.headers[DEGRADED]) == ("small", "cached")


async def test_what_a_quota_refuses_no_fallback_answers(edge: Edge) -> None:
    edge.add_key("pl_small", quotas={"requests_per_s": 0.001, "burst": 1})
    edge.add(route_of(spec_of(fallback=(STATIC,))))
    await edge.call(key="pl_small", json={"x": 1})
    answer = await edge.call(key="pl_small", json={"x": 1})

    assert answer.status_code == 429
    assert DEGRADED not in answer.headers


async def test_bad_arguments_and_user_errors_are_the_functions_own_word(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(STATIC,))))
    edge.fleet.behaviours["hello"] = raises

    assert (await edge.call(json={"x": "one"})).status_code == 400
    assert (await edge.call(json={"x": 1})).status_code == 500


async def test_a_full_queue_is_what_a_fallback_is_for(edge: Edge) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1, max_queued=1), fallback=(STATIC,))))
    edge.fleet.gate.clear()
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: edge.queue.waiting == 1)
    second = await edge.call(json={"x": 2})
    edge.fleet.gate.set()

    assert (second.status_code, second.headers[DEGRADED]) == (200, "static")
    assert (await first).json() == {"x": 1}


async def test_a_call_that_waited_in_vain_falls_back(edge: Edge) -> None:
    edge.add(route_of(spec_of(clocks=Clocks(queue_s=0.05), fallback=(STATIC,))))
    edge.fleet.gate.clear()
    answer = await edge.call(json={"x": 1})
    edge.fleet.gate.set()

    assert answer.headers[DEGRADED] == "static"


async def test_an_instance_that_dies_under_a_call_falls_back(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(STATIC,))))
    await edge.call(json={"x": 0})
    began = asyncio.Event()

    async def hang(request: WorkerRequest) -> WorkerAnswer:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    (worker,) = edge.fleet.workers.values()
    worker.behaviour = hang
    task = asyncio.create_task(edge.call(json={"x": 1}))
    await began.wait()
    await edge.fleet.kill(edge.fleet.started[0], "killed")

    assert (await task).headers[DEGRADED] == "static"


@pytest.mark.parametrize(
    "is_generator, content_type, accept, expected",
    [
        (False, CONTENT_PICKLE, "", {"label": "unknown"}),
        (True, "application/json", "", b'{"label":"unknown"}\n'),
        (True, "application/json", "text/event-stream", b'data: {"label":"unknown"}\n\n'),
        (True, CONTENT_PICKLE, "", {"label": "unknown"}),
    ],
)
async def test_a_static_answer_comes_in_the_form_that_its_caller_expects(
    edge: Edge, is_generator: bool, content_type: str, accept: str, expected: Any
) -> None:
    method = MethodSpec(schema=SCHEMA, parameters=("x", "y"), is_generator=is_generator)
    edge.add(route_of(spec_of(methods=(method,), fallback=(STATIC,))))
    broken(edge, "hello")
    headers = {"content-type": content_type} | ({"accept": accept} if accept else {})
    answer = await edge.call(content=b'{"x": 1}', headers=headers)
    body = answer.content
    if content_type == CONTENT_PICKLE:
        skipped = 4 if is_generator else 0
        assert not is_generator or int.from_bytes(body[:4], "big") == len(body) - 4
        assert pickle.loads(body[skipped:]) == expected
    else:
        assert body.partition(b"event: end\n")[0] == expected


async def test_a_function_that_takes_other_arguments_is_no_fallback(edge: Edge) -> None:
    other = MethodSpec(schema={"type": "object", "required": ["name"]}, parameters=("name",))
    edge.add(route_of(spec_of(fallback=(to("small"), STATIC))))
    edge.add(route_of(spec_of("small", methods=(other,))))
    broken(edge, "hello")

    assert (await edge.call(json={"x": 1})).headers[DEGRADED] == "static"
    assert len(edge.fleet.started) == 1


# -- variants --------------------------------------------------------------------------------------
async def with_variant(edge: Edge, *priorities: Priority) -> None:
    """`hello` with its only instance taken by a call that waits for ever, and `small` warm beside
    it."""
    variant = Variant(
        function="small", priorities=priorities or (Priority.STANDARD, Priority.BATCH)
    )
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1), variants=(variant,))))
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = says_small
    await edge.call("shop/small:invoke", json={"x": 0})
    await edge.call(json={"x": 0})


async def taken(edge: Edge) -> asyncio.Task[Any]:
    release = asyncio.Event()

    async def hang(request: WorkerRequest) -> WorkerAnswer:
        await release.wait()
        return WorkerAnswer(body=b'"big"')

    worker = edge.fleet.workers[edge.fleet.started[1]]
    worker.behaviour = hang
    before = len(worker.requests)
    task = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: len(worker.requests) > before)
    task.add_done_callback(lambda _: None)
    edge.release = release  # type: ignore[attr-defined]
    return task


async def test_a_free_variant_answers_where_a_call_would_have_to_wait(edge: Edge) -> None:
    await with_variant(edge)
    first = await taken(edge)
    answer = await edge.call(json={"x": 2})
    edge.release.set()  # type: ignore[attr-defined]

    assert (answer.json(), answer.headers[DEGRADED]) == ("small", "variant=small")
    assert (await first).json() == "big"
    assert ("small", "variant=small") in [
        (r.function, r.degraded) for r in (await edge.settle()).values()
    ]


async def test_a_variant_is_used_only_for_priorities_that_it_is_declared_for(edge: Edge) -> None:
    await with_variant(edge, Priority.BATCH)
    first = await taken(edge)
    second = asyncio.create_task(edge.call(json={"x": 2}))
    await until(lambda: edge.queue.waiting == 1)
    batch = await edge.call(json={"x": 3}, headers={"pilotlight-priority": "batch"})
    edge.release.set()  # type: ignore[attr-defined]

    assert batch.headers[DEGRADED] == "variant=small"
    assert (await second).json() == "big"
    assert DEGRADED not in second.result().headers
    await first


async def test_while_a_variant_answers_the_function_itself_is_started(edge: Edge) -> None:
    edge.add(route_of(spec_of(variants=(Variant(function="small"),))))
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = says_small
    await edge.call("shop/small:invoke", json={"x": 0})
    answer = await edge.call(json={"x": 1})
    await until(lambda: len(edge.fleet.workers) == 2)

    assert answer.headers[DEGRADED] == "variant=small"
    assert (await edge.call(json={"x": 2})).json() == {"x": 2}


async def test_a_retry_after_a_variant_raised_is_an_attempt_of_its_own(edge: Edge) -> None:
    retries = RetryPolicy(max_retries=1, initial_delay_s=0.001)
    edge.add(
        route_of(
            spec_of(
                scaling=Scaling(max_instances=1),
                variants=(Variant(function="small"),),
                retries=retries,
            )
        )
    )
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = raises
    await edge.call("shop/small:invoke", json={"x": 0})
    await edge.call(json={"x": 0})
    await until(lambda: len(edge.fleet.workers) == 2)
    first = await taken(edge)
    answer = await edge.call(json={"x": 2})
    edge.release.set()  # type: ignore[attr-defined]
    await first
    attempts = [
        r.attempt
        for r in (await edge.settle()).values()
        if r.call == answer.headers["x-request-id"]
    ]

    assert answer.status_code == 500
    assert len(attempts) == len(set(attempts)) == 2


async def test_a_variant_that_fails_leaves_the_call_to_the_function_itself(edge: Edge) -> None:
    await with_variant(edge)
    first = await taken(edge)
    small = edge.fleet.workers.pop(edge.fleet.started[0])
    await small.die()
    second = asyncio.create_task(edge.call(json={"x": 2}))
    edge.release.set()  # type: ignore[attr-defined]

    assert (await second).status_code == 200
    await first


@pytest.mark.parametrize(
    "bound_to,label",
    [
        ({"app": "shop"}, "unknown"),
        ({"app": "shop", "function": "hello"}, "unknown"),
        ({}, "small"),
    ],
)
async def test_a_fallback_runs_only_what_the_callers_key_reaches(
    edge: Edge, bound_to: dict[str, str], label: str
) -> None:
    edge.add_key("pl_bound", **bound_to)
    edge.add(route_of(spec_of(fallback=(to("other/small"), STATIC))))
    edge.add(route_of(spec_of("small"), app="other"))
    edge.fleet.behaviours["small"] = says_small
    broken(edge, "hello")
    answer = (await edge.call(key="pl_bound", json={"x": 1})).json()

    assert answer == (label if label == "small" else {"label": label})


async def test_a_variant_with_a_free_slot_is_not_used_by_a_key_that_does_not_reach_it(
    edge: Edge,
) -> None:
    edge.add_key("pl_bound", app="shop", function="hello")
    edge.add(route_of(spec_of(variants=(Variant(function="small"),))))
    edge.add(route_of(spec_of("small")))
    edge.fleet.behaviours["small"] = says_small
    await edge.call("shop/small:invoke", json={"x": 1})

    assert DEGRADED not in (await edge.call(key="pl_bound", json={"x": 1})).headers

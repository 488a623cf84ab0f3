"""Calls of language models come in: bounded by model, function and quotas, set aside, and settled
to what they used."""

from __future__ import annotations

from typing import Any

import pytest

from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS, write_cap
from activator.llm.token_admission import TokenAdmission, restore_reservation
from activator.quotas.admission import UNCOUNTED
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.spec.engines import Task
from tests.activator.llm.asking import Crowd, Door, chat, model
from tests.fakes.clock import ManualClock
from tests.fakes.routes import TENANT, spec_of, target_of


@pytest.fixture(name="crowd")
def _crowd() -> Crowd:
    return Crowd()


@pytest.fixture(name="desk")
def _desk(crowd: Crowd) -> TokenAdmission:
    return TokenAdmission(waiting_of=crowd.of)


async def enter(
    desk: TokenAdmission,
    door: Door,
    body: dict[str, Any] | None = None,
    *,
    path: str = CHAT,
    key: str = "k-1",
) -> TokenReservation:
    return await desk.admit(door.entry(key), path, body if body is not None else chat(), began_ns=0)


async def refused(
    desk: TokenAdmission, door: Door, body: dict[str, Any], *, path: str = CHAT
) -> errors.InvalidInput:
    with pytest.raises(errors.InvalidInput) as caught:
        await enter(desk, door, body, path=path)
    return caught.value


# -- bounds of the model and of the function -------------------------------------------------------
async def test_an_answer_may_be_what_the_models_length_leaves(desk: TokenAdmission) -> None:
    use = await enter(desk, Door(model(max_model_len=1000)))
    assert use.max_out == 999
    assert use.cap is None
    assert use.admission is UNCOUNTED


async def test_a_prompt_that_cannot_fit_is_refused_before_an_engine_wakes(
    desk: TokenAdmission,
) -> None:
    error = await refused(desk, Door(model(max_model_len=1000)), chat("word " * 10_000))
    assert (error.status, error.detail["bound"]) == (400, "max_model_len")
    assert "1000" in str(error)


async def test_a_prompt_that_may_fit_is_the_engines_to_judge(desk: TokenAdmission) -> None:
    await enter(desk, Door(model(max_model_len=1000)), chat("word " * 1000))


async def test_token_ids_are_counted_exactly(desk: TokenAdmission) -> None:
    door = Door(model(max_model_len=1000))
    await enter(desk, door, {"prompt": [1] * 999, "max_tokens": 1}, path=COMPLETIONS)
    await refused(desk, door, {"prompt": [1] * 1000, "max_tokens": 1}, path=COMPLETIONS)
    embedder = Door(model(max_model_len=1000, task=Task.EMBED))
    use = await enter(desk, embedder, {"input": [[1] * 1000, [2]]}, path=EMBEDDINGS)
    assert (use.estimated_in, use.max_out, use.reserved) == (1001, 0, 1001)


@pytest.mark.parametrize(
    "limits, bound", [({}, "max_model_len"), ({"max_output_tokens": 64}, "max_output_tokens")]
)
async def test_an_answer_longer_than_there_may_be_is_refused_by_name(
    desk: TokenAdmission, limits: dict[str, Any], bound: str
) -> None:
    error = await refused(desk, Door(model(**limits)), chat(max_tokens=1001))
    assert error.detail["bound"] == bound
    assert "max_tokens = 1001" in str(error)


async def test_a_functions_own_bound_on_prompts_holds(desk: TokenAdmission) -> None:
    error = await refused(desk, Door(model(max_input_tokens=50)), chat("word " * 200))
    assert (error.detail["bound"], error.detail["limit"]) == ("max_input_tokens", 50)


async def test_who_says_no_length_gets_the_functions_own(desk: TokenAdmission) -> None:
    use = await enter(desk, Door(model(default_output_tokens=128, max_output_tokens=256)))
    assert (use.max_out, use.cap, use.degraded) == (128, 128, "")
    use = await enter(desk, Door(model(max_output_tokens=256)))
    assert (use.max_out, use.cap) == (256, 256)
    use = await enter(desk, Door(model(max_output_tokens=256)), chat(max_tokens=200))
    assert (use.max_out, use.cap) == (200, None)


async def test_a_text_completion_that_says_no_length_has_openais(desk: TokenAdmission) -> None:
    use = await enter(desk, Door(model()), {"prompt": "hi", "n": 2}, path=COMPLETIONS)
    assert (use.max_out, use.cap) == (32, None)


# -- pressure --------------------------------------------------------------------------------------
async def test_under_pressure_answers_are_cut_and_marked(
    desk: TokenAdmission, crowd: Crowd
) -> None:
    door = Door(model(pressured_output_tokens=32, pressured_above=4))
    body = chat(max_tokens=500)
    crowd.waiting = 3
    assert (await enter(desk, door, body)).degraded == ""
    crowd.waiting = 4
    use = await enter(desk, door, body)
    assert (use.max_out, use.cap, use.degraded) == (32, 32, "output<=32")
    write_cap(CHAT, body, use.cap)
    assert body["max_completion_tokens"] == 32


async def test_an_answer_that_is_short_enough_is_not_marked(
    desk: TokenAdmission, crowd: Crowd
) -> None:
    crowd.waiting = 9
    use = await enter(desk, Door(model(pressured_output_tokens=32)), chat(max_tokens=32))
    assert (use.cap, use.degraded) == (None, "")


async def test_where_tokens_run_out_answers_are_cut_before_calls_are_refused(
    desk: TokenAdmission,
) -> None:
    door = Door(model(pressured_output_tokens=10), tokens_per_min=1000)
    first = await enter(desk, door, chat(max_tokens=900))
    assert first.degraded == ""
    second = await enter(desk, door, chat(max_tokens=900))
    assert second.degraded == "output<=10"


# -- quotas ----------------------------------------------------------------------------------------
async def test_what_is_reserved_is_settled_to_what_was_used(desk: TokenAdmission) -> None:
    clock = ManualClock(1000.0)
    door = Door(model(), store=ProcessQuotas(clock), tokens_per_min=600)
    use = await enter(desk, door, chat(max_tokens=500))
    with pytest.raises(errors.OverQuota) as caught:
        await enter(desk, door, chat(max_tokens=500))
    over = caught.value
    assert (over.detail["quota"], over.detail["limit"]) == ("tokens_per_min", 600)
    assert over.retry_after_s == pytest.approx((2 * use.reserved - 600) / 10)

    use.begin("f-1@v1")
    use.on_usage(20, 30)
    use.close(status=200, outcome="ok")
    use.settle()
    use.settle()
    again = await enter(desk, door, chat(max_tokens=500))
    assert again.admission is not UNCOUNTED
    assert b"-tokens" in again.admission.head()
    assert b'"key-tokens";r=%d' % (550 - again.reserved) in again.admission.head()


async def test_tokens_beyond_what_was_reserved_are_owed(desk: TokenAdmission) -> None:
    clock = ManualClock(1000.0)
    door = Door(model(), store=ProcessQuotas(clock), tokens_per_min=600)
    for _ in range(30):  # answers are short, so that little is reserved for the next
        short = await enter(desk, door, chat())
        short.begin(door.entry().target.key)
        short.on_usage(10, 10)
        short.on_finish("stop")
        short.settle()
        clock.now += 60
    use = await enter(desk, door, chat())
    use.on_usage(10, 891)
    assert use.tokens_out == use.max_out < 891  # more than it was allowed counts no further
    assert use.used > use.reserved
    use.settle()
    with pytest.raises(errors.OverQuota) as caught:
        await enter(desk, door, chat())
    assert caught.value.retry_after_s == pytest.approx((use.used + use.reserved - 600) / 10)


async def test_a_call_that_never_ran_gives_everything_back(desk: TokenAdmission) -> None:
    door = Door(model(), tokens_per_min=600, concurrent=1)
    for _ in range(5):
        (await enter(desk, door, chat(max_tokens=550))).settle()


@pytest.mark.parametrize("more", [{}, {"n": 1}, {"n": 4}, {"n": 128}])
async def test_who_says_no_length_gets_no_more_than_a_minute_holds(
    desk: TokenAdmission, more: dict[str, Any]
) -> None:
    """What is used beyond a minute's worth is forgiven, so nobody may be able to."""
    use = await enter(desk, Door(model(), tokens_per_min=300), chat(**more))

    assert use.max_out <= 300
    assert use.cap == use.max_out // more.get("n", 1)
    assert use.degraded == ""


async def test_a_call_that_could_never_run_is_told_so_and_by_which_bound(
    desk: TokenAdmission,
) -> None:
    door = Door(model(), tokens_per_min=300)
    error = await refused(desk, door, chat(max_tokens=301))
    assert (error.status, error.detail["bound"], error.detail["limit"]) == (
        400,
        "tokens_per_min",
        300,
    )
    assert "tokens_per_min = 300 of this key" in str(error)
    await enter(desk, door, chat())  # who says no length gets what there is


async def test_a_call_that_could_run_shortly_is_cut_instead(desk: TokenAdmission) -> None:
    use = await enter(
        desk, Door(model(pressured_output_tokens=50), tokens_per_min=300), chat(max_tokens=301)
    )
    assert (use.max_out, use.degraded) == (50, "output<=50")


async def test_another_tenants_numbers_are_not_told(desk: TokenAdmission) -> None:
    door = Door(model(), plan={"tokens_per_min": 300})
    with pytest.raises(errors.InvalidInput) as caught:
        await desk.admit(
            door.entry("k-9", tenant="t-other"), CHAT, chat(max_tokens=301), began_ns=0
        )
    assert "300" not in str(caught.value)
    assert "limit" not in caught.value.detail


async def test_one_tenants_streams_are_bounded_whatever_its_keys(desk: TokenAdmission) -> None:
    door = Door(model(max_streams_per_tenant=2))
    uses = [await enter(desk, door, key=key) for key in ("k-1", "k-2")]
    with pytest.raises(
        errors.OverQuota, match=r"2 running calls of this function.*max_streams_per_tenant"
    ) as caught:
        await enter(desk, door, key="k-3")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    await desk.admit(door.entry("k-9", tenant="t-other"), CHAT, chat(), began_ns=0)
    uses[0].settle()
    await enter(desk, door, key="k-3")
    assert door.store.held(f"streams:{TENANT}/main/shop/hello@{TENANT}") == 2


# -- what is learned -------------------------------------------------------------------------------
async def test_estimates_follow_what_engines_count(desk: TokenAdmission) -> None:
    door = Door(model(max_model_len=100_000))
    body = chat("x" * 4000)
    first = (await enter(desk, door, body)).estimated_in
    for _ in range(40):
        use = await enter(desk, door, body)
        use.begin(door.entry().target.key)
        use.on_usage(1000, 10)
        use.on_finish("stop")
        use.settle()
    learned = await enter(desk, door, body)
    assert first == 1342
    assert learned.estimated_in == pytest.approx(1000, rel=0.1)
    assert learned.reserved < 1300  # an answer of ten tokens is not expected to have a thousand
    assert learned.max_out > 90_000


async def test_what_another_function_counted_teaches_nothing_of_this_one(
    desk: TokenAdmission,
) -> None:
    door = Door(model())
    before = (await enter(desk, door)).estimated_in
    for _ in range(20):
        use = await enter(desk, door)
        use.begin("f-shop-small@v1")
        use.on_usage(500, 10)
        use.settle()
    assert (await enter(desk, door)).estimated_in == before


async def test_what_no_engine_counted_teaches_nothing(desk: TokenAdmission) -> None:
    door = Door(model())
    before = (await enter(desk, door)).estimated_in
    for _ in range(20):
        use = await enter(desk, door)
        use.close(status=499, outcome="cancelled")
        use.settle()
    assert (await enter(desk, door)).estimated_in == before


def test_a_call_from_a_journal_sets_aside_what_it_may_take_and_no_quota_again() -> None:
    target = target_of(model(max_model_len=1000))
    use = restore_reservation(target, CHAT, chat("x" * 300, max_tokens=50, n=2), began_ns=0)
    assert (use.estimated_in, use.max_out, use.admission) == (109, 100, UNCOUNTED)
    assert restore_reservation(target, CHAT, chat(), began_ns=0).max_out == 1000
    with pytest.raises(errors.InvalidInput, match="not a language model"):
        restore_reservation(target_of(spec_of()), CHAT, chat(), began_ns=0)

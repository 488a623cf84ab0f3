"""Handles against a platform: what users call, and what comes back."""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import pilotlight
from pilotlight.client import sessions
from pilotlight.errors import (
    DeadlineExceeded,
    FunctionRaised,
    InvalidInput,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from tests.fakes.fake_platform import SHARING_TENANT, FakePlatform
from tests.functions.sdk.conftest import Write

SOURCE = """
    import pilotlight

    app = pilotlight.App("shop")

    class OutOfStock(ValueError):
        pass

    @app.function()
    def double(n: int, plus: int = 0) -> int:
        return 2 * n + plus

    @app.function()
    def buy(what: str) -> None:
        raise OutOfStock(what)

    @app.function()
    def count(n: int):
        for i in range(n):
            yield i
        if n == 3:
            raise OutOfStock("after three")

    @app.cls()
    class Till:
        @pilotlight.enter()
        def load(self):
            self.rate = 10

        @pilotlight.enter(snap=False)
        def wake(self):
            self.rate += 1

        @pilotlight.method()
        def price(self, n: int) -> int:
            return n * self.rate
"""


@pytest.fixture(name="shop")
def _shop(platform: FakePlatform, module: Write) -> ModuleType:
    shop = module(SOURCE)
    shop.app.deploy()
    return shop


def test_remote_returns_what_the_function_returns(shop: ModuleType) -> None:
    assert shop.double.remote(4, plus=1) == 9


def test_remote_raises_the_same_type_with_the_remote_traceback_in_its_notes(
    shop: ModuleType,
) -> None:
    with pytest.raises(shop.OutOfStock, match="milk") as caught:
        shop.buy.remote("milk")

    assert any(
        "Remote traceback" in note and "def buy" not in note and "raise OutOfStock" in note
        for note in caught.value.__notes__
    )


def test_a_method_runs_on_an_entered_object_there_and_here(shop: ModuleType) -> None:
    assert shop.Till().price.remote(2) == 22
    assert shop.Till().price.local(2) == 22
    assert shop.Till().rate == 11


def test_local_runs_the_undecorated_function_without_the_platform(
    shop: ModuleType, platform: FakePlatform
) -> None:
    asked = len(platform.asked)

    assert shop.double.local(4) == 8
    assert len(platform.asked) == asked


async def test_remote_aio_awaits(shop: ModuleType) -> None:
    assert await shop.double.remote.aio(4) == 8
    await _close_loop()


def test_remote_aio_works_in_a_loop_of_its_own_and_leaves_nothing_open(shop: ModuleType) -> None:
    assert asyncio.run(shop.Till().price.remote.aio(1)) == 11


def test_map_keeps_the_order_of_its_inputs(shop: ModuleType) -> None:
    assert list(shop.double.map(range(20), kwargs={"plus": 1}, concurrency=4)) == [
        2 * n + 1 for n in range(20)
    ]


def test_map_zips_several_iterables_and_starmap_unpacks(shop: ModuleType) -> None:
    assert list(shop.double.map([1, 2], [10, 20])) == [12, 24]
    assert list(shop.double.starmap([(1, 10), (2, 20)])) == [12, 24]


def test_an_unordered_map_yields_everything_once(shop: ModuleType) -> None:
    assert sorted(shop.double.map(range(30), order_outputs=False, concurrency=8)) == [
        2 * n for n in range(30)
    ]


def test_map_raises_the_first_failure_or_yields_failures_in_place(shop: ModuleType) -> None:
    with pytest.raises(shop.OutOfStock):
        list(shop.buy.map(["a", "b"]))

    failures = list(shop.buy.map(["a", "b"], return_exceptions=True))
    assert [str(f) for f in failures] == ["a", "b"]


def test_map_draws_no_more_inputs_than_may_be_in_flight(shop: ModuleType) -> None:
    drawn: list[int] = []

    def inputs() -> object:
        for n in range(100):
            drawn.append(n)
            yield n

    results = shop.double.map(inputs(), concurrency=3)
    assert next(results) == 0
    results.close()

    assert len(drawn) <= 4


async def test_map_aio_takes_asynchronous_inputs(shop: ModuleType) -> None:
    async def inputs() -> object:
        for n in range(5):
            yield n

    assert [r async for r in shop.double.map.aio(inputs(), concurrency=2)] == [0, 2, 4, 6, 8]
    assert sorted([r async for r in shop.double.map.aio(range(5), order_outputs=False)]) == [
        0,
        2,
        4,
        6,
        8,
    ]
    await _close_loop()


def test_a_generator_streams_and_raises_at_its_place(shop: ModuleType) -> None:
    assert list(shop.count.remote_gen(2)) == [0, 1]

    items = shop.count.remote_gen(3)
    assert [next(items), next(items), next(items)] == [0, 1, 2]
    with pytest.raises(shop.OutOfStock, match="after three"):
        next(items)


async def test_a_generator_streams_asynchronously(shop: ModuleType) -> None:
    assert [i async for i in shop.count.remote_gen.aio(2)] == [0, 1]
    await _close_loop()


def test_remote_on_a_generator_points_to_remote_gen(shop: ModuleType) -> None:
    with pytest.raises(InvalidInput, match=r"remote_gen"):
        shop.count.remote(2)


def test_spawn_returns_a_call_that_can_be_found_again(shop: ModuleType) -> None:
    call = shop.double.spawn(4)

    assert pilotlight.FunctionCall.from_id(call.id).get(timeout=30) == 8
    assert pilotlight.FunctionCall.gather(
        shop.double.spawn(1), shop.double.spawn(2), timeout=30
    ) == [2, 4]
    with pytest.raises(shop.OutOfStock):
        shop.buy.spawn("milk").get()


def test_a_spawned_generator_is_streamed_and_its_result_is_the_list_of_its_items(
    shop: ModuleType,
) -> None:
    call = shop.count.spawn(2)
    assert list(call.stream()) == [0, 1]
    assert list(call.stream(after="1-1")) == [1]
    assert call.get(timeout=30) == [0, 1]
    assert list(shop.double.spawn(4).stream()) == [8]

    items = shop.count.spawn(3).stream()
    assert [next(items), next(items), next(items)] == [0, 1, 2]
    with pytest.raises(shop.OutOfStock, match="after three"):
        next(items)


async def test_a_spawned_generator_is_streamed_asynchronously(shop: ModuleType) -> None:
    call = await shop.count.spawn.aio(2)
    assert [item async for item in call.stream.aio()] == [0, 1]
    await _close_loop()


async def test_spawn_and_get_have_asynchronous_twins(shop: ModuleType) -> None:
    call = await shop.double.spawn.aio(4)

    assert await call.get.aio() == 8
    await _close_loop()


def test_get_gives_up_after_its_timeout_and_a_cancelled_call_says_so(
    platform: FakePlatform, module: Write
) -> None:
    slow = module("""
        import threading
        import pilotlight
        app = pilotlight.App("slow")
        gate = threading.Event()

        @app.function()
        def wait():
            gate.wait(30)
    """)
    slow.app.deploy()
    call = slow.wait.spawn()

    with pytest.raises(TimeoutError, match="RUNNING"):
        call.get(timeout=0)
    call.cancel()
    slow.gate.set()
    with pytest.raises(pilotlight.ClientClosedRequest, match="cancelled"):
        call.get()


def test_handles_by_name_need_no_code(shop: ModuleType) -> None:
    assert pilotlight.Function.from_name("shop", "double").remote(3) == 6
    assert pilotlight.Function.from_name("shop", "Till.price").remote(1) == 11
    assert pilotlight.Cls.from_name("shop", "Till")().price.remote(1) == 11


def test_an_unknown_function_says_how_to_deploy_it(platform: FakePlatform, module: Write) -> None:
    shop = module(SOURCE)

    with pytest.raises(NotFound, match="pilotlight deploy"):
        shop.double.remote(1)


def test_an_unserialisable_argument_is_named_before_anything_is_sent(
    shop: ModuleType, platform: FakePlatform
) -> None:
    asked = len(platform.asked)

    with pytest.raises(InvalidInput, match=r"argument 'plus' of type lock") as caught:
        shop.double.remote(1, threading.Lock())

    assert caught.value.detail["parameter"] == "plus"
    assert len(platform.asked) == asked


def test_refusals_with_retry_after_are_waited_for(shop: ModuleType, platform: FakePlatform) -> None:
    platform.refuse(Unavailable("no capacity", retry_after_s=0.01), times=2)

    assert shop.double.remote(1) == 2


def test_a_wait_longer_than_the_budget_is_not_begun(
    shop: ModuleType, platform: FakePlatform
) -> None:
    platform.refuse(Unavailable("no capacity", retry_after_s=3600))

    with pytest.raises(Unavailable, match="no capacity") as caught:
        shop.double.remote(1)
    assert caught.value.retry_after_s == 3600


def test_a_call_whose_connection_is_lost_is_not_sent_again(
    shop: ModuleType, platform: FakePlatform
) -> None:
    platform.refuse(None)

    with pytest.raises(Unavailable, match="lost"):
        shop.double.remote(1)


def test_a_problem_becomes_the_error_of_its_type(shop: ModuleType, platform: FakePlatform) -> None:
    platform.refuse(DeadlineExceeded("too slow", clock="execution"))

    with pytest.raises(DeadlineExceeded, match="too slow") as caught:
        shop.double.remote(1)
    assert caught.value.detail["clock"] == "execution"


def test_a_missing_key_says_where_to_get_one(platform: FakePlatform) -> None:
    with (
        sessions.use_profile(platform.profile(api_key="")),
        pytest.raises(Unauthenticated, match="PILOTLIGHT_API_KEY"),
    ):
        pilotlight.Function.from_name("shop", "double").remote(1)


@pytest.mark.parametrize("debug", ["", "1"])
def test_an_error_of_the_platform_is_raised_at_the_line_of_the_caller(
    shop: ModuleType, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("PILOTLIGHT_DEBUG", debug)

    async def iterate() -> list[int]:
        return [item async for item in shop.count.remote_gen.aio(1)]

    ways: list[Callable[[], object]] = [
        lambda: shop.double.remote(1),
        lambda: list(shop.count.remote_gen(1)),
        lambda: list(shop.double.map([1])),
        lambda: shop.double.spawn(1),
        lambda: pilotlight.FunctionCall.from_id("req-1").get(),
        lambda: pilotlight.FunctionCall.from_id("req-1").redrive(),
        shop.double.warmup,
        shop.app.deploy,
        lambda: asyncio.run(shop.double.remote.aio(1)),
        lambda: asyncio.run(iterate()),
    ]
    with sessions.use_profile(platform.profile(api_key="pl_wrong")):
        for way in ways:
            with pytest.raises(Unauthenticated) as caught:
                way()
            frames = traceback.extract_tb(caught.value.__traceback__)
            package = str(Path(pilotlight.__file__).parent)
            ours = [frame for frame in frames if frame.filename.startswith(package)]
            assert (len(ours) > 1) if debug else (len(ours) == 1), frames


def test_app_run_deploys_under_a_name_of_its_own_and_deletes_it(
    platform: FakePlatform, module: Write
) -> None:
    shop = module(SOURCE)

    with shop.app.run() as run:
        assert ("main", run.name) in platform.apps
        assert run.name.startswith("shop-run-")
        assert platform.function(run.name, "double").env == {"PILOTLIGHT_APP": f"shop={run.name}"}
        assert shop.double.remote(2) == 4
        assert shop.Till().price.remote(1) == 11
        with pytest.raises(InvalidInput, match="already running"), shop.app.run():
            pass

    assert platform.apps == {}


async def test_app_run_works_in_a_coroutine(platform: FakePlatform, module: Write) -> None:
    shop = module(SOURCE)

    async with shop.app.run():
        assert await shop.double.remote.aio(2) == 4
    await _close_loop()


async def _close_loop() -> None:
    """What asyncio.run does at its end; here the test's loop may outlive the platform."""
    await asyncio.get_running_loop().shutdown_asyncgens()


def test_another_tenants_function_is_called_by_that_tenants_name(
    shop: ModuleType, platform: FakePlatform
) -> None:
    theirs = pilotlight.Function.from_name("shop", "double", tenant=SHARING_TENANT)

    assert theirs.remote(4) == 8
    assert list(theirs.map([1, 2])) == [2, 4]
    assert platform.asked[-1] == f"POST /t/{SHARING_TENANT}/v1/functions/shop/double:invoke"
    assert theirs.spawn(5).get() == 10
    assert list(
        pilotlight.Function.from_name("shop", "count", tenant=SHARING_TENANT).remote_gen(2)
    ) == [0, 1]


def test_another_tenants_function_is_called_with_json_and_raises_what_json_tells(
    shop: ModuleType, platform: FakePlatform
) -> None:
    double = pilotlight.Function.from_name("shop", "double", tenant=SHARING_TENANT)
    assert (double.remote(n=4, plus=1), double.remote(4, 1)) == (9, 9)
    with pytest.raises(InvalidInput, match="pass all by name, or all by position"):
        double.remote(4, plus=1)
    for value in ({1, 2}, object(), float("nan"), b"x"):
        with pytest.raises(InvalidInput, match=r"argument 'plus' of type \w+ is not a JSON value"):
            double.remote(n=4, plus=value)
        with pytest.raises(InvalidInput, match=r"argument '#2' of type \w+ is not a JSON value"):
            double.remote(4, value)

    buy = pilotlight.Function.from_name("shop", "buy", tenant=SHARING_TENANT)
    with pytest.raises(FunctionRaised, match="OutOfStock: tea"):
        buy.remote("tea")
    with pytest.raises(FunctionRaised, match="OutOfStock: tea"):
        buy.spawn("tea").get()


def test_a_stream_of_another_tenants_is_lines_and_ends_with_what_was_raised(
    shop: ModuleType,
) -> None:
    count = pilotlight.Function.from_name("shop", "count", tenant=SHARING_TENANT)
    assert list(count.spawn(2).stream()) == [0, 1]
    items = count.remote_gen(3)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FunctionRaised, match="after three"):
        next(items)
    with pytest.raises(InvalidInput, match="single value"):
        list(pilotlight.Function.from_name("shop", "double", tenant=SHARING_TENANT).remote_gen(2))


async def test_a_stream_of_another_tenants_is_read_the_same_by_an_event_loop(
    shop: ModuleType,
) -> None:
    count = pilotlight.Function.from_name("shop", "count", tenant=SHARING_TENANT)
    assert [item async for item in count.remote_gen.aio(2)] == [0, 1]
    assert await (await count.spawn.aio(2)).get.aio() == [0, 1]
    await _close_loop()


def test_a_call_of_another_tenants_function_opens_no_pickle_wherever_its_handle_goes(
    shop: ModuleType,
) -> None:
    call = pilotlight.Function.from_name("shop", "double", tenant=SHARING_TENANT).spawn(1)
    again = pickle.loads(pickle.dumps(call))

    assert (again.id, again._pickles, again.get()) == (call.id, False, 2)
    assert pickle.loads(
        pickle.dumps(pilotlight.Function.from_name("shop", "double").spawn(1))
    )._pickles


def test_a_class_of_another_tenant_keeps_its_owner_through_a_pickle(shop: ModuleType) -> None:
    theirs = pilotlight.Cls.from_name("shop", "Till", tenant=SHARING_TENANT)

    assert theirs().price.remote(2) == 22
    assert pickle.loads(pickle.dumps(theirs()))._tenant == SHARING_TENANT
    assert pickle.loads(pickle.dumps(theirs().price)).remote(2) == 22


def test_a_function_that_a_tenant_does_not_share_is_not_found_and_says_whose(
    shop: ModuleType,
) -> None:
    theirs = pilotlight.Function.from_name("shop", "double", tenant="umbrella")

    with pytest.raises(
        NotFound, match=r"tenant 'umbrella' has no shop/double, or does not share it"
    ):
        theirs.remote(1)


def test_another_tenants_function_is_warmed_up_by_its_owner(shop: ModuleType) -> None:
    with pytest.raises(InvalidInput, match="only the owner"):
        pilotlight.Function.from_name("shop", "double", tenant=SHARING_TENANT).warmup()


def test_a_tenants_name_is_checked() -> None:
    with pytest.raises(InvalidInput, match="tenant name"):
        pilotlight.Function.from_name("shop", "double", tenant="../v1")
    with pytest.raises(InvalidInput, match="tenant name"):
        pilotlight.Cls.from_name("shop", "Till", tenant="a/b")


def test_calls_go_out_with_the_priority_that_the_handle_was_given(
    shop: ModuleType, platform: FakePlatform
) -> None:
    urgent = shop.double.with_options(priority="realtime")

    assert urgent.remote(1) == 2
    assert urgent.local(1) == 2
    assert pickle.loads(pickle.dumps(urgent)).remote(1) == 2
    assert shop.double.remote(1) == 2
    assert platform.priorities == ["realtime", "realtime"]


def test_an_unknown_priority_of_a_call_is_refused(shop: ModuleType) -> None:
    with pytest.raises(InvalidInput, match="realtime, standard, batch"):
        shop.double.with_options(priority="urgent")


def test_options_of_a_call_go_out_with_it_and_stay_off_the_handle(
    shop: ModuleType, platform: FakePlatform
) -> None:
    told = shop.double.with_options(webhook="ops", idempotency_key="order-7")
    call = told.with_options(priority="batch").spawn(4)
    assert call.get(timeout=30) == 8
    record = call.record()
    assert (record.webhook, record.labels["idempotency_key"], call.attempts()) == (
        "ops",
        "order-7",
        1,
    )
    assert shop.double.spawn(4).record().webhook == ""
    with pytest.raises(InvalidInput, match="webhook"):
        shop.double.with_options(webhook="not a name")


async def test_a_call_says_asynchronously_how_often_it_was_tried(shop: ModuleType) -> None:
    call = await shop.double.spawn.aio(4)
    assert await call.attempts.aio() == 1
    assert await call.get.aio(timeout=30) == 8

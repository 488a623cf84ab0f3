"""What pages show, computed: histograms, spans, hints, shares of time, words for numbers."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.analytics import (
    entitlements,
    environment_usage,
    function_stats,
    gpu_use,
    latency_histograms,
    monthly_spend,
    recent_calls,
    tenant_shares,
)
from pilotlight.controller.analytics.environment_usage import EnvironmentUsage
from pilotlight.controller.analytics.gpu_time import GpuTime, by_owner_and_kind, gpu_time
from pilotlight.controller.analytics.gpu_use import GpuNow
from pilotlight.controller.analytics.latency_histograms import Histogram
from pilotlight.controller.analytics.rightsizing import ObservedUsage, rightsizing_hints
from pilotlight.controller.analytics.rollup_queries import UsageCell, UsageSums
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.controller.billing import ledger
from pilotlight.controller.dashboard import charts, formatting, page_stats, svg
from pilotlight.controller.database.store import Store
from pilotlight.spec.identifiers import ephemeral_name
from pilotlight.spec.pricing import GIB, GpuState, PriceSettings, Rates
from pilotlight.spec.quotas import BUILT_IN_PLANS, UNLIMITED, Plan
from tests.functions.controller.parts import ManualClock
from tests.functions.controller.parts import usage as record

NOW = 1_800_018_000.0
HERE: dict[str, Any] = {"tenant": "t-1", "environment": "main"}


@given(st.lists(st.integers(1, 500_000), min_size=1, max_size=200), st.sampled_from((50, 95, 99)))
def test_a_percentile_is_right_to_a_twentieth(values: list[int], percent: int) -> None:
    histogram = Histogram()
    for value in values:
        bucket = next(b for b in range(240) if value <= 1.1**b)
        histogram.add(bucket, 1)
    exact = sorted(values)[-(-len(values) * percent // 100) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.05)


def test_without_calls_there_is_no_percentile() -> None:
    assert Histogram().percentile(99) is None
    assert formatting.milliseconds(None) == formatting.DASH


@pytest.mark.parametrize("name", ["24h", "7d", "30d", "90d"])
def test_a_span_ends_with_the_unit_that_runs(name: str) -> None:
    span = TimeRange.of(name, NOW)
    assert len(span.units) == len(span.starts()) == span.count
    assert span.last * span.unit_s <= NOW < (span.last + 1) * span.unit_s


def test_an_unknown_span_is_a_day() -> None:
    assert TimeRange.of("'; DROP TABLE usage; --", NOW).name == "24h"


def cell(
    kind: str = "CALL", *, name: str = "a/f", unit: int = 0, currency: str = "USD", **values: Any
) -> UsageCell:
    app, _, function = name.partition("/")
    sums = UsageSums(**values)
    return UsageCell(
        unit=unit,
        app=app,
        function=function,
        function_id=f"f-{name}",
        kind=kind,
        start_kind="WARM",
        currency=currency,
        sums=sums,
    )


def of(*cells: UsageCell) -> EnvironmentUsage:
    return EnvironmentUsage(span=TimeRange.of("24h", NOW), cells=cells, currency="USD")


def test_the_dearest_functions_have_names_and_the_rest_is_other_without_losing_a_picounit() -> None:
    first = TimeRange.of("24h", NOW).first
    used = of(*(cell(name=f"a/f{n}", unit=first + n, picos=10**n, records=1) for n in range(12)))
    series = environment_usage.stacked(used, lambda c: c.name, most=5)
    assert list(series) == ["a/f11", "a/f10", "a/f9", "a/f8", "other"]
    assert sum(s.picos for values in series.values() for s in values) == sum(
        10**n for n in range(12)
    )


def test_what_a_chart_shows_is_in_its_table_and_its_json_is_harmless_in_a_page() -> None:
    first = TimeRange.of("24h", NOW).first
    used = of(cell(name="</script>/<b>", unit=first, picos=25 * 10**10, records=4, errors=1))
    chart = charts.spend_by_function(used)
    ((label, values),) = chart.rows()
    assert values == ["$0.2500"]
    assert label.endswith(":00")
    assert "<" not in chart.data()
    assert charts.requests(used).alt_text == "4 calls in 24 hours, 1 of them failed"


def observed(**changes: Any) -> ObservedUsage:
    values: dict[str, Any] = {
        "app": "a",
        "name": "f",
        "memory_bytes": 2 * GIB,
        "measured_bytes": None,
        "min_instances": 0,
        "waiting_cost": None,
        "whole": UsageSums(picos=10**12, billed_ns=10**12, memory_byte_s=2 * GIB * 1000.0),
        "busy": UsageSums(),
        "idle": UsageSums(),
        "reserved": UsageSums(),
        "start_ms": None,
    }
    return ObservedUsage(**{**values, **changes})


RATES = Rates(version="1", memory_gib_s=Decimal("0.0001"))
MONTH_S = 30 * 86_400.0


def test_less_memory_is_suggested_with_half_as_much_again_free() -> None:
    (hint,) = rightsizing_hints(
        [observed(measured_bytes=300 * 1024**2)], rates=RATES, elapsed_s=MONTH_S
    )
    assert hint.change == 'memory="512MiB"'
    # 2 GiB * 1000 s at 0.0001, three quarters of it
    assert hint.saving == Decimal("0.2") * Decimal("0.75")


@pytest.mark.parametrize("measured", [None, 1_200 * 1024**2, 2 * GIB])
def test_memory_that_is_used_or_unknown_gives_no_hint(measured: int | None) -> None:
    assert (
        rightsizing_hints([observed(measured_bytes=measured)], rates=RATES, elapsed_s=MONTH_S) == []
    )


def test_kept_instances_that_hardly_work_are_named_with_what_going_without_costs() -> None:
    idle = observed(
        reserved=UsageSums(picos=9 * 10**11, billed_ns=95),
        busy=UsageSums(billed_ns=5),
        min_instances=2,
        start_ms=180.0,
    )
    (hint,) = rightsizing_hints([idle], rates=RATES, elapsed_s=MONTH_S / 2)
    assert (hint.change, hint.saving) == ("min_instances=0", Decimal("1.8"))
    assert "2 reserved instances are busy 5 %" in hint.why
    assert "0.18 s" in hint.why
    busy = observed(
        reserved=UsageSums(picos=9 * 10**11, billed_ns=50), busy=UsageSums(billed_ns=50)
    )
    assert rightsizing_hints([busy], rates=RATES, elapsed_s=MONTH_S) == []


def test_a_window_that_idles_much_is_to_be_the_other_kind() -> None:
    spent = {"idle": UsageSums(picos=9 * 10**11, billed_ns=1)}
    hints = [
        rightsizing_hints([observed(**spent, waiting_cost=cost)], rates=RATES, elapsed_s=MONTH_S)[
            0
        ].change
        for cost in (None, 10.0)
    ]
    assert hints == ['scaledown_window="auto"', "scaledown_window=60"]


def test_one_functions_pennies_are_no_hint_beside_anothers_fortune() -> None:
    cheap = observed(
        name="cheap", whole=UsageSums(picos=10**10), idle=UsageSums(picos=9 * 10**9, billed_ns=1)
    )
    dear = observed(
        name="dear", whole=UsageSums(picos=10**13), idle=UsageSums(picos=10**12, billed_ns=1)
    )
    assert [
        hint.name for hint in rightsizing_hints([cheap, dear], rates=RATES, elapsed_s=MONTH_S)
    ] == ["dear"]
    assert [hint.name for hint in rightsizing_hints([cheap], rates=RATES, elapsed_s=MONTH_S)] == [
        "cheap"
    ]


@pytest.mark.parametrize(
    "count,shown",
    [
        (0, "0 B"),
        (420, "420 B"),
        (3100, "3.0 KiB"),
        (5 * 1024**2, "5.0 MiB"),
        (24 * GIB, "24 GiB"),
        (1700 * GIB, "1,700 GiB"),
    ],
)
def test_sizes_are_in_what_fits(count: int, shown: str) -> None:
    assert formatting.size(count) == shown


def test_what_saves_next_to_nothing_is_not_a_hint() -> None:
    assert (
        rightsizing_hints(
            [observed(idle=UsageSums(picos=10**10, billed_ns=1))], rates=RATES, elapsed_s=MONTH_S
        )
        == []
    )


def test_gpu_time_decides_how_busy_an_owner_is() -> None:
    rows = page_stats.by_owner(
        [
            cell("CALL", billed_ns=60 * 10**9, gpu_s=60.0),
            cell("IDLE", billed_ns=60 * 10**9, gpu_s=180.0, picos=7),
            cell("RESERVED", name="b/g", billed_ns=10**9),
            cell("STORAGE", name="", picos=3),
        ]
    )
    assert [(row.owner, row.busy, row.gpus.unused_s) for row in rows] == [
        ("a/f", 0.25, 180.0),
        ("b/g", 0.0, 0.0),
    ]
    assert page_stats.utilisation("nobody", []).busy is None


def test_starts_unpaid_idle_time_and_sleep_are_gpu_time_without_calls() -> None:
    cells = [
        cell("CALL", gpu_s=100.0),
        cell("SHADOW", gpu_s=20.0),
        cell("START", gpu_s=30.0),
        cell("FREE_START", gpu_s=10.0),
        cell("FREE_IDLE", gpu_s=240.0),
        cell("IDLE", gpu_s=150.0),
        cell("RESERVED", gpu_s=50.0),
        cell("ASLEEP", gpu_s=600.0),
        cell("CPU", billed_ns=10**9),
    ]
    time = gpu_time(cells)
    assert time.seconds == {
        GpuState.BUSY: 120.0,
        GpuState.START: 40.0,
        GpuState.IDLE_FREE: 240.0,
        GpuState.IDLE_PAID: 200.0,
        GpuState.ASLEEP: 600.0,
    }
    assert (time.held_s, time.unused_s, time.utilisation) == (1200.0, 1080.0, 0.1)
    assert time.describe() == (
        "asleep 50 %, idle unpaid 20 %, idle paid 17 %, busy 10 %, starting 3 %"
    )
    assert page_stats.utilisation("a/f", cells).busy == 0.1
    other = replace(cell("FREE_IDLE", gpu_s=9.0), gpu="L4")
    assert [(row.gpu, row.time.held_s) for row in by_owner_and_kind([*cells, other])] == [
        ("", 1200.0),
        ("L4", 9.0),
    ]
    assert gpu_time([]).utilisation is None


def test_a_hint_for_a_gpu_says_what_its_time_was_spent_on() -> None:
    time = GpuTime(seconds={GpuState.BUSY: 10.0, GpuState.IDLE_PAID: 90.0})
    one = observed(
        whole=UsageSums(picos=10**13, billed_ns=10**9),
        idle=UsageSums(picos=10**13, billed_ns=10**9),
        gpus=time,
    )
    [hint] = rightsizing_hints([one], rates=RATES, elapsed_s=MONTH_S)
    assert hint.why.endswith("; of GPU time idle paid 90 %, busy 10 %")


def gpu_now(**changes: Any) -> GpuNow:
    values = {"app": "a", "function": "f", "gpu": "H100", "uuid": "GPU-1", "memory_bytes": 80 * GIB}
    return GpuNow(**{**values, "sm_utilisation": 0.2, "used_bytes": 20 * GIB, **changes})


@pytest.mark.parametrize(
    "changes,suggested",
    [
        ({}, "H100-MIG-3g.40gb"),
        ({"used_bytes": 5 * GIB, "sm_utilisation": 0.05}, "H100-MIG-1g.10gb"),
        ({"sm_utilisation": 0.5}, None),
        ({"used_bytes": 30 * GIB}, None),
        ({"sm_utilisation": None}, None),
        ({"gpu": "A100"}, None),
        ({"gpu": "H100-MIG-3g.40gb"}, None),
    ],
)
def test_a_gpu_that_is_hardly_used_could_be_a_mig_instance_with_a_price(
    changes: dict[str, Any], suggested: str | None
) -> None:
    prices = {"H100": 10, "H100-MIG-3g.40gb": 5, "H100-MIG-1g.10gb": 2, "A100": 9}
    rates = replace(RATES, gpu_s={kind: Decimal(price) for kind, price in prices.items()})
    one = observed(
        whole=UsageSums(picos=1000 * 10**12, billed_ns=10**11),
        gpus=GpuTime(seconds={GpuState.BUSY: 60.0, GpuState.IDLE_PAID: 40.0, GpuState.START: 9.0}),
        gpus_now=(gpu_now(**changes),),
    )
    hints = rightsizing_hints([one], rates=rates, elapsed_s=MONTH_S)
    assert [hint.change for hint in hints] == ([f'gpu="{suggested}"'] if suggested else [])
    if suggested == "H100-MIG-3g.40gb":
        assert hints[0].saving == 500, "half the price of a hundred seconds"
        assert hints[0].why.startswith("its GPUs now compute 20 % and use 25 % of their memory")


def test_what_nvml_does_not_tell_is_not_shown() -> None:
    labels = {"tenant": "t-1", "environment": "main", "app": "a", "function": "f"}
    known = {
        "uuid": "GPU-1",
        "kind": "H100",
        "memory_bytes": 80,
        "used_bytes": 20,
        "sm_utilisation": None,
        "delivered_bytes": 7,
        "labels": labels,
    }
    unknown = {**known, "used_bytes": None}
    own = {"tenant": "t-1", "environment": "main"}
    (found,) = gpu_use.of_agent([known, unknown, {**known, "labels": {}}], own)
    assert (found.name, found.used, found.weights_bytes) == ("a/f", 0.25, 7)
    assert gpu_use.describe([found]) == "its GPUs now use 25 % of their memory"
    assert gpu_use.describe([]) == ""


def test_quotas_show_their_use_where_it_is_known() -> None:
    rows = {
        row.name: row
        for row in page_stats.quotas(
            BUILT_IN_PLANS["free"], {"requests_per_s": 0.024, "instances": 2}
        )
    }
    assert (rows["Instances"].share, rows["Instances"].used) == (1.0, "2")
    assert (rows["Requests per second"].used, rows["Concurrent calls"].used) == ("0.024", None)
    assert rows["GPUs"].share is None
    assert rows["Size of a request"].bound == "1.0 MiB"


@pytest.mark.parametrize(
    "wanted,calls,kept",
    [
        (0.99, UsageSums(records=1000, errors=5), True),
        (0.999, UsageSums(records=1000, errors=5), False),
        (0.99, UsageSums(), None),
    ],
)
def test_objectives_are_kept_or_missed_or_open(
    wanted: float, calls: UsageSums, kept: bool | None
) -> None:
    plan = Plan(name="own", availability=wanted)
    (row,) = page_stats.objectives(
        plan,
        EnvironmentUsage(span=TimeRange.of("24h", NOW), cells=(cell_of(calls),), currency="USD"),
        [],
    )
    assert (row.name, row.is_met) == ("Calls answered", kept)


def cell_of(calls: UsageSums) -> UsageCell:
    return UsageCell(
        unit=0,
        app="a",
        function="f",
        function_id="f-1",
        kind="CALL",
        start_kind="WARM",
        currency="USD",
        sums=calls,
    )


def test_a_plan_that_nobody_knows_any_more_bounds_nothing() -> None:
    assert entitlements.plan_from("gone", "{}", BUILT_IN_PLANS) == UNLIMITED
    assert entitlements.plan_from("free", '{"instances": 7}', BUILT_IN_PLANS).instances == 7
    prices = PriceSettings(others={"cheap": {"cpu_core_s": "0"}})
    assert entitlements.rates_of(Plan(prices="cheap"), prices).version == "cheap"
    assert entitlements.rates_of(Plan(prices="lost"), prices).version == prices.version


@pytest.mark.parametrize(
    "seconds,shown",
    [(0, "0 s"), (12, "12 s"), (250, "4.2 min"), (12_600, "3.5 h"), (190_000, "2.2 d")],
)
def test_durations_are_two_digits_of_what_fits(seconds: float, shown: str) -> None:
    assert formatting.duration(seconds) == shown


@pytest.mark.parametrize(
    "number,shown",
    [(0, "0"), (99_999, "99,999"), (123_456, "123 k"), (1.5e6, "1.5 M"), (2e9, "2 G")],
)
def test_counts_stay_short(number: float, shown: str) -> None:
    assert formatting.count(number) == shown


@pytest.mark.parametrize(
    "share,shown",
    [
        (None, formatting.DASH),
        (0, "0.0 %"),
        (0.0001, "< 0.1 %"),
        (0.423, "42 %"),
        (0.999, "99.9 %"),
        (1, "100 %"),
    ],
)
def test_a_little_is_never_nothing(share: float | None, shown: str) -> None:
    assert formatting.percent(share) == shown


def test_prices_stand_in_columns() -> None:
    shown = [
        formatting.price(Decimal(amount), "USD")
        for amount in ("0.0000008", "1.25", "0", "-3", "0.000000000012")
    ]
    assert shown == [
        "$0.00000080",
        "$1.25000000",
        "$0.00000000",
        "\u2212$3.00000000",
        "$0.000000000012",
    ]


def test_the_phases_of_a_call_follow_each_other_and_stay_within() -> None:
    falls = svg.waterfall(record(queued_ms=10, start_ms=30, exec_ms=60), scale_ms=100, width=200)
    assert falls == [("queue", 0.0, 20.0, 10), ("start", 20.0, 60.0, 30), ("exec", 80.0, 120.0, 60)]
    assert svg.waterfall(record(queued_ms=0, start_ms=0, exec_ms=0), scale_ms=0) == []
    thin = svg.waterfall(
        record(queued_ms=1, start_ms=1, exec_ms=10**6), scale_ms=10**6 + 2, width=160
    )
    assert all(width >= 1.4 for _, _, width, _ in thin)
    assert sum(width for _, _, width, _ in thin) <= 160


@pytest.fixture
def books(store: Store, clock: ManualClock) -> Store:
    clock.now = NOW
    return store


def fill(books: Store, *records: Any) -> None:
    with books.write() as write:
        ledger.add(write, list(records))


def test_a_foreign_currency_counts_its_work_and_not_its_cost(books: Store) -> None:
    fill(
        books,
        record("a/1", started_at=NOW - 5, cost="1"),
        record("b/1", started_at=NOW - 5, cost="9", currency="EUR"),
    )
    with books.read() as sql:
        used = environment_usage.read(sql, **HERE, span=TimeRange.of("24h", NOW), currency="USD")
        month = monthly_spend.month_so_far(sql, tenant="t-1", currency="USD", now=NOW)
    assert (used.total.cost, used.calls.records, used.others) == (Decimal(1), 2, ("EUR",))
    assert month.spent == 10**12


def test_runs_of_an_app_are_one_row_of_the_overview_however_many_they_were(books: Store) -> None:
    names = ["hello", *(ephemeral_name("hello", f"{n:06x}") for n in range(3)), "hello-run-away"]
    fill(
        books,
        *(
            record(f"{app}/1", started_at=NOW - 5, app=app, function_id=f"f-{app}", cost="1")
            for app in names
        ),
    )
    with books.read() as sql:
        used = environment_usage.with_runs_added(
            environment_usage.read(sql, **HERE, span=TimeRange.of("24h", NOW), currency="USD")
        )
        rows = function_stats.table(sql, **HERE, usage=used, parts=[])
    assert {row.app: row.calls.records for row in rows} == {
        "hello": 1,
        "hello-run-*": 3,
        "hello-run-away": 1,
    }
    assert used.total.cost == 5


def test_calls_are_paged_newest_first_without_losing_or_repeating_one(books: Store) -> None:
    fill(books, *(record(f"c{n:03}/1", started_at=NOW - 3600 * (n // 2)) for n in range(101)))
    fill(
        books,
        record("idle/1", kind="IDLE", started_at=NOW - 1),
        record("far/1", started_at=NOW - 1, environment="staging"),
    )
    seen: list[str] = []
    cursor = ""
    with books.read() as sql:
        while True:
            page = recent_calls.read(sql, **HERE, now=NOW, limit=10, before=cursor)
            seen += [call.id for call in page.calls]
            cursor = page.older
            if not cursor:
                break
    assert len(seen) == len(set(seen)) == 101
    assert seen[0] in ("c000/1", "c001/1")
    assert seen[-1] == "c100/1"


@pytest.mark.parametrize("cursor", ["nan~x", "inf~", "~", "-1e309~x", "x", "1800018000~' OR 1=1"])
def test_a_made_up_cursor_finds_at_most_what_is_there(books: Store, cursor: str) -> None:
    fill(books, record("c/1", started_at=NOW - 5))
    with books.read() as sql:
        assert len(recent_calls.read(sql, **HERE, now=NOW, limit=10, before=cursor).calls) <= 1


def test_a_call_of_another_environment_or_tenant_is_not_there(books: Store) -> None:
    fill(books, record("c/1", started_at=NOW - 5))
    with books.read() as sql:
        assert len(recent_calls.attempts(sql, **HERE, call="c")) == 1
        assert recent_calls.attempts(sql, tenant="t-1", environment="staging", call="c") == []
        assert recent_calls.attempts(sql, tenant="t-2", environment="main", call="c") == []


def test_functions_that_are_gone_stay_in_what_they_cost(books: Store) -> None:
    fill(books, record("c/1", started_at=NOW - 5, function_id="f-gone", cost="2"))
    with books.read() as sql:
        used = environment_usage.read(sql, **HERE, span=TimeRange.of("24h", NOW), currency="USD")
        (row,) = function_stats.table(
            sql, **HERE, usage=used, parts=latency_histograms.read(sql, **HERE, now=NOW)
        )
        assert (row.deployed, row.whole.cost, function_stats.count(sql, **HERE)) == (
            None,
            Decimal(2),
            0,
        )
        assert function_stats.one(sql, **HERE, app="search", name="embed") is None


def test_hours_without_calls_leave_a_gap_and_an_old_hour_is_outside(books: Store) -> None:
    fill(
        books,
        record("a/1", started_at=NOW - 7200, exec_ms=200),
        record("b/1", started_at=NOW - 30 * 3600),
    )
    with books.read() as sql:
        hours = latency_histograms.by_hour(sql, **HERE, now=NOW)
        parts = latency_histograms.read(sql, **HERE, now=NOW, function_id="f-1", clocks=("total",))
    assert list(hours) == [int(NOW // 3600) - 2]
    assert [(part.clock, part.histogram.calls) for part in parts] == [("total", 1)]


def test_shares_are_of_every_tenant_and_names_are_of_their_own(books: Store) -> None:
    with books.read() as sql:
        assert (
            tenant_shares.read(
                sql, span=TimeRange.of("7d", NOW), plans=BUILT_IN_PLANS, currency="USD"
            )
            == []
        )
        assert (tenant_shares.names(sql), tenant_shares.models(sql)) == ({}, {})

"""Costs and records: the fast way says exactly what the plain way says."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.billing.usage_pricing import PICO, UsageTemplate, cost_text, to_picos
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import Footprint, Rates, is_free, price_duration
from tests.activator.billing_world import FOOTPRINT, RATES, subject, template
from tests.fakes.reference_prices import price_usage


@given(
    billed_ns=st.integers(0, 10**15),
    core=st.decimals(0, 10, places=9),
    request=st.decimals(0, 1, places=13),
    cpu=st.sampled_from([0.05, 0.25, 1.0, 3.0, 64.0]),
    memory_bytes=st.sampled_from([32 * 1024**2, 1000**3, 1024**3, 3 * 1024**3 + 1]),
)
def test_the_cost_is_the_price_to_the_last_digit(
    billed_ns: int, core: Decimal, request: Decimal, cpu: float, memory_bytes: int
) -> None:
    rates = Rates(version="v", cpu_core_s=core, memory_gib_s=Decimal("0.00000222"), request=request)
    made = UsageTemplate(
        subject(), footprint=Footprint(cpu=cpu, memory_bytes=memory_bytes), rates=rates
    )
    assert Decimal(made.cost(billed_ns)) == price_duration(
        billed_ns, Decimal(made.fixed["rate_per_s"]), request
    )


@given(
    billed_ns=st.integers(0, 10**13),
    tokens=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    prices=st.tuples(*[st.decimals(0, 1, places=9)] * 4),
    factors=st.tuples(*[st.decimals(0, 2, places=3)] * 3),
    minimum_ms=st.sampled_from([0, 1, 100]),
    rounding_ms=st.sampled_from([0, 1, 7, 1000]),
    kind=st.sampled_from(["CALL", "IDLE", "RESERVED", "START"]),
    outcome=st.sampled_from(["ok", "lost", "busy", "unsent"]),
)
def test_every_record_can_be_priced_again_from_what_it_measured(
    *,
    billed_ns: int,
    tokens: tuple[int, int],
    prices: tuple[Decimal, ...],
    factors: tuple[Decimal, ...],
    minimum_ms: int,
    rounding_ms: int,
    kind: str,
    outcome: str,
) -> None:
    core, request, token_in, token_out = prices
    start, idle, reserved = factors
    rates = Rates(
        version="v",
        cpu_core_s=core,
        request=request,
        token_in=token_in,
        token_out=token_out,
        start_factor=start,
        idle_factor=idle,
        reserved_factor=reserved,
        minimum_ms=minimum_ms,
        rounding_ms=rounding_ms,
    )
    made = UsageTemplate(
        subject(), footprint=Footprint(cpu=0.3, memory_bytes=1000**3), rates=rates, kind=kind
    )
    tokens_in, tokens_out = tokens if kind == "CALL" else (0, 0)
    picos = 0 if is_free(outcome, 0) else made.picos(billed_ns, tokens_in, tokens_out)
    record = made.record(
        id="c/1",
        call="c",
        attempt=1,
        start_kind="WARM",
        started_ns=1,
        queued_ms=0,
        start_ms=0,
        exec_ms=0,
        billed_ns=billed_ns,
        cost=cost_text(picos),
        status=200,
        outcome=outcome,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
    )
    parsed = UsageRecord.from_json(json.loads(record))
    assert price_usage(parsed, rates) == Decimal(parsed.cost) == Decimal(picos) / PICO
    assert to_picos(parsed.cost) == picos


def test_minimum_and_rounding_are_charged_and_the_time_itself_stays_in_the_record() -> None:
    rates = Rates(
        version="v", cpu_core_s=Decimal(1), memory_gib_s=Decimal(0), minimum_ms=100, rounding_ms=100
    )
    made = UsageTemplate(subject(), footprint=Footprint(cpu=1.0, memory_bytes=1), rates=rates)
    assert [made.cost(ms * 1_000_000)[:4] for ms in (0, 1, 100, 101)] == [
        "0.10",
        "0.10",
        "0.10",
        "0.20",
    ]


@pytest.mark.parametrize("text", ["", "x", "NaN", "Infinity", "1e16", "--1"])
def test_what_is_no_amount_of_money_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"decimal|money"):
        to_picos(text)


def test_half_a_picounit_goes_to_the_even_neighbour() -> None:
    rates = Rates(version="v", cpu_core_s=Decimal("0.0005"), memory_gib_s=Decimal(0))
    made = UsageTemplate(subject(), footprint=Footprint(cpu=1.0, memory_bytes=1024**3), rates=rates)
    assert [made.cost(n) for n in (1, 3)] == ["0.000000000000", "0.000000000002"]


def test_a_record_is_json_whatever_the_caller_calls_it() -> None:
    record = template().record(
        id='"\\\n/1',
        call='"\\\n\u2028',
        attempt=1,
        start_kind="COLD",
        started_ns=1_700_000_000_123_456_789,
        queued_ms=1,
        start_ms=2,
        exec_ms=3,
        billed_ns=4,
        cost="0.5",
        status=200,
        outcome="ok",
        tokens_in=5,
        tokens_out=6,
        bytes_in=7,
        bytes_out=8,
    )
    assert b"\n" not in record
    parsed = UsageRecord.from_json(json.loads(record))
    assert (parsed.call, parsed.started_at, parsed.cpu, parsed.gpu) == (
        '"\\\n\u2028',
        1_700_000_000.123457,
        2.0,
        None,
    )


def test_an_accelerator_without_a_price_is_an_error_at_once() -> None:
    with pytest.raises(KeyError):
        UsageTemplate(
            subject(),
            footprint=Footprint(cpu=1, memory_bytes=1, gpu="H100", gpu_count=1),
            rates=RATES,
        )
    assert (
        UsageTemplate(subject(), footprint=FOOTPRINT, rates=RATES, kind="IDLE").fixed["rate_per_s"]
        == "0.00200"
    ), "half of 0.004"

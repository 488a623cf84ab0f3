"""What a budget may say."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.billing.budget_definition import BudgetDefinition, parse_definition
from pilotlight.errors import InvalidInput


def terms(amount: str = "10", **changes: Any) -> BudgetDefinition:
    return parse_definition(
        amount=amount, **{"currency": "USD", "currencies": {"USD", "EUR"}, **changes}
    )


@pytest.mark.parametrize(
    "amount, kept",
    [
        ("250", "250"),
        ("0.000000000001", "0.000000000001"),
        ("1e2", "100"),
        ("12.500000000000000000", "12.5"),
        ("999999999.999999999999", "999999999.999999999999"),
        (" 5 ", "5"),
        ("1E-12", "0.000000000001"),
    ],
)
def test_an_amount_is_kept_to_the_picounit_in_plain_digits(amount: str, kept: str) -> None:
    assert terms(amount).amount == kept


@given(st.integers(1, 10**21 - 1))
def test_every_amount_of_picounits_survives(picos: int) -> None:
    text = f"{Decimal(picos).scaleb(-12):f}"
    assert terms(text).picos == picos


@pytest.mark.parametrize(
    "amount",
    [
        *("0", "-1", "-0", "NaN", "sNaN", "Infinity", "-Infinity", "1000000000", "1e999999"),
        *("1e-13", "0.0000000000001", "1e-999999", "", "ten", "1,5"),
        *("1_0", "\N{ARABIC-INDIC DIGIT FIVE}", "1" + "0" * 30, "0." + "0" * 31, "1e-999999999999"),
    ],
)
def test_an_amount_that_is_none_is_refused_by_name(amount: str) -> None:
    with pytest.raises(InvalidInput, match=r"^amount = ") as caught:
        terms(amount)
    assert (caught.value.status, caught.value.detail["parameter"]) == (400, "amount")


def test_a_currency_that_no_price_list_has_is_refused_with_those_that_there_are() -> None:
    assert terms(currency="EUR").currency == "EUR"
    with pytest.raises(InvalidInput, match=r"currency = 'BTC'.*EUR, USD"):
        terms(currency="BTC")


@pytest.mark.parametrize(
    "changes, parameter",
    [
        ({"period": "week"}, "period"),
        ({"function": "embed"}, "function"),
        ({"app": "no good"}, "app"),
        ({"app": "'; DROP TABLE budgets; --"}, "app"),
        ({"environment": "-main"}, "environment"),
        ({"app": "a", "function": "<script>"}, "function"),
        ({"alerts": [0]}, "alerts"),
        ({"alerts": [-50]}, "alerts"),
        ({"alerts": [1001]}, "alerts"),
        ({"alerts": [True]}, "alerts"),
        ({"alerts": list(range(1, 12))}, "alerts"),
    ],
)
def test_other_wrong_terms_are_refused_by_name(changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        terms(**changes)
    assert caught.value.detail["parameter"] == parameter


def test_alerts_are_put_in_order_and_named_once() -> None:
    assert terms(alerts=[100, 50, 100]).alerts == (50, 100)
    assert terms(alerts=[]).alerts == ()


def test_a_long_wrong_value_is_not_repeated_at_length() -> None:
    with pytest.raises(InvalidInput) as caught:
        terms("9" * 5000)
    assert len(str(caught.value)) < 200

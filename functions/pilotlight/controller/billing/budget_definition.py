"""The definition of a budget: its scope, period, amount and alerts, validated. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from pilotlight.controller.billing.budget_periods import KINDS, MONTH
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import ANY_CUSTOMER, require_customer, require_name
from pilotlight.spec.pricing import COST_QUANTUM, picos_text

DEFAULT_ALERTS = (50, 80, 100)
MAX_AMOUNT = 10**9
"""Units of a currency. Above any realistic spending, and far below the point where sums of
picounits need more than 128 bits."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")
MAX_ALERTS = 10
MAX_PERCENT = 1000
"""A budget that only warns may be exceeded many times over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetDefinition:
    """The definition of a budget; "" as `environment`, `app`, `function` or `customer` covers all.

    Attributes:
        customer: whose calls it covers; ANY_CUSTOMER: none, but each customer without an own one
            of the same reach, period and currency gets such a budget.
        period: `day` or `month` of the calendar in UTC.
        amount: a decimal string in plain digits.
        hard: calls are rejected when the amount is spent; otherwise the budget only warns.
        alerts: thresholds in percent of the amount, ascending.
        webhook: the URL that alerts are posted to; None = none.
    """

    environment: str = ""
    app: str = ""
    function: str = ""
    period: str = MONTH
    amount: str
    currency: str
    hard: bool = True
    alerts: tuple[int, ...] = DEFAULT_ALERTS
    webhook: str | None = None
    customer: str = ""

    @property
    def picos(self) -> int:
        """The amount in whole picounits."""
        return int(Decimal(self.amount) / COST_QUANTUM)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "alerts": list(self.alerts)}


def parse_definition(
    *,
    amount: str,
    currency: str,
    currencies: Collection[str],
    environment: str = "",
    app: str = "",
    function: str = "",
    period: str = MONTH,
    hard: bool = True,
    alerts: Sequence[int] = DEFAULT_ALERTS,
    webhook: str | None = None,
    customer: str = "",
) -> BudgetDefinition:
    """Validate a budget's definition; `webhook` is checked elsewhere. Raises InvalidInput with the
    key, the value and the limit."""
    if period not in KINDS:
        raise _wrong("period", period, f"must be {' or '.join(KINDS)}")
    for kind, name in (("environment", environment), ("app", app), ("function", function)):
        if name:
            require_name(kind, name)
    if customer not in ("", ANY_CUSTOMER):
        require_customer(customer)
    if function and not app:
        raise InvalidInput(f"function = {function!r}: also name its app", parameter="function")
    if currency not in currencies:
        raise _wrong(
            "currency",
            currency,
            f"there is no price list in this currency; use one of {', '.join(sorted(currencies))}",
        )
    return BudgetDefinition(
        environment=environment,
        app=app,
        function=function,
        period=period,
        amount=_amount(amount),
        currency=currency,
        hard=hard,
        alerts=_alerts(alerts),
        webhook=webhook,
        customer=customer,
    )


def parse_amount(text: str) -> int:
    """Parse an amount of money above 0 as picounits. Raises InvalidInput."""
    amount = parse_decimal(text)
    if not 0 < amount < MAX_AMOUNT:
        raise _wrong("amount", text, f"must be above 0 and below {MAX_AMOUNT}")
    if amount % COST_QUANTUM:
        raise _wrong("amount", text, "has more than 12 decimals")
    return int(amount / COST_QUANTUM)


def parse_decimal(text: str) -> Decimal:
    """Parse the number of an amount. `Decimal` also reads `1_0`, other scripts' digits, NaN, and
    millions of digits. Raises InvalidInput."""
    if not _NUMBER.fullmatch(text.strip()):
        raise _wrong("amount", text, "write a decimal number, like 25 or 0.05")
    return Decimal(text)


def _amount(text: str) -> str:
    plain = picos_text(parse_amount(text))
    return plain.rstrip("0").rstrip(".")


def _alerts(percents: Sequence[int]) -> tuple[int, ...]:
    if len(percents) > MAX_ALERTS:
        raise InvalidInput(
            f"alerts has {len(percents)} thresholds; the maximum is {MAX_ALERTS}",
            parameter="alerts",
        )
    for percent in percents:
        if isinstance(percent, bool) or not 1 <= percent <= MAX_PERCENT:
            raise _wrong("alerts", percent, f"must be whole percents between 1 and {MAX_PERCENT}")
    return tuple(sorted(set(percents)))


def _wrong(key: str, value: object, bound: str) -> InvalidInput:
    shown = repr(value)
    return InvalidInput(
        f"{key} = {shown if len(shown) <= 80 else shown[:77] + '…'}: {bound}", parameter=key
    )

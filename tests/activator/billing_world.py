"""A subject to bill, and what a journal on the disk says: shared by the tests of the money path."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from activator.billing import journal_format
from activator.billing.budgets import Budgets
from activator.billing.instance_account import BillingTerms, InstanceAccount
from activator.billing.journal import Journal
from activator.billing.segments import read_segment, segment_numbers
from activator.billing.usage_pricing import UsageSubject, UsageTemplate
from pilotlight.protocol import BudgetRecord
from pilotlight.spec.pricing import Footprint, Rates

RATES = Rates(
    version="test-1",
    cpu_core_s=Decimal("0.001"),
    memory_gib_s=Decimal("0.002"),
    request=Decimal("0.000001"),
    idle_factor=Decimal("0.5"),
)
FOOTPRINT = Footprint(cpu=2.0, memory_bytes=1024**3)
SECOND = 10**9


def subject(instance: str = "i-1") -> UsageSubject:
    return UsageSubject(
        tenant="t-1",
        environment="main",
        app="search",
        function="Embedder",
        function_id="f-1",
        revision="v1-abcdef",
        instance=instance,
    )


def template(instance: str = "i-1") -> UsageTemplate:
    return UsageTemplate(subject(instance), footprint=FOOTPRINT, rates=RATES)


def account(
    journal: Journal,
    instance: str = "i-1",
    *,
    free_ns: int = 60 * SECOND,
    budgets: Budgets | None = None,
    limit_s: float = 10.0,
) -> InstanceAccount:
    return InstanceAccount(
        journal,
        subject=subject(instance),
        terms=BillingTerms(
            footprint=FOOTPRINT, rates=RATES, free_ns=free_ns, limit_ns=int(limit_s * SECOND)
        ),
        started_ns=0,
        budgets=budgets,
    )


def budget(id: str = "b-1", *, amount: str = "1", period: str = "day", **more: Any) -> BudgetRecord:
    """A hard budget of the whole tenant."""
    scope = {
        "tenant": "t-1",
        "environment": "",
        "app": "",
        "function": "",
        "currency": "USD",
        "hard": True,
    }
    return BudgetRecord(id=id, amount=amount, period=period, **{**scope, **more})


def records_on_disk(directory: Path) -> list[dict[str, Any]]:
    """Every usage record in every segment, in order."""
    return [
        json.loads(journal_format.record_of(line.text))
        for number in segment_numbers(directory)
        for line in read_segment(directory, number)
        if line.text.startswith(journal_format.CLOSE_MARK)
    ]


class Wall:
    """A wall clock that moves by hand."""

    def __init__(self, now_ns: int = 1_000 * SECOND) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> int:
        self.now_ns += int(seconds * SECOND)
        return self.now_ns

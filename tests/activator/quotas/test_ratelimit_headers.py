"""Header lines that tell what is left: exact while little is left, a moment old while plenty is."""

from __future__ import annotations

import re

from activator.quotas.process_store import ProcessQuotas
from activator.quotas.ratelimit_headers import REUSED_S
from activator.quotas.rules import Rule
from pilotlight.spec.quotas import Quotas
from tests.fakes.clock import ManualClock


def left(lines: bytes) -> int:
    found = re.search(rb"\r\nratelimit: [^\r]*?r=(\d+)", lines)
    assert found is not None
    return int(found[1])


def after_each_of(calls: int, *, burst: int) -> list[int]:
    clock = ManualClock()
    quotas = Quotas(requests_per_s=1, burst=burst)
    rule = Rule(of="tenant", subject="t", quotas=quotas, tenant="t")
    check = ProcessQuotas(clock=clock).quota_check((rule,))
    assert check is not None
    found = []
    for _ in range(calls):
        assert check.try_acquire_nowait(1, 0, 0) is None
        found.append(left(check.head()))
    clock.advance(2 * REUSED_S)
    assert check.try_acquire_nowait(1, 0, 0) is None
    return [*found, left(check.head())]


def test_each_call_is_told_exactly_what_is_left_where_that_is_little() -> None:
    assert after_each_of(3, burst=900) == [899, 898, 897, 896]


def test_calls_of_a_moment_share_what_is_left_where_that_is_plenty() -> None:
    found = after_each_of(100, burst=10_000)

    assert found[0] == 9999
    assert found[-1] == 9899
    assert all(0 <= told - (9999 - n) <= 10 for n, told in enumerate(found[:-1]))
    assert len(set(found)) < 20

"""A hard budget under as many calls as come: how far beyond its amount the ledger is in the end,
and how much of it could be used.

Callers go on until all they hear is 402. What the ledger has then is compared with the amount.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from decimal import Decimal

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row
from benchmarks.load import flood

SOURCE = ROOT / "benchmarks" / "functions" / "worker.py"
APP, FUNCTION = "bench-spender", "work"
CONNECTIONS = 16
AMOUNT = Decimal("0.0001")
"""Some twelve seconds of half a core: a few hundred of the calls below, whose worst case
(`TIMEOUT_S`) is a twenty-fifth of it."""
WORK_MS = 20.0
TIMEOUT_S = 0.5
SPENT_S = 60.0
SHIPPED_S = 20.0


def overshoot(report: Report, platform: stack.Stack, *, name: str, instances: int) -> None:
    """Rows: what was spent of the budget, and what beyond it, in percent of its amount."""
    spender = platform.tenant(f"spender-{name.replace(' ', '-')}")
    spender.deploy(SOURCE, app=APP, timeout=TIMEOUT_S, min_instances=0, max_instances=instances)
    spender.invoke(APP, FUNCTION, {"milliseconds": 1.0})
    with spender.client as client:
        client.set_budget(str(AMOUNT), app=APP, period="day")
        answered = _spend(spender)
        spent = _settled(spender)
    note = f"{answered[200]} calls answered, {answered[429]} asked to wait, {answered[402]} refused"
    report.rows.append(
        Row.of(f"budget spent, {name}", "%", [float(100 * min(spent, AMOUNT) / AMOUNT)], note=note)
    )
    report.rows.append(
        Row.of(
            f"budget overshoot, {name}",
            "%",
            [float(100 * max(Decimal(0), spent - AMOUNT) / AMOUNT)],
        )
    )


def _spend(spender: stack.Stack) -> Counter[int]:
    """Call until a call alone is answered 402."""
    url, body = spender.invoke_url(APP, FUNCTION), json.dumps({"milliseconds": WORK_MS})
    deadline = time.monotonic() + SPENT_S
    with flood(
        url, body=body, headers=spender.headers, per_s=None, connections=CONNECTIONS
    ) as statuses:
        while _alone(spender, body) != 402:
            if time.monotonic() > deadline:
                raise stack.StackFailed(f"a budget of {AMOUNT} was not spent in {SPENT_S:g} s")
            time.sleep(0.5)
        return statuses()


def _alone(spender: stack.Stack, body: str) -> int:
    path = f"/v1/functions/{APP}/{FUNCTION}:invoke"
    return stack.post(
        spender.url.removeprefix("http://"), path, body.encode(), spender.headers
    ).status


def _settled(spender: stack.Stack) -> Decimal:
    """What the ledger has once nothing more comes."""
    deadline = time.monotonic() + SHIPPED_S
    spent, again = Decimal(-1), Decimal(0)
    with spender.client as client:
        while spent != again and time.monotonic() < deadline:
            spent = again
            time.sleep(2.0)
            (budget,) = client.budgets()
            again = Decimal(budget["spent"])
    return again

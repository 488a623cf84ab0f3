"""Tenants beside each other: what one that floods, or one that streams all day, costs those who do
nothing wrong.

Both parts take turns: a while alone, a while beside the other, several times, so that a drifting
machine favours neither. The percentiles are those of all calls of an arm together; each round's own
ratio gives the interval."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, interleave, paired_ratio, percentile, progress
from benchmarks.load import Request, flood, steady
from pilotlight.client.client import Client
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import from_json

FUNCTIONS = ROOT / "benchmarks" / "functions"
QUOTA_PER_S = 100
FLOOD = 20
"""Times its quota."""
FLOOD_CONNECTIONS = 16
WORK_MS = 10.0
VICTIM_PER_S = 25.0
"""A quarter of what one instance does: 25 calls of 10 ms."""
STREAMS = 32
"""Callers of the streaming function, which takes half as many at once."""
STREAM_ITEMS, STREAM_PAUSE_MS = 200, 10.0
"""Two seconds, a hundred words a second: a language model's pace."""
SMALL_PER_S = 100.0
COSTLY_ROWS = 250_000
"""A check of a tenth of a second, in a body of 1.5 MB."""
COSTLY_CONNECTIONS = 8
SETTLE_S = 1.0


def flooded(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """A tenant sends 20 times of what its quota lets in; another one's ten milliseconds of work are
    timed."""
    quiet = platform.tenant("quiet")
    quiet.deploy(FUNCTIONS / "worker.py")
    loud = platform.tenant("loud", requests_per_s=QUOTA_PER_S, burst=QUOTA_PER_S)
    loud.deploy(FUNCTIONS / "echo.py", app="bench-loud")
    body = json.dumps({"milliseconds": WORK_MS})
    quiet.invoke("bench-worker", "work", {"milliseconds": WORK_MS})
    loud.invoke("bench-loud", "echo", {"text": "ready"})
    answered: Counter[int] = Counter()

    def alone() -> list[Request]:
        url = quiet.invoke_url("bench-worker", "work")
        return _driven(url, quiet, body=body, per_s=VICTIM_PER_S, seconds=seconds)

    def beside() -> list[Request]:
        url = loud.invoke_url("bench-loud", "echo")
        with flood(
            url,
            body='{"text":"hi"}',
            headers=loud.headers,
            per_s=FLOOD * QUOTA_PER_S,
            connections=FLOOD_CONNECTIONS,
        ) as statuses:
            time.sleep(SETTLE_S)  # the burst is over, the refusals have begun
            requests = alone()
            answered.update(statuses())
        return requests

    runs = interleave({"alone": alone, "beside": beside}, rounds=rounds)
    total = answered.total()
    note = (
        f"{total:,} requests: {answered[200]:,} let in, {answered[429]:,} refused with 429, "
        f"{total - answered[200] - answered[429]:,} else"
    )
    write(
        report,
        "10 ms of work",
        *runs.values(),
        beside="a flood",
        key="victim_p99_flooded_over_alone",
        note=note,
    )


def checked(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """A tenant sends arguments that are costly to check, over and over; another one's ten
    milliseconds of work are timed.

    The same arguments to a function that says nothing of them, so that nothing is checked, tell
    what the bodies themselves cost."""
    quiet = platform.tenant("unhurried")
    quiet.deploy(FUNCTIONS / "worker.py", app="bench-beside-checks")
    loud = platform.tenant("costly")
    body = json.dumps({"milliseconds": WORK_MS})
    costly = json.dumps({"rows": [[1]] * COSTLY_ROWS})
    quiet.invoke("bench-beside-checks", "work", {"milliseconds": WORK_MS})
    answered: Counter[int] = Counter()
    for app, source in (("bench-rows", "rows.py"), ("bench-anything", "anything.py")):
        loud.deploy(FUNCTIONS / source)
        loud.invoke(app, "count", {"rows": [[1]]})

    def alone() -> list[Request]:
        return _driven(
            quiet.invoke_url("bench-beside-checks", "work"),
            quiet,
            body=body,
            per_s=VICTIM_PER_S,
            seconds=seconds,
        )

    def beside(app: str) -> list[Request]:
        url = loud.invoke_url(app, "count")
        with flood(
            url, body=costly, headers=loud.headers, per_s=None, connections=COSTLY_CONNECTIONS
        ) as statuses:
            time.sleep(SETTLE_S)
            requests = alone()
            answered.update(statuses())
        return requests

    arms = {
        "alone": alone,
        "unchecked": lambda: beside("bench-anything"),
        "checked": lambda: beside("bench-rows"),
    }
    runs = interleave(arms, rounds=rounds)
    report.rows.append(
        Row.of("10 ms of work, before large arguments", "ms", _all_ms(runs["alone"]))
    )
    name = "10 ms of work beside large arguments"
    note = (
        f"{answered.total()} large calls: "
        f"{', '.join(f'{n} with {status}' for status, n in sorted(answered.items()))}"
    )
    key = "victim_p99_checked_over_unchecked"
    write(
        report,
        name,
        runs["unchecked"],
        runs["checked"],
        beside="their checks",
        key=key,
        note=note,
        without="unchecked",
    )


def streaming(
    report: Report, platform: stack.Stack, *, small: int, seconds: float, rounds: int
) -> None:
    """A tenant's streaming function has all its places taken and a queue; another one's `small`
    functions are timed."""
    heavy = platform.tenant("heavy")
    heavy.deploy(FUNCTIONS / "tokens.py")
    many = platform.tenant("many")
    urls = _small_functions(many, small)
    body = json.dumps({"items": STREAM_ITEMS, "pause_ms": STREAM_PAUSE_MS})
    answered: Counter[int] = Counter()

    def alone() -> list[Request]:
        return _driven(urls, many, body='{"text":"hi"}', per_s=SMALL_PER_S, seconds=seconds)

    def beside() -> list[Request]:
        headers = {**heavy.headers, "Accept": "text/event-stream"}
        url = heavy.invoke_url("bench-tokens", "speak")
        with flood(url, body=body, headers=headers, per_s=None, connections=STREAMS) as statuses:
            time.sleep(SETTLE_S)
            requests = alone()
            answered.update(statuses())
        return requests

    runs = interleave({"alone": alone, "beside": beside}, rounds=rounds)
    note = f"{answered[200]} streams ended"
    key = "small_p99_beside_stream_over_alone"
    write(
        report,
        f"{small} small functions",
        *runs.values(),
        beside="saturated streams",
        key=key,
        note=note,
    )


def _small_functions(tenant: stack.Stack, count: int) -> list[str]:
    """Functions of one tenant, each with an instance of its own that stays; where they are
    called."""
    tenant.deploy(FUNCTIONS / "echo.py", app="bench-small", min_instances=0)
    with tenant.client as client:
        spec = _deployed_spec(client, "bench-small", "echo")
        names = [f"f{i}" for i in range(count)]
        client.deploy("bench-many", [replace(spec, name=name) for name in names])
    for i, name in enumerate(names):
        tenant.invoke("bench-many", name, {"text": "ready"})
        progress(f"start {i + 1}/{count}")
    return [tenant.invoke_url("bench-many", name) for name in names]


def _deployed_spec(client: Client, app: str, function: str) -> FunctionSpec:
    document = next(f["spec"] for f in client.app(app)["functions"] if f["name"] == function)
    spec = from_json(FunctionSpec, document)
    resources = replace(spec.resources, cpu=0.05, memory_bytes=64 * 1024**2)
    return replace(
        spec,
        resources=resources,
        scaling=Scaling(max_inputs=16, max_instances=1, scaledown_window_s=3600.0),
    )


def _driven(
    url: str | list[str], tenant: stack.Stack, *, body: str, per_s: float, seconds: float
) -> list[Request]:
    # One connection keeps calls from queueing behind each other in bursts of their own making; a
    # hundred a second need a few.
    connections = max(1, int(per_s // 25))
    with steady(
        url, body=body, headers=tenant.headers, per_s=per_s, connections=connections
    ) as requests:
        time.sleep(seconds)
        found = requests()
    time.sleep(SETTLE_S)  # the last usage records are not shipped in the other arm's time
    return found


def write(
    report: Report,
    name: str,
    alone: list[list[Request]],
    beside_runs: list[list[Request]],
    *,
    beside: str,
    key: str,
    note: str,
    without: str = "alone",
) -> None:
    """Rows of both arms, and the ratio of the p99 of all calls. Its interval is that of the rounds'
    own ratios, whose p99 are rougher."""
    report.rows.append(Row.of(f"{name}, {without}", "ms", _all_ms(alone)))
    report.rows.append(Row.of(f"{name}, beside {beside}", "ms", _all_ms(beside_runs), note=note))
    report.ratio(key, percentile(_all_ms(beside_runs), 99) / percentile(_all_ms(alone), 99))
    rounds = paired_ratio([_p99(run) for run in beside_runs], [_p99(run) for run in alone])
    report.remarks.append(f"{key}: of single rounds {rounds}")


def _all_ms(runs: list[list[Request]]) -> list[float]:
    return [request.milliseconds for run in runs for request in run]


def _p99(run: list[Request]) -> float:
    return percentile([request.milliseconds for request in run], 99)

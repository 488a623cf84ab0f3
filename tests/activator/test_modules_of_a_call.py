"""How many modules of the activator one call passes: a reader has to know as many.

Each module that a call passes has a reason below; a call that passes another one fails the test. A
call from zero passes the start of an instance, which is most of its modules, and what a warm call
has cached."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.activator.conftest import KEY, Edge
from tests.fakes.routes import route_of, spec_of

ACTIVATOR = str(Path(__file__).parents[2] / "activator") + "/"
BESIDE = {
    "agent events",
    "books",
    "budget states",
    "journal",
    "journal-heartbeat",
    "journal-sync",
    "slow heads",
    "usage shipping",
}
"""Names of the tasks that run all the time, beside calls."""
WARM = {
    "http/server.py": "parses the request and writes the response",
    "gateway/route_cache.py": "route and caller by path and key, with what is precomputed of them",
    "gateway/fast_path.py": "the order of the steps",
    "arguments/validator.py": "JSON Schema of the arguments",
    "autoscaler/autoscaler_loop.py": "the throttler of the revision, by its key",
    "balancing/throttler.py": "takes and returns a slot, of the least loaded instance",
    "balancing/instance.py": "the reservation of a slot",
    "calls/call.py": "what is known of the call",
    "calls/response.py": "the headers of the answer, which differ between calls",
    "calls/attempt.py": "its record, slot, deadline and connection, and their end",
    "worker_client/connection.py": "HTTP to the worker",
    "billing/instance_account.py": "its record, budget and meter together, once each",
    "billing/instance_meter.py": "pure: time of an instance, shared by its concurrent calls",
    "billing/usage_pricing.py": "pure: the price of a record",
    "billing/journal.py": "which attempts are open, and where their lines are",
    "billing/journal_format.py": "pure: a line of the journal",
    "billing/segment_log.py": "writes lines, and keeps those that the disk does not accept",
    "metrics/call_counters.py": "plain numbers, which Prometheus and the controller read later",
}
FROM_ZERO = {
    "http": (4, "server; ASGI: request, payloads, memory of bodies"),
    "gateway": (
        6,
        "ASGI and the API of the path, API of functions, cache of routes, pipeline, response, socket",
    ),
    "access": (2, "who calls which function, and the grant, which is cached"),
    "routing": (6, "tables of routes, functions, keys and tenants, and the traffic split"),
    "arguments": (2, "the check, and where it is done"),
    "quotas": (1, "admission, here of nothing that is counted"),
    "calls": (6, "call, attempt and its end, runner, the response, the trace"),
    "resilience": (1, "retries that the function declares, and their budget"),
    "balancing": (
        8,
        "the queue, the start, its expected time, and the lists in which an instance is kept",
    ),
    "fairness": (5, "whose start is first, by quota and by memory of the node"),
    "autoscaler": (2, "the throttler of the revision, and its place in the autoscaler"),
    "worker_client": (2, "address, connection"),
    "billing": (10, "budgets, those of a function, the records of start and call, and the journal"),
    "metrics": (2, "counters"),
    "call_stats": (1, "the same for the controller"),
    "tracing": (2, "the trace of a cold call is kept"),
}
"""Most modules of each folder, and what they are for."""


TRIES = 20
"""Warm calls, of which one must pass few modules: on a busy machine a call reaches its worker after
`observer.AT_ONCE_MS`, and is counted stage by stage."""


@contextmanager
def modules_passed() -> Iterator[dict[str, int]]:
    """Modules of the activator in which code runs meanwhile, and their number of calls.

    A module counts when a function that is written in it runs, methods and comprehensions included.
    One of which a call reads only constants, or makes only records whose constructor is generated,
    does not count."""
    passed: dict[str, int] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ACTIVATOR):
            task = asyncio.current_task()
            if task is None or task.get_name() not in BESIDE:
                module = name.removeprefix(ACTIVATOR)
                passed[module] = passed.get(module, 0) + 1

    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("kind", ["warm", "from zero"])
async def test_a_call_passes_few_modules(
    edge: Edge, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edge.add(route_of(spec_of()))
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    url = f"{edge.url}/v1/functions/shop/hello:invoke"
    if kind == "warm":
        for _ in range(2):
            assert (await edge.client.post(url, headers=headers, content=b'{"x":1}')).is_success
    for _ in range(TRIES if kind == "warm" else 1):
        with modules_passed() as passed:
            assert (await edge.client.post(url, headers=headers, content=b'{"x":1}')).is_success
        if passed.keys() <= WARM.keys():
            break
    with capsys.disabled():
        print(f"\n{kind}: {len(passed)} modules: {', '.join(sorted(passed))}")
    if kind == "warm":
        assert passed.keys() <= WARM.keys()
        return
    folders = Counter(module.partition("/")[0] for module in passed)
    assert folders <= Counter({folder: most for folder, (most, _) in FROM_ZERO.items()})

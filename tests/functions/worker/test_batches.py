"""Batched methods of a forked instance, through the real worker: what callers get, what the body
sees, what is told of it."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator, Iterator

import cloudpickle
import httpx
import pytest

from pilotlight.protocol import (
    ARGUMENTS_PREFIX,
    HEADER_BATCH,
    HEADER_CALL,
    HEADER_DEADLINE,
    HEADER_PRIORITY,
    HEADER_SPANS,
)
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.policies import BatchPolicy
from tests.fakes.fake_shim import (
    PICKLED,
    FakeInstance,
    FakeShim,
    function_spec,
    read_until,
    wait_for_running,
)
from tests.fakes.plain_http import NO_TLS

CODE = """
import asyncio, dataclasses, datetime, threading, time
import pilotlight

@dataclasses.dataclass
class Passenger:
    age: int
    born: datetime.date

class Service:
    def __init__(self):
        self.gate = threading.Event()

    def double(self, numbers: list[int], plus: list[int] = 0) -> list[int]:
        print("doubling", len(numbers))
        with pilotlight.span("inner", count=len(numbers)):
            return [n * 2 + p if n >= 0 else ValueError(f"not {n}") for n, p in zip(numbers, plus)]

    async def members(self, xs: list[int]) -> list[list]:
        here = pilotlight.context()
        return [[here.call_id, list(here.members), here.attempt, here.traceparent] for _ in xs]

    def picky(self, xs: list[int]) -> list[int]:
        print("given", sorted(xs))
        if 13 in xs:
            raise LookupError("unlucky")
        return xs

    def older(self, passengers: list[Passenger]) -> list[Passenger]:
        return [dataclasses.replace(p, age=p.age + 1) for p in passengers]

    def short(self, xs: list[int]) -> list[int]:
        return xs[1:]

    def stuck(self, xs: list[int]) -> list[int]:
        print("stuck")
        while not self.gate.is_set():
            time.sleep(0.001)
        return xs

    async def open_gate(self):
        self.gate.set()
"""
SLOTS = 4
"""In a batch: when so many have come it goes, without a clock."""
POLICY = BatchPolicy(max_batch_size=SLOTS, wait_ms=60_000, adaptive=False)
PROMPT = BatchPolicy(max_batch_size=SLOTS, wait_ms=0)
BATCHED = {
    "double": POLICY,
    "members": POLICY,
    "picky": POLICY,
    "older": POLICY,
    "short": POLICY,
    "stuck": PROMPT,
}
CALLS = [f"req-{n:032x}" for n in range(SLOTS)]


@pytest.fixture(scope="module")
def shim() -> Iterator[FakeShim]:
    methods = [
        MethodSpec(name=name, batch=policy, example=[3] if name == "double" else None)
        for name, policy in BATCHED.items()
    ]
    methods.append(MethodSpec(name="open_gate"))
    spec = function_spec(
        qualname="Service", kind=FunctionKind.CLASS, methods=methods, max_inputs=2 * SLOTS
    )
    with FakeShim({"app.py": CODE}, spec) as shim:
        yield shim


@pytest.fixture(name="instance")
def _instance(shim: FakeShim, request: pytest.FixtureRequest) -> FakeInstance:
    return shim.start(f"i-{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture(name="client")
async def _client(instance: FakeInstance) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=instance.path)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=60, verify=NO_TLS
    ) as client:
        yield client


async def together(
    client: httpx.AsyncClient, method: str, *arguments: object, **headers: str
) -> list[httpx.Response]:
    """Calls that go as one batch."""
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    calls = [
        client.post(f"/invoke/{method}", json=one, headers={HEADER_CALL: CALLS[n], **more})
        for n, one in enumerate(arguments)
    ]
    return await asyncio.gather(*calls)


def told(response: httpx.Response) -> dict[str, str]:
    return dict(part.split("=") for part in response.headers[HEADER_BATCH].split(";"))


def read_lines(descriptor: int, count: int) -> list[str]:
    """So many whole lines, in whichever order they come."""
    data = b""
    while data.count(b"\n") < count:
        data += read_until(descriptor)
    return data.decode().removesuffix("\n").split("\n")


async def test_single_calls_in_one_body_over_lists_and_single_answers(
    client: httpx.AsyncClient, instance: FakeInstance
) -> None:
    answers = await together(client, "double", [1], {"numbers": 2, "plus": 5}, [3], [-4])

    assert [answer.status_code for answer in answers] == [200, 200, 200, 500]
    assert [answer.json() for answer in answers[:3]] == [2, 9, 6]
    assert answers[3].json()["error"] == {"type": "ValueError", "message": "not -4"}
    assert [told(answer)["size"] for answer in answers] == ["4"] * 4
    assert {told(answer)["reason"] for answer in answers} == {"full"}
    assert sorted(told(answer)["first"] for answer in answers) == ["0", "0", "0", "1"]
    out, error = read_until(instance.stdout).decode(), read_until(instance.stderr).decode()
    mark, _, text = out.removeprefix("\x1e").partition("\x1f")
    assert (sorted(mark.split(",")), text) == (CALLS, "doubling 4\n"), (
        "a line of the batch belongs to all of its calls"
    )
    assert error == (
        f"\x1e{CALLS[3]}\x1fValueError: not -4\n\x1e{CALLS[3]}\x1f{ARGUMENTS_PREFIX}numbers: int\n"
    ), "and an error to whose it is"


async def test_the_sdk_gets_values_and_errors_of_its_own_kind(client: httpx.AsyncClient) -> None:
    async def call(*args: object) -> object:
        answer = await client.post(
            "/invoke/double", content=cloudpickle.dumps((args, {})), headers=PICKLED
        )
        return pickle.loads(answer.content)

    first, *_, last = await asyncio.gather(call(1), call(2), call(3), call(-4))

    assert first == 2
    assert isinstance(last, ValueError)


async def test_the_body_knows_whose_calls_it_computes(client: httpx.AsyncClient) -> None:
    answers = await together(client, "members", [1], [2], [3], [4], pilotlight_attempt="2")

    call_id, members, attempt, traceparent = answers[0].json()
    assert sorted(members) == CALLS
    assert (call_id, attempt) == (members[0], 2)
    assert traceparent.startswith("00-")


async def test_every_call_gets_the_batchs_spans_under_ids_of_its_own(
    client: httpx.AsyncClient,
) -> None:
    traces = [f"{n + 1:032x}" for n in range(SLOTS)]
    answers = await asyncio.gather(
        *(
            client.post(
                "/invoke/double",
                json=[n],
                headers={HEADER_CALL: CALLS[n], "traceparent": f"00-{traces[n]}-{n + 1:016x}-01"},
            )
            for n in range(SLOTS)
        )
    )

    spans = [
        json.loads(base64.b64decode(answer.headers[HEADER_SPANS]))["spans"] for answer in answers
    ]
    assert [[row[2] for row in rows] for rows in spans] == [["batch", "inner"]] * SLOTS
    assert len({row[0] for rows in spans for row in rows}) == 2 * SLOTS
    for batch, inner in spans:
        assert (batch[1], inner[1]) == ("", batch[0]), "one below the other"
        assert batch[6]["size"] == SLOTS
        assert batch[6]["reason"] == "full"
        assert CALLS[0] in batch[6]["members"]
        assert inner[6] == {"count": SLOTS}


async def test_when_the_body_raises_only_the_guilty_call_fails(
    client: httpx.AsyncClient, instance: FakeInstance
) -> None:
    answers = await together(client, "picky", [11], [12], [13], [14])

    assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
    assert answers[2].json()["detail"] == "LookupError: unlucky"
    assert [told(answer)["reason"] for answer in answers] == ["retried"] * 4
    lines = read_lines(instance.stdout, 1 + SLOTS)
    assert lines[0].endswith("given [11, 12, 13, 14]")
    assert f"\x1e{CALLS[2]}\x1fgiven [13]" in lines[1:], "alone it is itself again"


async def test_items_are_made_what_the_lists_annotation_says(client: httpx.AsyncClient) -> None:
    answers = await together(
        client, "older", *([{"age": n, "born": "2000-01-02"}] for n in range(SLOTS))
    )

    assert [answer.json() for answer in answers] == [
        {"age": n + 1, "born": "2000-01-02"} for n in range(SLOTS)
    ]


async def test_arguments_that_do_not_fit_join_no_batch(client: httpx.AsyncClient) -> None:
    answer = await client.post("/invoke/older", json=[{"age": 1}])
    assert answer.status_code == 400
    assert "passengers" in answer.json()["detail"]


async def test_too_few_results_are_everybodys_error_and_name_both_numbers(
    client: httpx.AsyncClient,
) -> None:
    answers = await together(client, "short", [1], [2], [3], [4])

    for answer in answers:
        assert answer.status_code == 500
        assert answer.json()["type"].endswith("/batch-results")
        assert "short returned 3 results for a batch of 4 items" in answer.json()["detail"]


async def test_priorities_are_batches_of_their_own(client: httpx.AsyncClient) -> None:
    urgent = together(
        client, "members", *([n] for n in range(SLOTS)), **{HEADER_PRIORITY: "realtime"}
    )
    usual = [
        client.post("/invoke/members", json=[n], headers={HEADER_CALL: f"req-usual-{n}"})
        for n in range(SLOTS)
    ]

    first, others = await asyncio.gather(urgent, asyncio.gather(*usual))

    assert all(sorted(answer.json()[1]) == CALLS for answer in first)
    assert all(
        sorted(answer.json()[1]) == [f"req-usual-{n}" for n in range(SLOTS)] for answer in others
    )


async def test_a_call_out_of_time_is_answered_and_its_stuck_body_interrupted(
    client: httpx.AsyncClient, instance: FakeInstance
) -> None:
    answer = await client.post("/invoke/stuck", json=[1], headers={HEADER_DEADLINE: "0.2"})

    assert answer.status_code == 504
    await wait_for_running(client, 0)
    assert (await client.post("/invoke/open_gate", json=[])).status_code == 200


async def test_a_caller_that_leaves_takes_nobody_with_it(
    client: httpx.AsyncClient, instance: FakeInstance
) -> None:
    leaving = asyncio.create_task(
        client.post("/invoke/stuck", json=[1], headers={HEADER_CALL: CALLS[0]})
    )
    await asyncio.to_thread(read_until, instance.stdout)
    waiting = asyncio.create_task(
        client.post("/invoke/stuck", json=[2], headers={HEADER_CALL: CALLS[1]})
    )
    await wait_for_running(client, 2)
    leaving.cancel()
    await asyncio.wait([leaving])
    line = await asyncio.to_thread(read_until, instance.stdout)

    assert line.decode().startswith(f"\x1e{CALLS[1]}\x1f"), (
        "the next batch runs, as the one that all have left was stopped"
    )
    await client.post("/invoke/open_gate", json=[])
    assert (await waiting).json() == 2

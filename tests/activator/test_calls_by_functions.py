"""Functions that call functions: what an instance may ask for at its own socket, and what the
platform adds to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.balancing.instance import Instance
from activator.calls.attempt import Attempt
from activator.gateway import instance_sockets
from activator.gateway.calls_by_functions import HANDLING_S, limited_s
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.core.tracing.trace_context import trace_id_for_call
from pilotlight.core.transport.calls_socket import CALLS_DIRECTORY
from pilotlight.protocol import HEADER_PARENT
from pilotlight.spec.function import Clocks
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Fallback
from snapshotter.errors import StartFailed
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.routes import TENANT, route_of, spec_of

MANY = Scaling(max_inputs=8)


class Running:
    """A call in which user code runs; it calls others by its instance's socket."""

    def __init__(self, edge: Edge, request: WorkerRequest) -> None:
        self.edge = edge
        self.id = request.headers["pilotlight-call"]
        self.arguments = json.loads(request.body or b"null")
        self.headers = request.headers
        self.instance = next(
            instance
            for throttler in edge.scaler.throttlers()
            for instance in throttler.instances.values()
            if self.id in instance.running
        )

    async def ask(self, path: str, *, method: str = "POST", **more: Any) -> httpx.Response:
        """A request at the socket of its instance."""
        return await ask(self.edge, self.instance, path, method=method, **more)

    async def call(self, function: str, *, verb: str = "invoke", **more: Any) -> httpx.Response:
        """Call a function, as the SDK does."""
        more.setdefault("json", {"x": 1})
        headers = {HEADER_PARENT: self.id, **more.pop("headers", {})}
        return await self.ask(f"/v1/functions/{function}:{verb}", headers=headers, **more)


Code = Callable[[Running], Awaitable[Any]]


async def ask(edge: Edge, instance: Instance, path: str, **more: Any) -> httpx.Response:
    """A request at the socket of an instance."""
    uds = str(edge.directory / CALLS_DIRECTORY / f"{instance.id}.sock")
    transport = httpx.AsyncHTTPTransport(uds=uds, verify=NO_TLS)
    async with httpx.AsyncClient(transport=transport, timeout=30) as client:
        return await client.request(more.pop("method", "POST"), f"http://platform{path}", **more)


def place(edge: Edge, name: str, code: Code, **spec: Any) -> list[Running]:
    """Deploy a function with this code; the calls that it gets."""
    (edge.directory / CALLS_DIRECTORY).mkdir(exist_ok=True)
    got: list[Running] = []

    async def behave(request: WorkerRequest) -> WorkerAnswer:
        got.append(Running(edge, request))
        return WorkerAnswer(body=json.dumps(await code(got[-1])).encode())

    edge.fleet.behaviours[name] = behave
    edge.add(route_of(spec_of(name, **spec)))
    return got


def calls(function: str, **more: Any) -> Code:
    """Code that calls a function, and answers with status and body of what it got."""

    async def code(running: Running) -> Any:
        answer = await running.call(function, **more)
        return [answer.status_code, answer.json()]

    return code


async def arguments(running: Running) -> Any:
    """Code that answers with its arguments."""
    return running.arguments


async def called(edge: Edge, function: str = "outer", **more: Any) -> Any:
    """What the function answers to a caller outside."""
    answer = await edge.call(f"shop/{function}:invoke", json={"x": 1}, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_call_of_a_function_is_served_and_its_record_names_the_attempt_that_made_it(
    edge: Edge,
) -> None:
    place(edge, "outer", calls("shop/inner"))
    got = place(edge, "inner", arguments)
    answer = await edge.call("shop/outer:invoke", json={"x": 1})
    assert answer.json() == [200, {"x": 1}]

    outer = answer.headers["x-request-id"]
    records = {record.function: record for record in (await edge.settle()).values()}
    assert records["inner"].parent == f"{outer}/1" == records["outer"].id
    assert records["inner"].key == f"function:{TENANT}/main/shop/outer"
    assert records["outer"].parent == ""
    assert got[0].headers["traceparent"].split("-")[1] == trace_id_for_call(outer)
    left_s = float(got[0].headers["pilotlight-deadline-s"])
    assert 0 < left_s < Clocks().execution_s, "what its caller has left, less the time to handle it"


@pytest.mark.parametrize(
    "method, path, says",
    [
        ("POST", "/t/other/v1/functions/shop/inner:invoke", "functions of its own tenant"),
        ("POST", "/v1/functions/shop/inner:warmup", "only call functions"),
        ("GET", "/v1/functions", "only call functions"),
        ("POST", "/v1/apps/shop/deploy", "only call functions"),
        ("GET", "/internal/feed", "only call functions"),
        ("GET", "/fn/shop/inner", "only call functions"),
        ("GET", "/v1/calls", "only call functions"),
        ("PUT", "/v1/calls/mine", "only call functions"),
        ("POST", "/v1/calls/req-1:redrive", "only call functions"),
        ("GET", "/v1/calls/..%2F..%2Finternal%2Ffeed", "only call functions"),
        ("GET", "/healthz", "only call functions"),
    ],
)
async def test_only_the_call_api_is_served(edge: Edge, method: str, path: str, says: str) -> None:
    async def code(running: Running) -> Any:
        answer = await running.ask(path, method=method, headers={"authorization": "Bearer pl_test"})
        return [answer.status_code, answer.json()["detail"]]

    place(edge, "outer", code)
    place(edge, "inner", arguments)
    status, detail = await called(edge)
    assert status == 403
    assert says in detail
    assert "API key" in detail


@pytest.mark.parametrize("more", [{"tenant": "t-000000000002"}, {"environment": "staging"}])
async def test_a_function_of_another_tenant_or_environment_is_not_found(
    edge: Edge, more: dict[str, str]
) -> None:
    place(edge, "outer", calls("shop/inner"))
    edge.add(route_of(spec_of("inner", access=("*",)), **more))
    status, problem = await called(edge)
    assert (status, problem["type"].rpartition("/")[2]) == (404, "not-found")


async def test_another_environment_cannot_be_named(edge: Edge) -> None:
    place(edge, "outer", calls("shop/inner", headers={"pilotlight-environment": "staging"}))
    edge.add(route_of(spec_of("inner"), environment="staging"))
    status, problem = await called(edge)
    assert (status, "own environment" in problem["detail"]) == (403, True)


async def test_a_function_has_the_terms_of_its_tenant_and_not_those_of_a_key(edge: Edge) -> None:
    edge.add_tenant("one", requests_per_s=0.001, burst=2)
    place(edge, "outer", calls("shop/inner"))
    place(edge, "inner", arguments)
    assert await called(edge) == [200, {"x": 1}]
    assert (await edge.call("shop/outer:invoke", json={"x": 1})).status_code == 429


class TestDepth:
    """Functions that call each other without end."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(max_call_depth=3)

    @pytest.mark.parametrize("forged", ["", "x-forwarded-for", "pilotlight-calling-function"])
    async def test_a_chain_ends_at_its_limit_with_an_error_that_names_it(
        self, edge: Edge, forged: str
    ) -> None:
        headers = {forged: "[]"} if forged else {}
        place(edge, "a", calls("shop/b", headers=headers), scaling=MANY)
        place(edge, "b", calls("shop/a", headers=headers), scaling=MANY)
        answer = await called(edge, "a")
        for _ in range(3):
            status, answer = answer
            assert status == 200
        status, problem = answer
        assert status == 400
        chain = "shop/a → shop/b → shop/a → shop/b → shop/a"
        assert f"call depth 3 reached: {chain}" in problem["detail"]
        assert "activator.max_call_depth" in problem["detail"]

    async def test_submitted_calls_count_as_well(
        self, edge: Edge, controller: FakeController, shipping: object
    ) -> None:
        refused: list[str] = []

        async def again(running: Running) -> None:
            answer = await running.call("shop/again", verb="submit")
            if answer.status_code != 202:
                refused.append(answer.json()["detail"])

        got = place(edge, "again", again)
        await called(edge, "again")
        await until(lambda: refused)
        assert len(got) == 4
        assert "call depth 3 reached" in refused[0]


async def test_of_several_running_calls_the_one_that_calls_must_be_named(edge: Edge) -> None:
    release = asyncio.Event()

    async def code(running: Running) -> Any:
        if running.arguments["x"] == 1:
            await release.wait()
            return None
        unnamed = await running.ask("/v1/functions/shop/inner:invoke", json={"x": 5})
        named = await running.call("shop/inner", json={"x": 6})
        strange = await running.call(
            "shop/inner", json={"x": 7}, headers={HEADER_PARENT: "req-of-another-instance"}
        )
        return [(a.status_code, a.json()) for a in (unnamed, named, strange)]

    got = place(edge, "outer", code, scaling=MANY)
    place(edge, "inner", arguments)
    first = asyncio.create_task(edge.call("shop/outer:invoke", json={"x": 1}))
    await until(lambda: got)
    answer = await edge.call("shop/outer:invoke", json={"x": 2})
    (unnamed, why), named, (strange, where) = answer.json()
    release.set()
    await first
    assert (unnamed, "2 calls run" in why["detail"], HEADER_PARENT in why["detail"]) == (
        400,
        True,
        True,
    )
    assert named == [200, {"x": 6}]
    assert (strange, "does not run on instance" in where["detail"]) == (403, True)


async def test_without_a_running_call_an_instance_calls_nothing(edge: Edge) -> None:
    place(edge, "outer", arguments)
    place(edge, "inner", arguments)
    await called(edge)
    (instance,) = edge.scaler.throttlers()[0].instances.values()
    answer = await ask(edge, instance, "/v1/functions/shop/inner:invoke", json={"x": 1})
    assert (answer.status_code, "between calls" in answer.json()["detail"]) == (403, True)


async def test_the_deadline_is_what_the_caller_has_left(edge: Edge) -> None:
    place(edge, "outer", calls("shop/inner", headers={"pilotlight-timeout": "3600"}))
    got = place(edge, "inner", arguments)
    assert await called(edge, headers={"pilotlight-timeout": "8"}) == [200, {"x": 1}]
    left_s = float(got[0].headers["pilotlight-deadline-s"])
    assert 0 < left_s <= 8 - HANDLING_S, "and its caller has time to handle its end"


@pytest.mark.parametrize(
    "asked, left, given", [(None, 10, 9.5), (3, 10, 3), (3600, 2, 1.8), (None, 0.1, 0.09)]
)
def test_a_function_keeps_a_part_of_the_time_that_it_has_left(
    asked: float | None, left: float, given: float
) -> None:
    assert limited_s(asked, left) == pytest.approx(given)
    with pytest.raises(errors.DeadlineExceeded, match="no time left"):
        limited_s(asked, 0)


async def test_a_function_that_waits_for_its_own_only_slot_ends_with_its_queue_time(
    edge: Edge,
) -> None:
    only = Scaling(max_inputs=1, max_instances=1)
    place(edge, "outer", calls("shop/outer"), scaling=only, clocks=Clocks(queue_s=0.2))
    status, problem = await called(edge)
    assert (status, problem["type"].rpartition("/")[2], problem["clock"]) == (
        504,
        "deadline-exceeded",
        "queue",
    )
    assert not edge.queue.waiting


async def test_a_call_ends_with_the_call_that_made_it(edge: Edge) -> None:
    ended: list[str] = []

    async def waits(running: Running) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(running.id)

    made: list[asyncio.Task[httpx.Response]] = []

    async def calls_it(running: Running) -> Any:
        made.append(asyncio.create_task(running.call("shop/inner")))  # as a thread that goes on
        await asyncio.sleep(60)

    outer = place(edge, "outer", calls_it)
    inner = place(edge, "inner", waits)
    caller = asyncio.create_task(edge.call("shop/outer:invoke", json={"x": 1}))
    await until(lambda: inner)
    caller.cancel()
    await until(lambda: inner[0].id in ended)
    with pytest.raises(httpx.HTTPError):
        await made[0]
    outcomes = {r.function: r.outcome for r in (await edge.settle()).values()}
    assert outcomes == {"outer": "cancelled", "inner": "cancelled"}
    assert not outer[0].instance.running
    assert not inner[0].instance.running


async def test_priority_is_inherited_and_may_be_chosen(edge: Edge) -> None:
    async def code(running: Running) -> Any:
        await running.call("shop/inner")
        await running.call("shop/inner", headers={"pilotlight-priority": "realtime"})

    place(edge, "outer", code)
    ranks: list[str] = []

    async def inner(running: Running) -> Any:
        attempt = running.instance.running[running.id]
        assert isinstance(attempt, Attempt)
        ranks.append(attempt.call.caller.rank.priority.value)

    place(edge, "inner", inner)
    await called(edge, headers={"pilotlight-priority": "batch"})
    assert ranks == ["batch", "realtime"]


async def test_a_function_has_others_bound_to_arguments_and_not_to_options(
    edge: Edge, controller: FakeController
) -> None:
    place(edge, "inner", arguments)
    place(edge, "outer", calls("shop/inner", verb="bind", json={"arguments": {"size": 1}}))
    place(edge, "greedy", calls("shop/inner", verb="bind", json={"options": {"env": {"A": "1"}}}))

    assert await called(edge) == [200, {"function": "inner--0123456789ab"}]
    assert controller.bound[0]["actor"] == f"function:{TENANT}/main/shop/outer"
    status, problem = await called(edge, "greedy")
    assert (status, len(controller.bound)) == (403, 1)
    assert "a function needs one from a secret" in problem["detail"]


async def test_a_submitted_call_outlives_its_caller_and_its_app_reads_the_result(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    async def submits(running: Running) -> Any:
        return (await running.call("shop/inner", verb="submit")).json()["id"]

    async def reads(running: Running) -> Any:
        answer = await running.ask(
            f"/v1/calls/{state['id']}?wait_s=10",
            method="GET",
            headers={HEADER_PARENT: "req-that-has-ended"},
        )
        return [answer.status_code, answer.json()]

    async def slow(running: Running) -> Any:
        await release.wait()
        return "late"

    state, release = {"id": ""}, asyncio.Event()
    place(edge, "outer", submits)
    place(edge, "reader", reads)
    inner = place(edge, "inner", slow)
    state["id"] = await called(edge, headers={"pilotlight-timeout": "5"})
    await until(lambda: inner)
    waiting = asyncio.create_task(called(edge, "reader"))
    release.set()
    status, record = await waiting
    assert (status, record["state"], record["result"]) == (200, "SUCCEEDED", "late")
    parent = record["labels"]["parent"]
    assert (record["labels"]["caller"], parent) == ("shop/outer", f"{parent.partition('/')[0]}/1")

    await until(lambda: not edge.calls.pending)
    status, record = await called(edge, "reader")
    assert (status, record["state"]) == (200, "SUCCEEDED"), "the controller has it"
    ours = [r for r in controller.seen if r.path.startswith(f"/internal/calls/{state['id']}?")]
    assert ours[-1].headers["pilotlight-platform-token"] == "t"

    state["id"] = (await edge.call("shop/inner:submit", json={"x": 1})).json()["id"]
    status, problem = await called(edge, "reader")
    assert (status, "no call" in problem["detail"]) == (404, True), "a caller outside submitted it"


async def test_an_instance_has_a_bounded_number_of_connections(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_sockets, "MAX_CONNECTIONS", 2)

    async def code(running: Running) -> Any:
        path = edge.directory / CALLS_DIRECTORY / f"{running.instance.id}.sock"
        held = [await asyncio.open_unix_connection(path) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET / HTTP/1.1\r\nhost: platform\r\n\r\n")
        for reader, _ in held:
            await reader.readline()
        refused = await running.call("shop/inner")
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        return [refused.status_code, refused.text]

    place(edge, "outer", code)
    place(edge, "inner", arguments)
    assert await called(edge) == [503, "too many connections of this instance\n"]
    assert await called(edge) == [503, "too many connections of this instance\n"], "none is left"


async def test_a_peer_of_another_user_is_refused(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def code(running: Running) -> Any:
        try:
            return (await running.call("shop/inner")).status_code
        except httpx.HTTPError as e:
            return type(e).__name__

    place(edge, "outer", code)
    place(edge, "inner", arguments)
    assert await called(edge) == 200
    monkeypatch.setattr(instance_sockets, "peer_uid", lambda _: 4321)
    assert await called(edge) in ("RemoteProtocolError", "ReadError")


async def test_the_socket_goes_with_its_instance(edge: Edge) -> None:
    place(edge, "outer", arguments)
    await called(edge)
    (instance,) = edge.scaler.throttlers()[0].instances.values()
    path: Path = edge.directory / CALLS_DIRECTORY / f"{instance.id}.sock"
    assert path.is_socket()
    await edge.fleet.kill(instance.id, "killed")
    await until(lambda: not path.exists())
    assert repr(edge.sockets) == "<InstanceSockets 0 open, 0 requests>"


async def test_a_body_over_its_limit_is_refused(edge: Edge) -> None:
    place(edge, "outer", calls("shop/inner", json={"x": 1, "pad": "x" * 2000}))
    place(edge, "inner", arguments)
    status, problem = await called(edge)
    assert (status, problem["type"].rpartition("/")[2]) == (413, "too-large")


@pytest.mark.parametrize("token, believed", [("", 401), ("the platform's", 200)])
async def test_another_activator_is_believed_who_made_a_request_by_the_platforms_token(
    edge: Edge, token: str, believed: int
) -> None:
    place(edge, "inner", arguments)
    calling = json.dumps([f"function:{TENANT}/main/shop/outer", ["req-1/1", ["shop/outer"]]])
    forwarded = {"pilotlight-calling-function": calling, "authorization": ""}

    async def status(**more: str) -> int:
        headers = {**forwarded, **more}
        return (await edge.call("shop/inner:invoke", json={"x": 1}, headers=headers)).status_code

    assert await status() == 401
    assert await status(**{"pilotlight-platform-token": "wrong"}) == 401
    assert await status(**{"pilotlight-platform-token": token}) == believed
    callers = [(record.key, record.parent) for record in (await edge.settle()).values()]
    assert callers == [(f"function:{TENANT}/main/shop/outer", "req-1/1")] * bool(token)


async def test_an_instance_that_was_suspended_calls_again(edge: Edge) -> None:
    place(edge, "outer", calls("shop/inner"), scaling=Scaling(keep_asleep_s=60))
    place(edge, "inner", arguments)
    assert await called(edge) == [200, {"x": 1}]
    (throttler,) = [t for t in edge.scaler.throttlers() if t.target.function == "outer"]
    (instance,) = throttler.instances.values()
    path = edge.directory / CALLS_DIRECTORY / f"{instance.id}.sock"
    throttler.suspend_or_stop(instance)
    assert not path.exists()
    await until(lambda: edge.fleet.naps)
    assert await called(edge) == [200, {"x": 1}]
    assert [state for state, _ in edge.fleet.naps] == ["ASLEEP", "READY"]


async def test_a_wait_for_a_result_ends_with_the_call_that_waits(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    asked: list[asyncio.Task[httpx.Response]] = []

    async def waits(running: Running) -> Any:
        call_id = (await running.call("shop/inner", verb="submit")).json()["id"]
        result = running.ask(
            f"/v1/calls/{call_id}?wait_s=20", method="GET", headers={HEADER_PARENT: running.id}
        )
        asked.append(asyncio.create_task(result))  # as a thread that goes on
        await asyncio.sleep(60)

    async def slow(running: Running) -> Any:
        await release.wait()

    release = asyncio.Event()
    place(edge, "outer", waits)
    inner = place(edge, "inner", slow)
    caller = asyncio.create_task(edge.call("shop/outer:invoke", json={"x": 1}))
    await until(lambda: inner and repr(edge.sockets).endswith(" 1 requests>"))
    caller.cancel()
    with pytest.raises(httpx.HTTPError):
        await asyncio.wait_for(asked[0], 10)
    release.set()
    await until(lambda: not edge.calls.pending)


async def test_the_fallback_of_a_called_function_answers_the_function_that_calls(
    edge: Edge,
) -> None:
    place(edge, "outer", calls("shop/inner"))
    place(edge, "inner", arguments, fallback=(Fallback(kind="function", function="spare"),))
    place(edge, "spare", arguments)
    edge.fleet.broken["inner"] = StartFailed("inner cannot be imported")
    assert await called(edge) == [200, {"x": 1}]

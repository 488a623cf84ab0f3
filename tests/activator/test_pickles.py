"""Pickles run code: on every route only a caller of the function's own tenant has one opened. The
worker is a real one.

`ENTRANCES` has a row for each entrance. An entrance in the activator's code without a row, or a row
without one, fails here."""

from __future__ import annotations

import ast
import asyncio
import base64
import inspect
import json
import re
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, unix_serve

import activator
from activator.gateway.gateway import Gateway
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.http.payloads import JSON, PICKLE, accepts_pickles, answered_type, payload_type
from activator.llm.openai.api import MODELS, OURS
from activator.llm.openai.request import PATHS
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.client import sessions
from pilotlight.client.sse import SseParser
from pilotlight.profile import Profile
from pilotlight.protocol import CONTENT_JSON, CONTENT_PICKLE, CallRecord
from pilotlight.sdk.cls import Cls
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Fallback
from pilotlight.spec.traffic import Shadow
from snapshotter.errors import StartFailed
from tests.activator.conftest import KEY, Edge, served
from tests.activator.gateway.test_fast_path import in_flight
from tests.activator.gateway.test_shadow_traffic import Seen
from tests.activator.llm.openai.conftest import llm
from tests.activator.test_gateway import problem_of, until
from tests.fakes.calls import call_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_shim import FakeShim, function_spec
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.marking_pickle import MarkingPickle
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of, split_route, target_of

OTHER = "t-000000000002"
THEIR_KEY = "pl_beta"
TRUSTED = "pilotlight-trusted-pickle"
SENT = MappingProxyType({"content-type": CONTENT_PICKLE})
ADD = "Service.add"
METHODS = (
    MethodSpec(name="add", schema=SCHEMA, parameters=("x", "y")),
    MethodSpec(name="count", parameters=("n",), is_generator=True),
    MethodSpec(name="fail"),
)
CODE = """
class Service:
    def add(self, x, y=0):
        return x + y

    def count(self, n):
        yield from range(n)
        if n == 3:
            raise LookupError("after three")

    def fail(self):
        raise LookupError("no such thing")
"""


def service(name: str = "Service", **more: Any) -> FunctionSpec:
    """A public function of the class that the real worker runs."""
    return spec_of(name, kind=FunctionKind.CLASS, methods=METHODS, access=("*",), **more)


@pytest.fixture(name="worker", scope="module")
def _worker() -> Iterator[Path]:
    """The socket of a real instance."""
    spec = function_spec(qualname="Service", kind=FunctionKind.CLASS, methods=METHODS, max_inputs=4)
    with FakeShim({"app.py": CODE}, spec) as shim:
        yield Path(shim.start("i-main").path)


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(unauthenticated_per_s=1000.0)


def furnish(edge: Edge, worker: Path) -> Edge:
    """Tenant acme has functions for everybody, tenant beta has a key."""
    edge.add_tenant("acme")
    edge.add_tenant("beta", tenant=OTHER)
    edge.add_key(THEIR_KEY, tenant=OTHER)
    edge.fleet.sockets |= {"Service": worker, "Spare": worker}
    edge.add(route_of(service()))
    edge.add(route_of(llm("assistant", access=("*",))))
    edge.add(
        route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),), access=("*",)))
    )
    return edge


def leave(edge: Edge) -> None:
    """Close its connections to the real worker, which outlives it."""
    for scaled in edge.scaler.revisions.values():
        for instance in scaled.throttler.instances.values():
            instance.connections.close()


@pytest.fixture(name="shop")
async def _shop(
    edge: Edge, worker: Path, controller: FakeController, shipping: object
) -> AsyncIterator[Edge]:
    yield furnish(edge, worker)
    leave(edge)


@pytest.fixture(name="pickled")
def _pickled(short_tmp: Path) -> MarkingPickle:
    return MarkingPickle(short_tmp / "opened")


# -- the ways in -----------------------------------------------------------------------------------
Headers = Mapping[str, str]


def under(key: str | None, headers: Headers = SENT) -> dict[str, str]:
    """Headers of a caller with this key, or with none."""
    return {**headers, **({"authorization": f"Bearer {key}"} if key else {})}


async def post(shop: Edge, path: str, body: bytes, headers: Headers) -> httpx.Response:
    return await shop.client.post(f"{shop.url}/t/acme{path}", content=body, headers=dict(headers))


async def ended(shop: Edge, accepted: httpx.Response, key: str | None) -> httpx.Response:
    """The answer where it is a refusal, else the call at its end."""
    if accepted.status_code >= 300:
        return accepted
    url = f"{shop.url}/v1/calls/{accepted.json()['id']}?wait_s=20"
    call = await shop.client.get(url, headers=under(key, {}))
    assert call.json()["state"] in ("SUCCEEDED", "FAILED"), call.text
    return call


Send = Callable[[Edge, bytes, str | None, Headers], Awaitable[httpx.Response]]


async def _invoke(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    return await post(shop, f"/v1/functions/shop/{ADD}:invoke", body, under(key, sent))


async def _warm(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    for _ in range(2):
        assert (
            await _invoke(shop, b'{"x": 1}', key, {"content-type": CONTENT_JSON})
        ).status_code == 200
    url, lines = (
        f"/t/acme/v1/functions/shop/{ADD}:invoke".encode(),
        {b"authorization": f"Bearer {key}".encode()},
    )
    assert (shop.gateway.find_warm(url, lines) is None) == (key is None), (
        "callers with a key take the fast path"
    )
    return await _invoke(shop, body, key, sent)


async def _once(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    answers = [
        await _invoke(shop, body, key, {**sent, "idempotency-key": f"once-{key}"}) for _ in range(2)
    ]
    assert answers[0].status_code == answers[1].status_code, "what is replayed was allowed"
    return answers[1]


async def _submit(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    return await ended(
        shop, await post(shop, f"/v1/functions/shop/{ADD}:submit", body, under(key, sent)), key
    )


async def _submit_once(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    return await _submit(shop, body, key, {**sent, "idempotency-key": "once"})


async def _put(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    url = f"{shop.url}/v1/calls/mine?function=t/acme/shop/{ADD}"
    return await ended(
        shop, await shop.client.put(url, content=body, headers=under(key, sent)), key
    )


async def _put_passed_on(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
    """As another activator hands it over."""
    return await _put(shop, body, key, {**sent, "pilotlight-passed-on": "1"})


def at(path: str) -> Send:
    """A POST of it to this path of acme's."""

    async def send(shop: Edge, body: bytes, key: str | None, sent: Headers) -> httpx.Response:
        return await post(shop, path, body, under(key, sent))

    return send


async def _restarted_warmup(
    shop: Edge, body: bytes, key: str | None, sent: Headers
) -> httpx.Response:
    return await post(
        shop, f"/v1/functions/shop/{ADD}:warmup?snapshot=false", body, under(key, sent)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way in.

    Attributes:
        covers: what of the activator's code it goes through: `verb <name>`, `openai <path>`, or a
        handler of the gateway's. foreign, stranger: the status that a caller of another tenant
        gets, and one without a key. own: the status of a caller of the function's own tenant;
        `opens`: whether the worker opens its pickle.
    """

    send: Send
    covers: str
    foreign: int = 415
    stranger: int = 415
    own: int = 200
    opens: bool = True


NOT_JSON: dict[str, Any] = {"foreign": 400, "stranger": 400, "own": 400, "opens": False}
"""Ways in that read JSON whatever the type says, or refuse every other type."""
ENTRANCES: dict[str, Row] = {
    "invoke": Row(send=_invoke, covers="verb invoke"),
    "invoke, on the fast path": Row(send=_warm, covers="verb invoke"),
    "invoke under an idempotency key": Row(send=_once, covers="self._handle", stranger=401),
    "submit": Row(send=_submit, covers="verb submit", stranger=401),
    "submit under an idempotency key": Row(send=_submit_once, covers="verb submit", stranger=401),
    "warm up": Row(
        send=_restarted_warmup, covers="verb warmup", foreign=403, stranger=403, opens=False
    ),
    "put": Row(send=_put, covers="self._functions.put_call", stranger=401),
    "put, from another activator": Row(
        send=_put_passed_on, covers="self._functions.put_call", stranger=401
    ),
    "predict": Row(
        send=at(f"/v1/models/shop/{ADD}:predict"), covers="self._models.answer", **NOT_JSON
    ),
    "infer": Row(send=at(f"/v2/models/shop/{ADD}/infer"), covers="self._models.answer", **NOT_JSON),
    "invoke a model": Row(
        send=at("/v1/functions/shop/assistant:invoke"), covers="verb invoke", **NOT_JSON
    ),
    "submit a model's call": Row(
        send=at("/v1/functions/shop/assistant:submit"),
        covers="verb submit",
        **{**NOT_JSON, "stranger": 401},
    ),
    **{
        f"openai {path}": Row(send=at(path), covers=f"openai {path}", **NOT_JSON)
        for path in sorted(OURS - {MODELS})
    },
    **{
        f"engine {path}": Row(
            send=at(f"/fn/shop/assistant{path}"), covers="self._openai.answer_raw", **NOT_JSON
        )
        for path in sorted(PATHS)
    },
}
NO_ENTRANCES = {
    "self._http_proxy.http": "raw HTTP is the application's own; see the tests of its path and "
    "headers",
    "self._http_proxy.websocket": "frames; see the test of its head",
    "self._calls.answer": "questions about calls: nothing of the request reaches a worker",
    "self._calls.sandboxes.answer": "commands and files: the worker reads JSON or keeps the bytes",
    "self._control.forward": "the controller's paths: no worker is asked",
    "self._health.answer": "health",
    "self._openai.describe": "GET of a model's description",
    f"openai {MODELS}": "GET of a list",
    **dict.fromkeys(
        (
            "self._answer",
            "self.bodies.room",
            "self._functions.answer",
            "self._openai.answer",
        ),
        "a step on the way to a row's handler",
    ),
    "self._forwarded.record": "reads who makes the request, as a trusted proxy or another activator says",
    **dict.fromkeys(
        (
            "self._resolver.raw_entry",
            "self._resolver.operation",
            "self._resolver.storage_operation",
        ),
        "finds the caller",
    ),
    "self._web_socket_entry": "finds the caller of a WebSocket",
    "self.bodies": "counts bytes",
}
MAKERS = {
    "gateway.pipeline.admit": "invoke, submit, put",
    "gateway.fast_path._begin": "invoke, on the fast path",
    "gateway.proxy_headers.call_of": "raw HTTP: no body, nothing is sent to /invoke/",
    "llm.openai.api.call_of": "the rows openai, engine, and of a model",
    "llm.openai.call.call_of_kept": "the same, kept: always JSON",
    "async_calls.journaled_calls.call": "test_a_foreign_pickle_in_a_journal_…",
    "guards.function_client._call": "stage and text of a guard: always JSON",
    "gateway.shadow_traffic._call_of": "test_a_copy_of_an_own_pickle_…",
    "calls.fallback._stand_in": "no worker is asked",
    "calls.fallback._call_of": "test_a_pickle_falls_back_within_its_tenant_…",
}
"""Where calls are made, and the row or the test that looks at it."""


@pytest.mark.parametrize("name", ENTRANCES)
@pytest.mark.parametrize("key", [THEIR_KEY, None], ids=["another tenant", "no key"])
async def test_a_pickle_of_another_tenant_or_without_a_key_is_refused_unopened(
    shop: Edge, pickled: MarkingPickle, name: str, key: str | None
) -> None:
    row = ENTRANCES[name]
    for headers in (SENT, {**SENT, TRUSTED: "1"}):
        answer = await row.send(shop, pickled.body, key, headers)
        assert answer.status_code == (row.foreign if key else row.stranger), answer.text
        assert not pickled.was_opened
    if answer.status_code == 415:
        problem = problem_of(answer)
        assert problem["type"] == "https://pilotlight.dev/problems/unsupported-media-type"
        assert "calls to another tenant's function must use JSON" in str(problem["detail"])


@pytest.mark.parametrize("name", ENTRANCES)
async def test_a_pickle_of_the_functions_own_tenant_is_served_as_before(
    shop: Edge, pickled: MarkingPickle, name: str
) -> None:
    row = ENTRANCES[name]
    answer = await row.send(shop, pickled.body, KEY, SENT)

    assert (answer.status_code, pickled.was_opened) == (row.own, row.opens), answer.text
    if row.opens and answer.headers["content-type"] == CONTENT_JSON:
        assert (answer.json()["state"], answer.json()["content_type"]) == (
            "SUCCEEDED",
            CONTENT_PICKLE,
        )


# -- every way in has a row ------------------------------------------------------------------------
def test_every_handler_of_the_gateway_is_an_entrance_or_is_known_to_be_none() -> None:
    found = handlers_of(Gateway._route) | handlers_of(Gateway.__call__)
    openai = {f"openai {path}" for path in OURS}
    verbs = {row.covers for row in ENTRANCES.values() if row.covers.startswith("verb ")}
    covered = {row.covers for row in ENTRANCES.values()} | set(NO_ENTRANCES)

    assert found | openai == covered - verbs


async def test_every_verb_of_a_function_is_an_entrance(edge: Edge) -> None:
    verbs = {f"verb {verb}" for verb in edge.functions.verbs} - {"verb bind"}  # it runs nothing
    assert verbs == {row.covers for row in ENTRANCES.values() if row.covers.startswith("verb ")}


def test_every_place_that_makes_a_call_is_known() -> None:
    assert makers_in(Path(activator.__path__[0])) == set(MAKERS)


def test_only_two_places_write_to_a_workers_route_for_calls() -> None:
    root = Path(activator.__path__[0]).parent
    route = "/invoke/"
    found = {
        str(path.relative_to(root))
        for package in ("activator", "snapshotter", "weight_cache", "functions")
        for path in (root / package).rglob("*.py")
        if route in path.read_text()
    }
    those_who_serve_it = {
        "functions/pilotlight/protocol.py",
        "functions/pilotlight/worker/http/calls.py",
        "functions/pilotlight/worker/http/connection.py",
    }
    assert found - those_who_serve_it == {
        "activator/calls/call.py",
        "activator/gateway/route_cache.py",
    }


def handlers_of(function: Callable[..., Any]) -> set[str]:
    """What a method of the gateway's calls of the gateway."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called += [
        side for node in called if isinstance(node, ast.IfExp) for side in (node.body, node.orelse)
    ]
    called = [node for node in called if isinstance(node, ast.Attribute)]
    passed = [
        one
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for one in node.args
        if isinstance(one, ast.Attribute)
    ]
    names = {ast.unparse(node) for node in (*called, *passed)}
    return {
        name for name in names if name.startswith("self.") and not name.startswith("self._metrics")
    }


def makers_in(package: Path) -> set[str]:
    """Functions of the activator's that make calls, or others of them."""
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\b(Call|EngineCall|stand_in)\b", text):
            continue  # walking all trees takes three seconds
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {
                    name_of(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)
                }
                given = {
                    name_of(node)
                    for node in ast.walk(function)
                    if isinstance(node, ast.IfExp)
                    for node in (node.body, node.orelse)
                }
                if (names | given) & {"Call", "EngineCall", "stand_in"}:
                    found.add(
                        f"{'.'.join(path.relative_to(package).with_suffix('').parts)}.{function.name}"
                    )
    return found


def name_of(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


# -- what a body is --------------------------------------------------------------------------------
PICKLES = (
    CONTENT_PICKLE,
    CONTENT_PICKLE.upper(),
    "Application/Vnd.Pilotlight.Pickle",
    f"{CONTENT_PICKLE};a=b",
    f"{CONTENT_PICKLE} ; a=b",
)
NO_PICKLES = (
    f"{CONTENT_PICKLE}-stream",
    f"{CONTENT_PICKLE}x",
    f"x{CONTENT_PICKLE}",
    f"text/plain, {CONTENT_PICKLE}",
    f"{CONTENT_PICKLE}, x",
    f"text/plain; a={CONTENT_PICKLE}",
    "application/json; charset=utf-8",
    "application/vnd.pilotlight",
    "text/plain",
    "",
)


def test_a_content_type_is_a_pickle_by_its_whole_name() -> None:
    assert {payload_type(given.encode()) for given in (*PICKLES, f"  {CONTENT_PICKLE}\t")} == {
        PICKLE
    }
    assert {payload_type(given.encode()) for given in NO_PICKLES} == {payload_type(None)} == {JSON}


def test_only_the_functions_own_tenant_may_send_pickles() -> None:
    assert accepts_pickles(TENANT, TENANT)
    assert not accepts_pickles(OTHER, TENANT)
    assert not accepts_pickles("", TENANT)
    assert not accepts_pickles("", ""), "no key is no tenant"


@pytest.mark.parametrize("way", [_invoke, _warm], ids=["slow", "fast"])
@pytest.mark.parametrize("key", [KEY, THEIR_KEY])
async def test_however_a_type_is_written_it_means_the_same_to_activator_and_worker(
    shop: Edge, pickled: MarkingPickle, way: Send, key: str
) -> None:
    for given in PICKLES:
        answer = await way(shop, pickled.body, key, {"content-type": given})
        assert (answer.status_code, pickled.was_opened) == (
            (200, True) if key == KEY else (415, False)
        ), given
    pickled.mark.unlink(missing_ok=True)
    for given in NO_PICKLES:
        assert (await way(shop, pickled.body, key, {"content-type": given})).status_code == 400, (
            given
        )
        answer = await way(shop, b'{"x": 4}', key, {"content-type": given})
        assert (answer.status_code, answer.headers["content-type"], answer.content) == (
            200,
            CONTENT_JSON,
            b"4",
        ), given
    assert not pickled.was_opened


@pytest.mark.parametrize(
    "types",
    [
        (CONTENT_PICKLE, CONTENT_JSON),
        (CONTENT_JSON, CONTENT_PICKLE),
        (CONTENT_PICKLE, CONTENT_PICKLE),
    ],
)
async def test_a_type_that_is_given_twice_opens_no_pickle_of_a_foreign_caller(
    shop: Edge, pickled: MarkingPickle, types: tuple[str, str]
) -> None:
    url = f"{shop.url}/t/acme/v1/functions/shop/{ADD}:invoke"
    for key in (THEIR_KEY, THEIR_KEY, None):
        lines = [*under(key, {}).items(), *(("content-type", one) for one in types)]
        for body, allowed in ((pickled.body, {400, 415}), (b'{"x": 1}', {200, 415})):
            assert (await shop.client.post(url, content=body, headers=lines)).status_code in allowed
    assert not pickled.was_opened


# -- what a refusal costs --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "way", [_invoke, _warm, _submit, _put], ids=["invoke", "fast path", "submit", "put"]
)
async def test_a_refused_pickle_counts_as_a_request_and_holds_and_costs_nothing(
    shop: Edge, pickled: MarkingPickle, way: Send
) -> None:
    shop.add(route_of(service(scaling=Scaling(max_instances=1, max_inputs=1))))
    asked_first = 2 if way is _warm else 0
    shop.add_tenant("beta", tenant=OTHER, requests_per_s=0.001, burst=asked_first + 1)

    assert (await way(shop, pickled.body, THEIR_KEY, SENT)).status_code == 415
    assert in_flight(shop) == 0
    assert len(shop.calls.pending) == 0
    records = [record for record in (await shop.settle()).values() if record.kind == "CALL"]
    assert [record.status for record in records] == [200] * asked_first
    assert (await _invoke(shop, pickled.body, THEIR_KEY, SENT)).status_code == 429
    assert (
        await _invoke(shop, b'{"x": 1}', KEY, {"content-type": CONTENT_JSON})
    ).status_code == 200, "its only slot is free"
    assert not pickled.was_opened


# -- calls that come from a journal ----------------------------------------------------------------
def kept_of(pickled: MarkingPickle, *, tenant: str, key: str, **more: Any) -> dict[str, Any]:
    """A submitted pickle as an older version wrote it down."""
    record = CallRecord(
        id="req-1",
        tenant=tenant,
        environment="main",
        app="shop",
        function="Service",
        method="add",
        state="QUEUED",
        sequence=1,
        submitted_at=1.0,
        expires_at=9e9,
        revision="v1-abcdef",
    )
    return {
        "record": record.to_json(),
        "owner": TENANT,
        "key": key,
        "content_type": CONTENT_PICKLE,
        "accept": "",
        "body": base64.b64encode(pickled.body).decode(),
        **more,
    }


@asynccontextmanager
async def resumed(
    directory: Path, worker: Path, kept: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The call's record, as the controller has it, once an activator found it in the journal that
    another one left."""
    async with served(furnish(Edge(directory, ActivatorSettings(), _never), worker)) as first:
        await first.books.journal.submit("req-1", kept)
    controller = await FakeController(directory / "controller.sock").start()
    async with (
        served(furnish(Edge(directory, ActivatorSettings(), _never), worker)) as second,
        asyncio.TaskGroup() as group,
    ):
        (shipping,) = second.calls.start(group)
        await until(
            lambda: controller.calls.get("req-1", {}).get("state") in ("SUCCEEDED", "FAILED")
        )
        yield controller.calls["req-1"]
        assert {record.status for record in (await second.settle()).values()} <= {200}
        shipping.cancel()
        leave(second)
    await controller.aclose()


async def _never(request: WorkerRequest) -> WorkerAnswer:
    raise AssertionError(f"another worker was asked for {request.path}")


@pytest.mark.parametrize("tenant, key", [(OTHER, f"k-{THEIR_KEY}"), (OTHER, "k-revoked"), ("", "")])
async def test_a_foreign_pickle_in_a_journal_of_an_older_version_ends_refused(
    short_tmp: Path, worker: Path, pickled: MarkingPickle, tenant: str, key: str
) -> None:
    async with resumed(short_tmp, worker, kept_of(pickled, tenant=tenant, key=key)) as record:
        problem = json.loads(base64.b64decode(record["result"]))
        assert (record["state"], record["status"], record["is_dead"]) == ("FAILED", 415, False)
        assert problem["type"] == "https://pilotlight.dev/problems/unsupported-media-type"
        assert not pickled.was_opened


@pytest.mark.parametrize("key", [f"k-{KEY}", "k-revoked"])
async def test_an_own_pickle_in_a_journal_runs_also_when_its_key_has_ended(
    short_tmp: Path, worker: Path, pickled: MarkingPickle, key: str
) -> None:
    async with resumed(short_tmp, worker, kept_of(pickled, tenant=TENANT, key=key)) as record:
        assert (record["state"], record["content_type"], pickled.was_opened) == (
            "SUCCEEDED",
            CONTENT_PICKLE,
            True,
        )


@pytest.mark.parametrize("tenant, state", [(OTHER, "FAILED"), (TENANT, "SUCCEEDED")])
async def test_a_dead_letter_sent_again_and_a_call_handed_on_are_checked_again(
    shop: Edge, controller: FakeController, pickled: MarkingPickle, tenant: str, state: str
) -> None:
    await shop.calls.store(kept_of(pickled, tenant=tenant, key="k-any", due="req-1/1"))
    shop.calls.begin_stored(["req-1/1"], ["req-1/1"])
    await until(lambda: controller.calls.get("req-1", {}).get("state") == state)

    assert pickled.was_opened == (state == "SUCCEEDED")


# -- what answers in a function's place, and copies ------------------------------------------------
async def test_a_pickle_falls_back_within_its_tenant_and_another_tenants_does_not(
    shop: Edge, pickled: MarkingPickle
) -> None:
    shop.add(route_of(service(fallback=(Fallback(kind="function", function="Spare"),))))
    shop.add(route_of(service("Spare")))
    shop.fleet.broken["Service"] = StartFailed("broken")

    for key in (THEIR_KEY, None):
        assert (await _invoke(shop, pickled.body, key, SENT)).status_code == 415
    assert not pickled.was_opened
    answer = await _invoke(shop, pickled.body, KEY, SENT)
    assert (answer.status_code, answer.headers["pilotlight-degraded"], pickled.was_opened) == (
        200,
        "function=Spare",
        True,
    )


def test_a_pickle_is_no_call_of_another_tenants_function_in_the_place_of_its_own() -> None:
    call = call_of(
        target_of(service()), b"", method="add", content_type=PICKLE, accepts_pickle=True
    )
    theirs = target_of(service("Spare"), tenant=OTHER)

    with pytest.raises(errors.UnsupportedMediaType):
        call.stand_in(theirs, "function=Spare")
    assert call.stand_in(target_of(service("Spare")), "function=Spare").caller.accepts_pickle


def test_a_pickle_whose_caller_was_not_checked_goes_without_the_header_that_a_worker_requires() -> (
    None
):
    for content_type, accepts, is_said in (
        (PICKLE, True, True),
        (PICKLE, False, False),
        (JSON, True, False),
    ):
        call = call_of(
            target_of(service()),
            b"",
            method="add",
            content_type=content_type,
            accepts_pickle=accepts,
        )
        assert (TRUSTED.encode() in call.request_head(1.0)) == is_said


async def test_a_copy_of_an_own_pickle_is_opened_by_the_shadow(
    edge: Edge, pickled: MarkingPickle
) -> None:
    spec = replace(service(), name="hello")
    edge.copy_calls(
        ShadowTraffic(
            throttler_of=edge.scaler.throttler_of,
            observer=Seen(),
            is_crowded=lambda: False,
            draw=lambda: 0.0,
        )
    )
    shadow = Shadow(revision="v2-bbbbbb", percent=100.0, max_compute=1.0)
    edge.add(split_route(spec, {"v1-aaaaaa": 100}, named=("v2-bbbbbb",), shadow=shadow))

    def copies() -> list[WorkerRequest]:
        asked = [request for worker in edge.fleet.workers.values() for request in worker.requests]
        return [
            request
            for request in asked
            if request.headers.get("pilotlight-call", "").endswith("-shadow")
        ]

    async def copied() -> bool:
        assert (
            await edge.call("shop/hello.add:invoke", content=pickled.body, headers=dict(SENT))
        ).status_code == 200
        return bool(copies())

    while not await copied():
        await asyncio.sleep(0.01)
    assert (copies()[0].headers["content-type"], copies()[0].headers[TRUSTED]) == (
        CONTENT_PICKLE,
        "1",
    )


# -- heads that a caller writes --------------------------------------------------------------------
@pytest.fixture(name="behaviour")
def _behaviour() -> object:
    async def tell(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(
            body=json.dumps({"path": request.path, "headers": request.headers}).encode()
        )

    return tell


CLIMBS = (
    *(
        "/invoke/",
        "/../invoke/",
        "/../../invoke/",
        "/%2e%2e/invoke/",
        "/..%2finvoke/",
        "/%2e%2e%2finvoke/",
        "//invoke/",
        "/./invoke/",
    ),
    *(
        "/..;/invoke/",
        "/..\\invoke/",
        "%2finvoke/",
        "%2f..%2finvoke/",
        "?/invoke/",
        "/x/../../invoke/",
        "",
    ),
)


@pytest.mark.parametrize("climb", CLIMBS)
async def test_no_path_of_a_web_application_is_its_workers_route_for_calls(
    shop: Edge, pickled: MarkingPickle, climb: str
) -> None:
    host, port = shop.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = (
        f"host: x\r\nconnection: close\r\n{TRUSTED}: 1\r\ncontent-type: "
        f"{CONTENT_PICKLE}\r\ncontent-length: {len(pickled.body)}\r\n"
    )
    writer.write(
        f"POST /t/acme/fn/shop/site{climb} HTTP/1.1\r\n{lines}\r\n".encode() + pickled.body
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()

    seen = [request for worker in shop.fleet.workers.values() for request in worker.requests]
    assert len(seen) == (1 if b" 200 " in answer.partition(b"\r\n")[0] else 0), answer
    assert all(request.path.startswith("/asgi") and request.path[5] in "/?" for request in seen), (
        seen
    )
    assert all(TRUSTED not in request.headers for request in seen), (
        "nor does the header of a caller reach it"
    )


async def test_a_callers_own_trust_header_reaches_no_worker(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    for _ in range(3):  # at first cold, then on the fast path
        seen = (
            await edge.call(json={"x": 1}, headers={TRUSTED: "1", "Pilotlight-Trusted-Pickle": "1"})
        ).json()
        assert TRUSTED not in seen["headers"]
        assert seen["headers"]["content-type"] == CONTENT_JSON


async def test_the_head_of_a_websocket_carries_no_trust_header_of_its_caller(
    shop: Edge, short_tmp: Path
) -> None:
    said: list[str] = []

    async def listen(socket: ServerConnection) -> None:
        assert socket.request is not None
        said.extend([socket.request.path, *(name.lower() for name in socket.request.headers)])

    async with unix_serve(listen, str(short_tmp / "ws.sock")):
        shop.fleet.sockets["site"] = short_tmp / "ws.sock"
        url = f"{shop.url.replace('http', 'ws', 1)}/t/acme/fn/shop/site/invoke/"
        async with connect(url, additional_headers={TRUSTED: "1"}, proxy=None) as socket:
            await socket.wait_closed()
    assert said[0] == "/asgi/invoke/"
    assert TRUSTED not in said


# -- answers that were not asked for as pickles ----------------------------------------------------
async def test_a_record_calls_an_answer_a_pickle_only_where_the_call_was_one(
    edge: Edge, controller: FakeController, shipping: object, pickled: MarkingPickle
) -> None:
    async def lie(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=pickled.body, content_type=CONTENT_PICKLE)

    edge.fleet.behaviours["hello"] = lie
    edge.add(route_of(spec_of()))
    call = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    record = (
        await edge.client.get(f"{edge.url}/v1/calls/{call}?wait_s=20", headers=under(KEY, {}))
    ).json()
    stream = (
        await edge.client.get(f"{edge.url}/v1/calls/{call}/stream", headers=under(KEY, {}))
    ).text

    assert (record["state"], record["content_type"]) == ("SUCCEEDED", "application/octet-stream")
    assert "event: pickle" not in stream
    assert "event: exception" not in stream


async def test_a_function_sends_no_event_that_a_client_unpickles(
    edge: Edge, controller: FakeController, shipping: object, pickled: MarkingPickle
) -> None:
    """The stream of a call that is known by its id alone is read with pickles."""
    data = base64.b64encode(pickled.body)
    record = {"id": "x", "content_type": CONTENT_PICKLE, "result": data.decode()}

    async def lie(request: WorkerRequest) -> WorkerAnswer:
        events = (b"pickle\ndata: " + data, b"exception\r\ndata: " + data)
        result = b"result\ndata: " + json.dumps(record).encode()
        body = b"".join(b"event: %b\n\n" % event for event in (*events, result))
        return WorkerAnswer(body=body, content_type="text/event-stream")

    edge.fleet.behaviours["hello"] = lie
    edge.add(route_of(spec_of()))
    call = (await edge.call("shop/hello:submit", json={"x": 1})).json()["id"]
    for _ in range(2):  # while it runs, perhaps, and after its end
        url = f"{edge.url}/v1/calls/{call}/stream"
        stream = (await edge.client.get(url, headers=under(KEY, {}))).content
        names = {event.name for event in SseParser().feed(stream)}
        assert data in stream
        assert names - {"state"} == {"", "end"}


def test_only_pickles_are_answered_with_pickles() -> None:
    for answered in (
        CONTENT_PICKLE,
        CONTENT_PICKLE.upper(),
        f"{CONTENT_PICKLE}-stream",
        f"{CONTENT_PICKLE}; a=b",
    ):
        assert answered_type(JSON, answered) == "application/octet-stream"
        assert answered_type(PICKLE, answered) == answered
    assert (
        answered_type(JSON, "text/event-stream; charset=utf-8")
        == "text/event-stream; charset=utf-8"
    )


# -- the SDK at a function of another tenant -------------------------------------------------------
async def test_the_sdk_calls_another_tenants_function_and_reads_its_streams_and_errors(
    shop: Edge,
) -> None:
    def play() -> None:
        with sessions.use_profile(Profile(url=shop.url, api_key=THEIR_KEY)):
            theirs = Cls.from_name("shop", "Service", tenant="acme")()
            assert (
                theirs.add.remote(1, 2)
                == theirs.add.remote(x=1, y=2)
                == theirs.add.spawn(1, 2).get(timeout=30)
                == 3
            )
            assert (
                list(theirs.count.remote_gen(2)) == list(theirs.count.spawn(n=2).stream()) == [0, 1]
            )
            items = theirs.count.remote_gen(3)
            assert [next(items) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(errors.FunctionRaised, match="after three"):
                next(items)
            with pytest.raises(errors.FunctionRaised, match="no such thing"):
                theirs.fail.remote()
            with pytest.raises(errors.InvalidInput, match="by name, or all by position"):
                theirs.add.remote(1, y=2)
        sessions.close()

    await asyncio.to_thread(play)

"""Batches, as OpenAI's own client speaks them: the controller with its runner, and an activator that
takes calls and reports their ends."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
import sqlalchemy as sa

from pilotlight.controller import http_app
from pilotlight.controller.batches import batches, files, lines, runner
from pilotlight.controller.batches.line_process import MAX_LINE_BYTES
from pilotlight.controller.batches.runner import BatchRunner
from pilotlight.controller.database import tables
from pilotlight.controller.scheduling import batch_lines, dispatch_queue
from pilotlight.core.object_store import DirectoryStore, ObjectStore
from pilotlight.core.object_store.errors import ObjectStoreError, ObjectStoreUnavailable
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import CALLS_PATH, CONTENT_JSON, DUE_PATH, HEADER_CUSTOMER
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec

CHAT = "/v1/chat/completions"
CALL = "/v1/functions/search/hello:invoke"
DAY_S = 86_400.0
ENGINE = {
    "kind": "asgi",
    "web_server": {"port": 8000, "openai": {"models": ["words-1", "tuned"]}},
}


class FaultyStore(DirectoryStore):
    """A blob store that fails as `error` says, or kills the controller before or after a write."""

    error: ObjectStoreError | None = None
    kill: str = ""

    async def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        self._check()
        if self.kill == "before":
            raise Killed
        await super().put(key, data)
        if self.kill == "after":
            raise Killed

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes:
        """See ObjectStore."""
        self._check()
        return await super().read(
            key, offset_bytes=offset_bytes, length_bytes=length_bytes, etag=etag
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class Killed(BaseException):
    """The controller's process ends here."""


@pytest.fixture(name="blobs")
def _blobs(tmp_path: Path) -> ObjectStore:
    return FaultyStore(tmp_path / "blobs")


class Activator:
    """Takes due calls and ends them: the protocol of a real one."""

    def __init__(self, controller: Controller, name: str = "a-0") -> None:
        self._controller = controller
        self.name = name
        self.held: dict[str, dict[str, Any]] = {}
        self.ran: Counter[str] = Counter()
        self.cancelled: list[str] = []

    async def take(self) -> list[dict[str, Any]]:
        """Take all that is due."""
        headers = {HEADER_PLATFORM_TOKEN: self._controller.context.key.token}
        asked = {"activator": self.name, "wait_s": "0"}
        answer = await self._controller.http.get(DUE_PATH, params=asked, headers=headers)
        calls = answer.json()["calls"]
        self.cancelled += answer.json()["cancel"]
        ids = [one["due"] for one in calls]
        taken = await self._controller.internal(DUE_PATH, {"activator": self.name, "ids": ids})
        mine = [one for one in calls if one["due"] in taken.json()["yours"]]
        self.held |= {one["record"]["id"]: one for one in mine}
        return mine

    async def end(
        self, calls: Iterable[str] | None = None, answer: Any = None, **changes: Any
    ) -> None:
        """End calls with an answer (default: their body) and report that."""
        records = []
        for call in list(self.held) if calls is None else calls:
            kept = self.held.pop(call)
            self.ran[call] += 1
            body = base64.b64decode(kept["body"]) if answer is None else json.dumps(answer).encode()
            ended = {
                "state": "SUCCEEDED",
                "status": 200,
                "outcome": "ok",
                "sequence": 3,
                "content_type": CONTENT_JSON,
                "result": base64.b64encode(body).decode(),
                **changes,
            }
            records.append({**kept["record"], **ended})
        said = await self._controller.internal(CALLS_PATH, {"calls": records})
        assert said.status_code == 200, said.text

    def call_of(self, name: str) -> str:
        """The call that it holds with this argument."""
        return next(
            call
            for call, kept in self.held.items()
            if json.loads(base64.b64decode(kept["body"]))["name"] == name
        )

    async def fail(self, status: int, kind: str, calls: Iterable[str] | None = None) -> None:
        """End calls with an error of the platform."""
        problem = {"type": f"https://pilotlight.dev/problems/{kind}", "detail": f"it is {kind}"}
        await self.end(calls, problem, state="FAILED", status=status, outcome="error")


class World:
    """A controller whose batches run, and its activator."""

    def __init__(self, controller: Controller, client: openai.AsyncOpenAI) -> None:
        self.controller = controller
        self.client = client
        self.runner = BatchRunner(controller.context)
        self.activator = Activator(controller)

    def client_of(self, key: str) -> openai.AsyncOpenAI:
        """OpenAI's client with another key."""
        return client_of(self.controller, key)

    async def upload(self, *rows: Any, client: openai.AsyncOpenAI | None = None) -> str:
        """Upload these lines; those that are no text as JSON. Returns the file's id."""
        text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        sent = ("in.jsonl", text.encode())
        return (await (client or self.client).files.create(file=sent, purpose="batch")).id

    async def begin(
        self, *rows: Any, endpoint: str = CALL, client: openai.AsyncOpenAI | None = None
    ) -> str:
        """Upload lines and begin a batch of them; returns its id."""
        file = await self.upload(*rows, client=client)
        made: Any = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        return (await (client or self.client).batches.create(**made)).id

    async def rounds(self, count: int = 4) -> None:
        """Let the runner take steps."""
        for _ in range(count):
            await self.runner.round()

    async def restart(self) -> None:
        """Another process runs the batches."""
        await self.runner.aclose()
        self.runner = BatchRunner(self.controller.context)

    async def finish(self, batch: str, *, rounds: int = 60) -> Any:
        """Run a batch to its end, every call answered with its body."""
        for _ in range(rounds):
            await self.runner.round()
            if (await self.activator.take()) or self.activator.held:
                await self.activator.end()
            found = await self.client.batches.retrieve(batch)
            if found.status in ("completed", "failed", "expired", "cancelled"):
                return found
        raise AssertionError(f"the batch did not end: {found}")

    async def content(self, file: str | None) -> list[dict[str, Any]]:
        """The lines of a file; none without one."""
        if file is None:
            return []
        text = (await self.client.files.content(file)).text
        return [json.loads(line) for line in text.split("\n") if line]


def client_of(controller: Controller, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key,
        base_url="http://controller/v1",
        max_retries=0,
        http_client=httpx2.AsyncClient(
            transport=httpx2.ASGITransport(
                http_app.build_app(controller.context), raise_app_exceptions=False
            )
        ),
    )


def request_line(number: int, *, url: str = CALL, body: Any = None, **changes: Any) -> Any:
    """A line of a file."""
    given = {"name": f"n{number}"} if body is None else body
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": given, **changes}


def ids(found: list[dict[str, Any]]) -> list[str]:
    return sorted(one["custom_id"] for one in found)


@pytest.fixture(name="world")
async def _world(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    for name in ("FLUSH_S", "CLEAN_S", "FIRST_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.0)
    monkeypatch.setattr(runner, "OF_TENANT", 10)
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(), spec("words", **ENGINE)]}
    )
    assert answer.status_code == 200, answer.text
    world = World(controller, client_of(controller, controller.key))
    yield world
    await world.runner.aclose()


# -- what OpenAI's client says and hears -----------------------------------------------------------
async def test_a_batch_from_its_file_to_its_answers_by_openais_client(world: World) -> None:
    file = await world.client.files.create(
        file=("räts.jsonl", json.dumps(request_line(1)).encode()), purpose="batch"
    )
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert file.filename == "räts.jsonl"
    batch = await world.client.batches.create(
        input_file_id=file.id,
        endpoint=CALL,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"run": "7"},
    )
    assert (batch.status, batch.metadata) == ("validating", {"run": "7"})
    assert batch.expires_at == batch.created_at + int(DAY_S)
    done = await world.finish(batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed) == (1, 1)
    assert done.error_file_id is None
    (line,) = await world.content(done.output_file_id)
    assert line["custom_id"] == "c1"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["response"]["body"] == {"name": "n1"}
    assert [one.id async for one in world.client.batches.list(limit=1)] == [batch.id]
    listed = [one.id async for one in world.client.files.list(limit=1)]
    assert sorted(listed) == sorted([file.id, done.output_file_id])
    assert (await world.client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await world.client.files.retrieve(file.id)


async def test_lines_call_the_models_that_they_name(world: World) -> None:
    names = ("search/words", "words", "search/words:tuned", "tuned")
    rows = [
        request_line(n, url=CHAT, body={"model": name, "messages": []})
        for n, name in enumerate(names)
    ]
    await world.begin(*rows, endpoint=CHAT)
    await world.rounds()
    taken = await world.activator.take()
    assert {one["record"]["function"] for one in taken} == {"words"}
    assert {one["priority"] for one in taken} == {"batch"}
    bodies = [json.loads(base64.b64decode(one["body"])) for one in taken]
    assert sorted(one["body"]["model"] for one in bodies) == sorted(names)
    assert {one["path"] for one in bodies} == {CHAT}


async def test_lines_are_run_for_the_customer_of_their_batch(world: World) -> None:
    async def customers(client: openai.AsyncOpenAI, **headers: str) -> set[str]:
        file = await world.upload(request_line(1), client=client)
        made: Any = {"input_file_id": file, "endpoint": CALL, "completion_window": "24h"}
        await client.batches.create(**made, extra_headers=headers)
        await world.rounds()
        return {one.get("customer", "") for one in await world.activator.take()}

    bound = world.client_of(await world.controller.new_key(scope="invoke", customer="ana"))
    assert await customers(world.client) == {""}
    assert await customers(world.client, **{HEADER_CUSTOMER: "bob"}) == {"bob"}
    assert await customers(bound) == {"ana"}
    with pytest.raises(openai.PermissionDeniedError):
        await customers(bound, **{HEADER_CUSTOMER: "bob"})
    with pytest.raises(openai.BadRequestError):
        await customers(world.client, **{HEADER_CUSTOMER: "b b"})


async def test_progress_is_told_while_a_batch_runs(world: World) -> None:
    batch = await world.begin(*(request_line(n) for n in range(3)))
    await world.rounds()
    await world.activator.take()
    first, second, _ = world.activator.held
    await world.activator.end([first])
    await world.activator.fail(402 + 20, "unlucky", [second])
    found = await world.client.batches.retrieve(batch)
    assert found.status == "in_progress"
    counts = found.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 1)
    assert found.output_file_id is None
    assert (await world.finish(batch)).request_counts.failed == 1


async def test_failed_lines_are_in_the_error_file_by_name(world: World) -> None:
    batch = await world.begin(request_line(1), request_line(2))
    await world.rounds()
    await world.activator.take()
    first, second = (world.activator.call_of(name) for name in ("n1", "n2"))
    await world.activator.fail(502, "worker-crashed", [first])
    raised = {"error": {"type": "ValueError", "message": "no"}}
    await world.activator.end([second], raised, state="FAILED", status=500, outcome="raised")
    done = await world.finish(batch)
    assert done.output_file_id is None
    bad = {one["custom_id"]: one for one in await world.content(done.error_file_id)}
    assert bad["c1"]["response"] is None
    assert bad["c1"]["error"] == {"code": "worker-crashed", "message": "it is worker-crashed"}
    assert bad["c2"]["error"] is None
    assert bad["c2"]["response"]["status_code"] == 500
    assert bad["c2"]["response"]["body"] == raised


ANSWERS: tuple[tuple[bytes, str, Any], ...] = (
    (b'{"a":\n [1,\r\n 2]}', CONTENT_JSON, {"a": [1, 2]}),
    ('"a\u2028b\u0085"'.encode(), CONTENT_JSON, "a\u2028b\u0085"),
    (b'{"a": 1}\n[2]\n', "application/x-ndjson", [{"a": 1}, [2]]),
    (b'1}, "custom_id": "x', CONTENT_JSON, '1}, "custom_id": "x'),
    (b"[" * 100_000, CONTENT_JSON, "[" * 100_000),
    (b"NaN", CONTENT_JSON, "NaN"),
    (b"\xff\xfe", "image/png", {"base64": "//4="}),
)
"""Body and type of an answer, and what is written of it."""


async def test_whatever_is_answered_is_one_line_of_json(world: World) -> None:
    batch = await world.begin(*map(request_line, range(len(ANSWERS))))
    await world.rounds()
    await world.activator.take()
    for number, (body, content_type, _) in enumerate(ANSWERS):
        result = base64.b64encode(body).decode()
        call = world.activator.call_of(f"n{number}")
        await world.activator.end([call], content_type=content_type, result=result)
    done = await world.finish(batch)
    text = (await world.client.files.content(done.output_file_id)).text
    lines = sorted(map(json.loads, text.splitlines()), key=lambda line: line["custom_id"])
    assert [(line["custom_id"], line["response"]["body"]) for line in lines] == [
        (f"c{number}", expected) for number, (_, _, expected) in enumerate(ANSWERS)
    ]


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rows, code, line",
    [
        ([request_line(1), "{no"], "invalid_json_line", 2),
        (["[1]"], "invalid_json_line", 1),
        (["", request_line(1), request_line(1)], "duplicate_custom_id", 3),
        ([request_line(1, custom_id="")], "invalid_custom_id", 1),
        ([request_line(1, custom_id="a\0")], "invalid_custom_id", 1),
        ([request_line(1, method="GET")], "invalid_method", 1),
        ([request_line(1, url=CHAT)], "mismatched_url", 1),
        ([request_line(1, body="x")], "invalid_body", 1),
        (["[" * 200_000], "invalid_json_line", 1),
        ([request_line(1), f'"{"x" * MAX_LINE_BYTES}"', request_line(2)], "line_too_long", 2),
        ([" "], "empty_file", None),
    ],
)
async def test_a_file_that_is_wrong_fails_before_anything_runs(
    world: World, rows: list[Any], code: str, line: int | None
) -> None:
    batch = await world.begin(*rows)
    await world.rounds()
    found = await world.client.batches.retrieve(batch)
    assert found.status == "failed"
    assert found.errors is not None
    assert found.errors.data is not None
    assert (found.errors.data[0].code, found.errors.data[0].line) == (code, line)
    assert await world.activator.take() == []


async def test_models_that_cannot_be_called_are_named(world: World) -> None:
    rows = [
        request_line(n, url=CHAT, body={"model": model, "messages": [], **more})
        for n, (model, more) in enumerate(
            [("search/hello", {}), ("nothing", {}), ("words", {"stream": True}), ("words@v9", {})]
        )
    ]
    batch = await world.begin(*rows, endpoint=CHAT)
    await world.rounds()
    found = await world.client.batches.retrieve(batch)
    assert found.errors is not None
    codes = [one.code for one in found.errors.data or ()]
    assert codes == ["model_not_found", "model_not_found", "invalid_body", "model_not_found"]


async def test_a_file_has_a_bound_of_lines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotlight.controller.batches.validation.MAX_LINES", 2)
    batch = await world.begin(*(request_line(n) for n in range(3)))
    await world.rounds()
    found = await world.client.batches.retrieve(batch)
    assert found.errors is not None
    assert [one.code for one in found.errors.data or ()] == ["too_many_requests"]


@pytest.mark.parametrize(
    "changes, parameter",
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"endpoint": "/v1/functions/search:invoke"}, "endpoint"),
        ({"endpoint": "/v1/functions/search/words.x:invoke"}, None),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
    ],
)
async def test_a_batch_that_cannot_run_is_refused(
    world: World, changes: dict[str, str], parameter: str | None
) -> None:
    file = await world.upload(request_line(1))
    made: Any = {"input_file_id": file, "endpoint": CALL, "completion_window": "24h", **changes}
    if parameter is None:
        await world.client.batches.create(**made)  # an engine takes any method's name
        return
    with pytest.raises(openai.BadRequestError) as refused:
        await world.client.batches.create(**made)
    assert refused.value.param == parameter
    assert refused.value.code == "invalid-input"


async def test_uploads_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await world.client.files.create(file=("a", b"{}"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="empty"):
        await world.client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="multipart"):
        await world.client.post("/files", body={"purpose": "batch"}, cast_to=object)
    monkeypatch.setattr("pilotlight.controller.batches.uploads.MAX_FILE_BYTES", 1_500_000)
    with pytest.raises(openai.APIStatusError) as refused:
        await world.client.files.create(file=("a", bytes(1_600_000)), purpose="batch")
    assert refused.value.status_code == 413
    monkeypatch.setattr(files, "MAX_FILES", 0)
    with pytest.raises(openai.APIStatusError, match="0") as refused:
        await world.client.files.create(file=("a", b"{}"), purpose="batch")
    assert refused.value.status_code == 507
    await world.runner.round()
    assert await stored_bytes(world) == 0


async def test_a_tenant_has_a_bound_of_batches_and_uploads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_ACTIVE", 1)
    await world.begin(request_line(1))
    with pytest.raises(openai.APIStatusError, match="running batches"):
        await world.begin(request_line(1))
    tenant = await world.controller.tenant()
    share = world.controller.context.uploads.share(tenant)
    for _ in range(4):
        await share.acquire()
    with pytest.raises(openai.RateLimitError) as refused:
        await world.upload(request_line(1))
    assert refused.value.response.headers["retry-after"] == "5"


async def stored_bytes(world: World) -> int:
    """What its batch files add to the tenant's stored bytes, and what they should."""
    tenant = await world.controller.tenant()
    c = tables.batch_files.c
    with world.controller.context.store.read() as sql:
        total = sql.execute(
            sa.select(tables.tenants.c.stored_bytes).where(tables.tenants.c.id == tenant)
        ).scalar_one()
        blobs = sql.execute(sa.select(sa.func.sum(tables.blobs.c.size_bytes))).scalar_one()
        sizes = sql.execute(sa.select(sa.func.sum(c.size_bytes))).scalar_one() or 0
    assert total - blobs == sizes
    return int(sizes)


# -- whose it is -----------------------------------------------------------------------------------
async def test_another_tenant_sees_neither_files_nor_batches(world: World) -> None:
    batch = await world.begin(request_line(1))
    file = (await world.client.batches.retrieve(batch)).input_file_id
    other = world.client_of(await world.controller.other_tenant())
    asked: list[Callable[[], Any]] = [
        lambda: other.files.retrieve(file),
        lambda: other.files.content(file),
        lambda: other.files.delete(file),
        lambda: other.batches.retrieve(batch),
        lambda: other.batches.cancel(batch),
        lambda: other.batches.create(
            input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ]
    for ask in asked:
        with pytest.raises(openai.NotFoundError):
            await ask()
    assert [one async for one in other.files.list()] == []
    assert [one async for one in other.batches.list()] == []
    nobody = world.client_of("pl_nobody")
    with pytest.raises(openai.AuthenticationError):
        await nobody.files.list()


async def test_a_key_of_one_function_sees_its_own_and_calls_it_alone(world: World) -> None:
    batch = await world.begin(request_line(1))
    file = (await world.client.batches.retrieve(batch)).input_file_id
    key = await world.controller.new_key(scope="invoke", app="search", function="words")
    bound = world.client_of(key)
    assert [one async for one in bound.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await bound.files.content(file)
    with pytest.raises(openai.NotFoundError):
        await bound.batches.retrieve(batch)
    with pytest.raises(openai.PermissionDeniedError):
        await world.begin(request_line(1), client=bound)
    rows = [
        request_line(n, url=CHAT, body={"model": model, "messages": []})
        for n, model in enumerate(("words", "search/hello", "other/words"))
    ]
    refused = await world.begin(*rows, endpoint=CHAT, client=bound)
    await world.rounds()
    found = await bound.batches.retrieve(refused)
    assert found.errors is not None
    assert [(one.code, one.line) for one in found.errors.data or ()] == [
        ("forbidden", 2),
        ("forbidden", 3),
    ]
    billing = world.client_of(await world.controller.new_key(scope="read-billing"))
    with pytest.raises(openai.PermissionDeniedError):
        await billing.files.list()


async def test_a_batch_of_a_revoked_key_stops(world: World) -> None:
    made = await world.controller.http.post("/v1/keys", json={"scope": "invoke"})
    mine = world.client_of(made.json()["secret"])
    count = runner.OF_TENANT + 5
    batch = await world.begin(*(request_line(n) for n in range(count)), client=mine)
    await world.rounds()
    gone = await world.controller.http.delete(f"/v1/keys/{made.json()['id']}")
    assert gone.status_code < 300, gone.text
    done = await world.finish(batch)
    assert done.status == "completed"
    assert done.errors.data[0].code == "unauthenticated"
    bad = await world.content(done.error_file_id)
    assert {one["error"]["code"] for one in bad} == {"unauthenticated"}
    assert len(bad) == 5
    assert len(await world.content(done.output_file_id)) == runner.OF_TENANT


async def test_a_suspended_tenants_batch_waits(world: World) -> None:
    key = await world.controller.other_tenant()
    other = world.client_of(key)
    http = world.controller.client(key)
    bundle = await http.put(
        f"/v1/blobs/{spec()['bundle']}", content=b"the source archive of an app"
    )
    assert bundle.status_code == 200
    await http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    batch = await world.begin(*(request_line(n) for n in range(3)), client=other)
    suspended = await world.controller.http.patch("/v1/tenants/acme", json={"suspended": True})
    assert suspended.status_code == 200, suspended.text
    await world.rounds()
    assert await world.activator.take() == []
    assert (await other.batches.retrieve(batch)).status == "validating"
    await world.controller.http.patch("/v1/tenants/acme", json={"suspended": False})
    await world.rounds()
    assert len(await world.activator.take()) == 3


# -- how batches end -------------------------------------------------------------------------------
async def test_a_cancelled_batch_keeps_answers_and_runs_nothing_more(world: World) -> None:
    count = runner.OF_TENANT + 20
    batch = await world.begin(*(request_line(n) for n in range(count)))
    await world.rounds()
    taken = await world.activator.take()
    assert len(taken) == runner.OF_TENANT
    answered, *rest = world.activator.held
    await world.activator.end([answered])
    cancelling = await world.client.batches.cancel(batch)
    assert cancelling.status == "cancelling"
    assert (await world.client.batches.cancel(batch)).status == "cancelling"
    await world.rounds()
    await world.activator.take()
    assert sorted(world.activator.cancelled) == sorted(rest)
    await world.activator.end(rest, state="CANCELLED", status=499, outcome="", result="")
    done = await world.finish(batch)
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    assert len(await world.content(done.output_file_id)) == 1
    bad = await world.content(done.error_file_id)
    assert len(bad) == count - 1
    assert {one["error"]["code"] for one in bad} == {"batch_cancelled"}
    assert world.activator.ran.total() == runner.OF_TENANT
    with pytest.raises(openai.ConflictError):
        await world.client.batches.cancel(batch)


async def test_calls_that_no_activator_has_end_with_their_batch_at_once(world: World) -> None:
    batch = await world.begin(request_line(1), request_line(2))
    await world.rounds()
    await world.client.batches.cancel(batch)
    await world.rounds()
    assert await world.activator.take() == []
    found = await world.client.batches.retrieve(batch)
    assert (found.status, found.output_file_id) == ("cancelled", None)


async def test_a_batch_that_is_cancelled_before_its_check_runs_nothing(world: World) -> None:
    batch = await world.begin(request_line(1))
    await world.client.batches.cancel(batch)
    await world.rounds()
    assert (await world.client.batches.retrieve(batch)).status == "cancelled"


async def test_a_batch_ends_at_its_window_though_an_activator_is_gone(world: World) -> None:
    batch = await world.begin(request_line(1), request_line(2))
    await world.rounds()
    await world.activator.take()
    world.controller.clock.now += DAY_S
    await world.rounds()
    assert (await world.client.batches.retrieve(batch)).status == "in_progress"
    world.controller.clock.now += runner.CANCEL_S + 1
    await world.rounds()
    found = await world.client.batches.retrieve(batch)
    assert found.status == "expired"
    bad = await world.content(found.error_file_id)
    assert {one["error"]["code"] for one in bad} == {"batch_expired"}
    await world.activator.end()  # too late: their lines have ended
    await world.rounds()
    assert await world.content(found.output_file_id) == []


async def test_a_spent_budget_ends_the_remaining_lines_by_name(world: World) -> None:
    count = runner.OF_TENANT + 50
    batch = await world.begin(*(request_line(n) for n in range(count)))
    await world.rounds()
    await world.activator.take()
    first, *_ = world.activator.held
    await world.activator.fail(402, "over-budget", [first])
    done = await world.finish(batch)
    assert done.status == "completed"
    assert done.errors.data[0].code == "over-budget"
    bad = await world.content(done.error_file_id)
    assert {one["error"]["code"] for one in bad} == {"over-budget"}
    assert len(bad) == 51
    assert done.request_counts.failed == 51


async def test_a_function_that_answers_402_stops_nothing(world: World) -> None:
    batch = await world.begin(request_line(1))
    await world.rounds()
    await world.activator.take()
    await world.activator.end(state="FAILED", status=402, outcome="ok")
    done = await world.finish(batch)
    assert done.errors is None


async def test_an_answer_that_is_too_large_says_so(world: World) -> None:
    batch = await world.begin(request_line(1))
    await world.rounds()
    await world.activator.take()
    await world.activator.end(result="x" * (batch_lines.MAX_RESULT_BYTES * 4 // 3 + 1))
    done = await world.finish(batch)
    (bad,) = await world.content(done.error_file_id)
    assert bad["error"]["code"] == "too-large"


# -- faults ----------------------------------------------------------------------------------------
async def everything_once(world: World, batch: str, count: int) -> None:
    """Each line is answered once, and each call ran once."""
    done = await world.finish(batch)
    assert done.status == "completed"
    found = await world.content(done.output_file_id)
    assert ids(found) == sorted(f"c{n}" for n in range(count))
    assert done.request_counts.completed == count
    assert len(world.activator.ran) == count
    assert set(world.activator.ran.values()) == {1}
    await stored_bytes(world)
    with world.controller.context.store.read() as sql:
        for table in (tables.batch_lines, tables.due_calls):
            assert sql.execute(sa.select(sa.func.count()).select_from(table)).scalar() == 0


STEPS = [
    (batches, "change"),
    (lines, "add"),
    (lines, "forget"),
    (files, "counted"),
    (files, "create"),
    (files, "finish"),
]


@pytest.mark.slow  # starts the process that parses after each kill
@pytest.mark.parametrize("module, name", STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_kill_within_a_transaction_loses_and_repeats_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, when: str
) -> None:
    count = runner.OF_TENANT + 4
    batch = await world.begin(*(request_line(n) for n in range(count)))
    real = getattr(module, name)
    kills = 0

    def killed(*args: Any, **options: Any) -> Any:
        nonlocal kills
        kills += 1
        if when == "before":
            raise Killed
        real(*args, **options)
        raise Killed

    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, killed)
            try:
                for _ in range(3):
                    await world.runner.round()
                    if await world.activator.take():
                        await world.activator.end()
            except Killed:
                await world.restart()
        await world.runner.round()  # one step further
    assert kills > 0
    await everything_once(world, batch, count)


@pytest.mark.slow  # starts the process that parses after each kill
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_kill_around_a_write_to_the_store_answers_no_line_twice(
    world: World, blobs: FaultyStore, when: str
) -> None:
    batch = await world.begin(*(request_line(n) for n in range(30)))
    await world.rounds()
    await world.activator.take()
    held = list(world.activator.held)
    for some in (held[:10], held[10:20], held[20:]):
        await world.activator.end(some)
        blobs.kill = when
        with pytest.raises(Killed):
            await world.rounds()
        blobs.kill = ""
        await world.restart()
    await everything_once(world, batch, 30)


async def test_an_end_that_is_reported_twice_counts_once(world: World) -> None:
    batch = await world.begin(request_line(0))
    await world.rounds()
    await world.activator.take()
    held = dict(world.activator.held)
    await world.activator.end()
    for _ in range(
        2
    ):  # the answer to the report was lost: before the answer is in a file, and after
        world.activator.held = dict(held)
        await world.activator.end(answer={"other": 1})
        world.activator.ran.clear()
        await world.rounds()
    world.activator.ran[next(iter(held))] = 1
    await everything_once(world, batch, 1)


async def test_calls_of_an_activator_that_is_gone_are_run_by_another(world: World) -> None:
    batch = await world.begin(*(request_line(n) for n in range(3)))
    await world.rounds()
    await world.activator.take()
    left = list(world.activator.held.values())
    await world.activator.end([next(iter(world.activator.held))])
    headers = {HEADER_PLATFORM_TOKEN: world.controller.context.key.token}
    for accepted in (2, 0):
        answer = await world.controller.http.put(
            DUE_PATH, json={"activator": "a-0", "calls": left}, headers=headers
        )
        assert answer.json() == {"accepted": accepted}
    world.activator.held.clear()
    world.activator.name = "a-1"
    assert {one["priority"] for one in await world.activator.take()} == {"batch"}
    await everything_once(world, batch, 3)


async def test_the_process_that_parses_may_die(world: World) -> None:
    batch = await world.begin(*(request_line(n) for n in range(3)))
    await world.runner.round()
    os.kill(world.runner.parser.pid, signal.SIGKILL)
    await world.rounds(2)
    await everything_once(world, batch, 3)


@pytest.mark.parametrize(
    "error",
    [ObjectStoreUnavailable("it does not answer"), ObjectStoreError("it is broken")],
    ids=["dead", "broken"],
)
async def test_a_store_that_is_away_holds_a_batch(
    world: World, blobs: FaultyStore, error: ObjectStoreError
) -> None:
    batch = await world.begin(*(request_line(n) for n in range(3)))
    for _ in range(3):
        blobs.error = error
        await world.rounds(2)
        found = await world.client.batches.retrieve(batch)
        if found.status == "completed":
            break
        assert found.status in ("validating", "in_progress")
        if await world.activator.take():
            await world.activator.end()
        blobs.error = None
        await world.rounds(2)
    blobs.error = None
    await everything_once(world, batch, 3)
    blobs.error = error
    with pytest.raises(openai.InternalServerError):
        await world.upload(request_line(1))


async def test_a_full_plan_ends_the_batch_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = runner.OF_TENANT + 4
    batch = await world.begin(*(request_line(n) for n in range(count)))
    await world.rounds()
    await world.activator.take()
    tenant = await world.controller.tenant()
    with world.controller.context.store.read() as sql:
        used = sql.execute(
            sa.select(tables.tenants.c.stored_bytes).where(tables.tenants.c.id == tenant)
        ).scalar_one()
    answer = await world.controller.http.patch(
        "/v1/tenants/default", json={"overrides": {"stored_bytes": used}}
    )
    assert answer.status_code == 200, answer.text
    done = await world.finish(batch)
    assert done.errors.data[0].code == "storage-quota"
    bad = await world.content(done.error_file_id)
    assert len(bad) == count
    assert {one["error"]["code"] for one in bad} == {"storage-quota"}
    with pytest.raises(openai.APIStatusError) as refused:
        await world.upload(request_line(1))
    assert refused.value.status_code == 507


async def test_a_lost_input_ends_a_batch(world: World, tmp_path: Path) -> None:
    batch = await world.begin(*(request_line(n) for n in range(runner.OF_TENANT + 10)))
    await world.rounds()
    for path in (tmp_path / "blobs" / "batch-files").rglob("*.0"):
        path.unlink()
    done = await world.finish(batch)
    assert done.errors.data[0].code == "content-lost"
    assert done.request_counts.completed == runner.OF_TENANT


# -- retention -------------------------------------------------------------------------------------
async def test_files_expire_but_not_under_a_running_batch(world: World, tmp_path: Path) -> None:
    file = await world.client.files.create(
        file=("a.jsonl", json.dumps(request_line(0)).encode()),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    made: Any = {"input_file_id": file.id, "endpoint": CALL, "completion_window": "24h"}
    batch = await world.client.batches.create(**made)
    with pytest.raises(openai.ConflictError, match=batch.id):
        await world.client.files.delete(file.id)
    world.controller.clock.now += 7200
    await world.runner.round()
    await everything_once(world, batch.id, 1)
    world.controller.clock.now += files.KEEP_S + DAY_S
    await world.runner.round()
    assert await stored_bytes(world) == 0
    assert list((tmp_path / "blobs" / "batch-files").rglob("*.0")) == []
    world.controller.clock.now += files.KEEP_S
    await world.runner.round()
    assert [one async for one in world.client.batches.list()] == []


async def test_an_upload_that_breaks_off_leaves_nothing(world: World) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield bytes(1_500_000)
        raise httpx.ReadError("gone")

    headers = {
        "content-type": "multipart/form-data; boundary=x",
        "authorization": f"Bearer {world.controller.key}",
    }
    answer = await world.controller.http.post("/v1/files", content=body(), headers=headers)
    assert answer.status_code == 500
    await world.runner.round()
    assert await stored_bytes(world) == 0
    with world.controller.context.store.read() as sql:
        assert dispatch_queue.has_claimable(sql, activator="a-0", now=2e9) is False

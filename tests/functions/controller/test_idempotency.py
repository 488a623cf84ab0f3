"""Idempotency keys of the control API: made once, answered twice; other requests, crashes and
secrets."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import anyio.to_thread
import httpx
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import transaction_hook
from pilotlight.controller.server import idempotency
from pilotlight.protocol import HEADER_REPLAYED
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused

KEY = {"idempotency-key": "order-1"}


async def make_key(
    controller: Controller, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    return await controller.http.post(
        "/v1/keys", json={"name": "ci", **body}, headers=headers or KEY
    )


def rows(controller: Controller) -> list[Any]:
    with controller.context.store.read() as sql:
        return list(sql.execute(sa.select(tables.idempotency_keys)).all())


async def test_a_change_that_is_asked_for_twice_is_made_once_and_answered_the_same(
    controller: Controller,
) -> None:
    first = await make_key(controller)
    again = await make_key(controller)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert HEADER_REPLAYED not in first.headers
    assert again.headers[HEADER_REPLAYED] == "true"
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert [key["name"] for key in (await controller.http.get("/v1/keys")).json()["keys"]].count(
        "ci"
    ) == 1


async def test_the_answer_is_kept_sealed_because_a_key_is_in_it(controller: Controller) -> None:
    secret = (await make_key(controller)).json()["secret"]
    (row,) = rows(controller)
    assert secret not in str(row)
    kept = json.loads(controller.context.key.answers.open(row.answer))
    assert secret in base64.b64decode(kept["body"]).decode()


async def test_another_body_or_path_under_the_same_key_is_a_conflict(
    controller: Controller,
) -> None:
    await make_key(controller)
    assert "a different request" in refused(await make_key(controller, name="other"), 409)
    other = await controller.http.post("/v1/environments", json={"name": "staging"}, headers=KEY)
    assert "a different request" in refused(other, 409)


async def test_keys_of_two_callers_are_two(controller: Controller) -> None:
    await make_key(controller)
    other = controller.client(await controller.new_key(scope="admin"))
    async with other as http:
        answer = await http.post("/v1/keys", json={"name": "mine"}, headers=KEY)
    assert answer.status_code == 201


async def test_what_failed_and_changed_nothing_may_be_asked_for_again(
    controller: Controller,
) -> None:
    missing = await controller.http.request("DELETE", "/v1/secrets/token", headers=KEY)
    assert missing.status_code == 404
    assert rows(controller) == []
    await controller.http.put("/v1/secrets/token", json={"value": "hush"})
    assert (
        await controller.http.request("DELETE", "/v1/secrets/token", headers=KEY)
    ).status_code == 204
    assert (await controller.http.request("DELETE", "/v1/secrets/token", headers=KEY)).headers[
        HEADER_REPLAYED
    ] == "true"


async def test_a_key_is_a_new_one_after_a_day(controller: Controller) -> None:
    first = await make_key(controller)
    controller.clock.now += idempotency.TTL_S + 1
    assert (await make_key(controller)).json()["id"] != first.json()["id"]
    with controller.context.store.write() as write:
        assert idempotency.purge(write, now=controller.clock.now + idempotency.TTL_S + 1) == 1


async def test_a_repeat_while_the_first_runs_is_told_to_come_again(controller: Controller) -> None:
    answers = await asyncio.gather(*(make_key(controller) for _ in range(5)))
    good = [answer for answer in answers if answer.status_code == 201]
    assert len({answer.json()["id"] for answer in good}) == 1
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 409)


async def test_a_request_whose_controller_was_killed_before_it_changed_anything_is_run(
    controller: Controller,
) -> None:
    await make_key(controller)
    # what a kill between the claim and the change leaves
    await anyio.to_thread.run_sync(_set_status, controller, 0)
    answer = await make_key(controller)
    assert (answer.status_code, HEADER_REPLAYED in answer.headers) == (201, False)


async def test_a_request_whose_controller_was_killed_after_its_change_is_never_run_again(
    controller: Controller,
) -> None:
    await make_key(controller)
    # what a kill between the change and its answer leaves
    await anyio.to_thread.run_sync(_set_status, controller, 1)
    assert "made its change" in refused(await make_key(controller), 409)


async def test_each_transaction_of_a_request_marks_its_claim(controller: Controller) -> None:
    inner = controller.context.store.write
    claim = idempotency.Claim(tenant="t-1", name="k-1/order-1", request_hash="h")
    with inner() as write:
        row = {
            "tenant": "t-1",
            "key": "k-1/order-1",
            "request_hash": "h",
            "status": 0,
            "content_type": "",
            "answer": "",
        }
        write.sql.execute(
            sa.insert(tables.idempotency_keys).values(**row, created_at=0.0, expires_at=9e9)
        )
    token = transaction_hook.set(idempotency._marking(claim))
    try:
        with inner():
            pass
    finally:
        transaction_hook.reset(token)
    assert [row.status for row in rows(controller)] == [1]


async def test_what_is_no_key_is_refused_and_strangers_are_told_nothing_else(
    controller: Controller,
) -> None:
    assert "printable" in refused(await make_key(controller, {"idempotency-key": "x" * 300}), 400)
    async with controller.client("pl_wrong") as http:
        assert (await http.post("/v1/keys", json={}, headers=KEY)).status_code == 401
    assert rows(controller) == []


async def test_a_body_over_the_bound_is_told_so(controller: Controller) -> None:
    huge = await controller.http.post("/v1/keys", content=b" " * (33 * 1024 * 1024), headers=KEY)
    assert huge.status_code == 413


async def test_reading_and_blobs_do_not_look_at_the_header(controller: Controller) -> None:
    assert (await controller.http.get("/v1/keys", headers=KEY)).status_code == 200
    assert rows(controller) == []


def _set_status(controller: Controller, status: int) -> None:
    with controller.context.store.write() as write:
        write.sql.execute(sa.update(tables.idempotency_keys).values(status=status))

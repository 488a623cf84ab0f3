"""What an earlier version sealed with the platform's key itself is readable after the controller's
next start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.reencryption import reencrypt_all
from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.crypto import SEALED_PREFIX
from tests.functions.controller.conftest import Controller

OTHER = Fernet(Fernet.generate_key())


def old_seal(home: Path, text: str) -> str:
    """As sealed before there were keys for purposes."""
    return Fernet((home / "platform.key").read_bytes().strip()).encrypt(text.encode()).decode()


def set_column(controller: Controller, column: sa.Column[str], text: str) -> None:
    with controller.context.store.write() as write:
        done = write.sql.execute(sa.update(column.table).values({column: text}))
        assert done.rowcount == 1


def value_of(controller: Controller, column: sa.Column[str]) -> str:
    with controller.context.store.read() as sql:
        return str(sql.execute(sa.select(column)).scalar_one())


async def create_secret(controller: Controller) -> None:
    answer = await controller.http.put("/v1/secrets/db", json={"values": {"PASSWORD": "old"}})
    assert answer.status_code < 300, answer.text


async def test_a_secret_of_an_earlier_version_opens_and_activators_learn_it_anew(
    controller: Controller,
) -> None:
    await create_secret(controller)
    key = controller.context.key
    set_column(
        controller,
        tables.secrets.c.sealed,
        old_seal(controller.context.config.paths.home, json.dumps({"PASSWORD": "p"})),
    )

    assert reencrypt_all(controller.context.store, key) == 1

    sealed = value_of(controller, tables.secrets.c.sealed)
    assert sealed.startswith(SEALED_PREFIX)
    assert json.loads(key.activator.secrets.open(sealed)) == {"PASSWORD": "p"}
    with controller.context.store.read() as sql:
        changes = [json.loads(text) for text in feed.read(sql, after=0, limit=1000).changes]
    assert [change["value"] for change in changes if change["kind"] == feed.SECRET] == [sealed]


async def test_sealing_again_does_nothing_the_second_time(controller: Controller) -> None:
    await create_secret(controller)
    set_column(
        controller, tables.secrets.c.sealed, old_seal(controller.context.config.paths.home, "{}")
    )
    assert reencrypt_all(controller.context.store, controller.context.key) == 1
    before = value_of(controller, tables.secrets.c.sealed)
    assert reencrypt_all(controller.context.store, controller.context.key) == 0
    assert value_of(controller, tables.secrets.c.sealed) == before


async def test_an_answer_under_an_idempotency_key_is_given_again_after_the_upgrade(
    controller: Controller,
) -> None:
    headers = {"idempotency-key": "once"}
    first = await controller.http.put(
        "/v1/secrets/db", json={"values": {"A": "b"}}, headers=headers
    )
    answers = controller.context.key.answers
    text = answers.open(value_of(controller, tables.idempotency_keys.c.answer))
    set_column(
        controller,
        tables.idempotency_keys.c.answer,
        old_seal(controller.context.config.paths.home, text),
    )

    assert reencrypt_all(controller.context.store, controller.context.key) == 1

    again = await controller.http.put(
        "/v1/secrets/db", json={"values": {"A": "b"}}, headers=headers
    )
    assert (again.status_code, again.json()) == (first.status_code, first.json())


async def test_what_another_key_sealed_stays_as_it_is_and_is_named(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    await create_secret(controller)
    foreign = OTHER.encrypt(b"{}").decode()
    set_column(controller, tables.secrets.c.sealed, foreign)
    assert reencrypt_all(controller.context.store, controller.context.key) == 0
    assert value_of(controller, tables.secrets.c.sealed) == foreign
    assert "event=not_resealed" in caplog.text
    assert "/main/db" in caplog.text


async def test_the_secret_of_a_webhook_of_an_earlier_version_still_signs(
    controller: Controller,
) -> None:
    object.__setattr__(controller.context.config, "settings", ControllerSettings(webhooks="any"))
    answer = await controller.http.put(
        "/v1/webhooks/ops", json={"url": "http://127.0.0.1:9/", "events": ["call.finished"]}
    )
    assert answer.status_code == 200, answer.text
    secret = str(answer.json()["secret"])
    set_column(
        controller,
        tables.webhooks.c.sealed_secret,
        old_seal(controller.context.config.paths.home, secret),
    )

    assert reencrypt_all(controller.context.store, controller.context.key) == 1

    assert (
        controller.context.key.webhooks.open(value_of(controller, tables.webhooks.c.sealed_secret))
        == secret
    )

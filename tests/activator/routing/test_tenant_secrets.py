from __future__ import annotations

import pytest

from pilotlight import errors
from pilotlight.protocol import FeedChange
from tests.fakes.routes import TENANT, TEST_KEY, empty_table, spec_of, target_of


def test_secrets_are_opened_only_for_the_function_that_names_them() -> None:
    table = empty_table()
    table.apply(
        FeedChange(
            seq=1,
            kind="secret",
            key=f"{TENANT}/main/db",
            value=TEST_KEY.secrets.seal('{"USER": "u", "PASSWORD": "p"}'),
        )
    )
    table.apply(
        FeedChange(
            seq=2,
            kind="secret",
            key=f"{TENANT}/main/TOKEN",
            value=TEST_KEY.secrets.seal('{"TOKEN": "plain"}'),
        )
    )

    assert table.secrets.env_of(target_of(spec_of())) == {}
    assert table.secrets.env_of(target_of(spec_of(secrets=("db", "TOKEN")))) == {
        "USER": "u",
        "PASSWORD": "p",
        "TOKEN": "plain",
    }
    with pytest.raises(errors.Unavailable, match="missing"):
        table.secrets.env_of(target_of(spec_of(secrets=("missing",))))


def test_a_secret_that_another_key_sealed_is_named_in_the_answer() -> None:
    table = empty_table()
    table.apply(
        FeedChange(seq=1, kind="secret", key=f"{TENANT}/main/db", value=TEST_KEY.replies.seal("{}"))
    )

    with pytest.raises(errors.Unavailable, match="secret 'db' cannot be decrypted"):
        table.secrets.env_of(target_of(spec_of(secrets=("db",))))


def test_function_gets_no_secret_of_another_tenant_or_environment() -> None:
    table = empty_table()
    for seq, owner in enumerate(("t-other/main", f"{TENANT}/staging")):
        sealed = TEST_KEY.secrets.seal('{"USER": "u"}')
        table.apply(FeedChange(seq=seq, kind="secret", key=f"{owner}/db", value=sealed))

    with pytest.raises(errors.Unavailable, match="secret 'db' does not exist"):
        table.secrets.env_of(target_of(spec_of(secrets=("db",))))

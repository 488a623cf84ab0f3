"""Keys made without a key: by whoever owns the home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import access_control
from pilotlight.controller.server import bootstrap
from pilotlight.errors import Forbidden, NotFound, Unauthenticated
from pilotlight.spec.identifiers import Scope
from tests.functions.controller.parts import ManualClock


@pytest.fixture
def config(tmp_path: Path, empty_database: bytes) -> Path:
    (tmp_path / "h/controller").mkdir(parents=True)
    (tmp_path / "h/controller/controller.db").write_bytes(empty_database)
    file = tmp_path / "platform.yaml"
    file.write_text(f"platform: {{home: {tmp_path}/h}}")
    return file


def test_an_operator_who_lost_every_key_makes_another_beside_a_running_controller(
    config: Path,
) -> None:
    assert bootstrap.first_admin_key(config)
    running = Store(f"sqlite:///{config.parent}/h/controller/controller.db", clock=ManualClock())
    try:
        made = bootstrap.operator_key(config, scope=Scope.ADMIN, name="found again")
        with running.read() as sql:
            principal = access_control.authenticate(
                sql, authorization=f"Bearer {made.secret}", environment=None, now=0.0
            )
            entry = audit_trail.entries(
                sql, audit_trail.AuditQuery(tenant=principal.tenant), limit=1
            )[0]
    finally:
        running.close()
    assert (principal.key, principal.scope, principal.tenant_name) == (
        made.record.id,
        Scope.ADMIN,
        "default",
    )
    assert (entry["actor"], entry["action"], entry["subject"]) == (
        "platform",
        "key.create",
        made.record.id,
    )


def test_a_key_of_the_operator_may_be_small_and_short_lived(config: Path) -> None:
    bootstrap.first_admin_key(config)
    made = bootstrap.operator_key(config, scope=Scope.INVOKE, environment="main", expires_in_s=60)
    assert (made.record.scope, made.record.environment) == ("invoke", "main")
    store = Store(f"sqlite:///{config.parent}/h/controller/controller.db", clock=ManualClock())
    with store.read() as sql, pytest.raises(Unauthenticated, match="expired"):
        access_control.authenticate(
            sql, authorization=f"Bearer {made.secret}", environment=None, now=made.created_at + 61
        )
    store.close()


def test_where_no_platform_has_been_there_is_nothing_to_make_a_key_for(config: Path) -> None:
    with pytest.raises(NotFound, match="there is no platform in"):
        bootstrap.operator_key(config, scope=Scope.ADMIN)  # migrated, without a tenant
    (config.parent / "h/controller/controller.db").unlink()
    with pytest.raises(NotFound, match="there is no platform in"):
        bootstrap.operator_key(config, scope=Scope.ADMIN)
    assert not (config.parent / "h/controller/controller.db").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_another_users_home_is_refused(config: Path) -> None:
    (config.parent / "h").chmod(0o500)
    with pytest.raises(Forbidden, match="belongs to another user"):
        bootstrap.operator_key(config, scope=Scope.ADMIN)

"""The API keys of people who signed in by an issuer: made for a sign-in, with its rights, until it
ends. They are revoked, listed and audited as other keys are; their maker is the person."""

from __future__ import annotations

from enum import StrEnum

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import access_control, api_keys, sessions, tenants
from pilotlight.controller.identity.access_control import SIGN_IN_ACTOR, Principal
from pilotlight.controller.identity.api_keys import KeyRestrictions, NewKey
from pilotlight.controller.sign_in.issuers import Identity
from pilotlight.errors import Conflict, Forbidden, NotFound

MAX_OF_PERSON = 10
"""Sign-ins of a person in force; one more ends the oldest."""
_TABLE = tables.api_keys


class Means(StrEnum):
    """By what a person signed in, as the names of keys say it."""

    DASHBOARD = "dashboard"
    COMMAND_LINE = "command line"


def actor_of(identity: Identity) -> str:
    """Return the maker of a person's keys, as the audit log names it."""
    return f"{SIGN_IN_ACTOR}{identity.issuer}:{identity.subject}"


def create(write: Write, identity: Identity, means: Means, *, request: str = "") -> NewKey:
    """Create the key of a sign-in, and end the person's oldest ones beyond MAX_OF_PERSON. Raises
    Forbidden, if the tenant or the environment of the rule does not exist, or the tenant is
    deleted."""
    try:
        tenant = str(tenants.find_existing(write.sql, name=identity.tenant).id)
        _end_oldest(write, tenant, actor_of(identity), request)
        return api_keys.create(
            write,
            tenant=tenant,
            scope=identity.scope,
            actor=actor_of(identity),
            reach=KeyRestrictions(environment=identity.environment),
            name=f"{identity.name} ({means})",
            expires_in_s=identity.lasts_s,
            request=request,
        )
    except (Conflict, NotFound) as e:
        raise Forbidden(
            f"issuers.{identity.issuer}.sign_in: {e}: ask the platform's operator"
        ) from e


def create_for_dashboard(write: Write, identity: Identity, *, request: str = "") -> Principal:
    """Create the key of a session of the dashboard, and return its caller. Raises Forbidden."""
    made = create(write, identity, Means.DASHBOARD, request=request)
    caller = access_control.find_principal(
        write.sql, _TABLE.c.id == made.record.id, environment=None, now=write.now
    )
    return sessions.require_dashboard_access(caller)


def end_dashboards(write: Write, key_id: str) -> None:
    """Revoke a key that was made for a session of the dashboard, which ends; no other key."""
    row = write.sql.execute(sa.select(_TABLE).where(_TABLE.c.id == key_id)).first()
    if row is None or not row.created_by.startswith(SIGN_IN_ACTOR):
        return
    if row.name.endswith(f"({Means.DASHBOARD})"):
        api_keys.revoke(write, tenant=row.tenant, key_id=key_id, actor=row.created_by)


def _end_oldest(write: Write, tenant: str, actor: str, request: str) -> None:
    in_force = (
        (_TABLE.c.tenant == tenant)
        & (_TABLE.c.created_by == actor)
        & _TABLE.c.revoked_at.is_(None)
        & (_TABLE.c.expires_at > write.now)
    )
    newest_first = sa.select(_TABLE.c.id).where(in_force).order_by(_TABLE.c.created_at.desc())
    surplus = newest_first.offset(MAX_OF_PERSON - 1)
    for key_id in write.sql.execute(surplus).scalars().all():
        api_keys.revoke(write, tenant=tenant, key_id=key_id, actor=actor, request=request)

"""Re-encryption of what an earlier version sealed with the platform's key itself; now each purpose
has its own key (`pilotlight.core.crypto`).

It runs at the controller's start, before it serves. Secrets are published in the feed again, so
that activators, which do not have the platform's key, can open them."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.core.crypto import SEALED_PREFIX, DecryptionFailed, PlatformKey, Sealer

log = logging.getLogger(__name__)


def reencrypt_all(store: Store, key: PlatformKey) -> int:
    """Seal unmarked texts again and return their number. A text that the platform's key does not
    open stays unchanged, with a warning."""
    columns = {
        tables.budgets.c.sealed_secret: key.webhooks,
        tables.webhooks.c.sealed_secret: key.webhooks,
        tables.idempotency_keys.c.answer: key.answers,
    }
    with store.write() as write:
        count = sum(
            _reseal_column(write, key, column, sealer) for column, sealer in columns.items()
        )
        count += _reseal_secrets(write, key)
    if count:
        log.info("event=resealed texts=%d", count)
    return count


def _reseal_column(write: Write, key: PlatformKey, column: sa.Column[str], sealer: Sealer) -> int:
    count = 0
    for (text,) in write.sql.execute(
        sa.select(column).distinct().where(_is_unmarked(column))
    ).all():
        fresh = _resealed(key, text, sealer, where=str(column))
        if fresh is not None:
            write.sql.execute(sa.update(column.table).where(column == text).values({column: fresh}))
            count += 1
    return count


def _reseal_secrets(write: Write, key: PlatformKey) -> int:
    table, count = tables.secrets, 0
    for row in write.sql.execute(sa.select(table).where(_is_unmarked(table.c.sealed))).all():
        fresh = _resealed(
            key,
            row.sealed,
            key.activator.secrets,
            where=f"secret {row.tenant}/{row.environment}/{row.name}",
        )
        if fresh is None:
            continue
        is_it = (
            (table.c.tenant == row.tenant)
            & (table.c.environment == row.environment)
            & (table.c.name == row.name)
        )
        write.sql.execute(sa.update(table).where(is_it).values(sealed=fresh))
        feed.append(write, feed.SECRET, f"{row.tenant}/{row.environment}/{row.name}", fresh)
        count += 1
    return count


def _is_unmarked(column: sa.Column[str]) -> sa.ColumnElement[bool]:
    return column.is_not(None) & (column != "") & ~column.startswith(SEALED_PREFIX, autoescape=True)


def _resealed(key: PlatformKey, text: str, sealer: Sealer, *, where: str) -> str | None:
    try:
        return sealer.seal(key.open_unmarked(text))
    except DecryptionFailed as e:
        log.warning("event=not_resealed what=%s error=%s", where, e)
        return None

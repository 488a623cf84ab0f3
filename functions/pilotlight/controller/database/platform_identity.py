"""The platform's identity: an id that was made with its database, by which it knows its objects in
a cluster, and the ids of the platforms whose objects it took over.

A controller with a new database would otherwise take every function in the cluster for a deleted
one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.settings import PLATFORM_ID, UNLABELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformIdentity:
    """Attributes:
    id: `p-` and 16 hex digits.
    adopted: ids of platforms whose objects are ours, possibly `UNLABELLED`.
    """

    id: str
    adopted: frozenset[str] = frozenset()

    def owns(self, platform: str) -> bool:
        """Whether objects of `platform` (an id, or `UNLABELLED`) are ours."""
        return platform == self.id or platform in self.adopted


def read(sql: sa.Connection) -> PlatformIdentity:
    """Return the platform's identity."""
    return PlatformIdentity(
        id=sql.execute(sa.select(tables.platform.c.id)).scalar_one(),
        adopted=frozenset(sql.scalars(sa.select(tables.adopted_platforms.c.id))),
    )


def adopt(
    write: Write, platforms: Iterable[str], *, tenant: str, actor: str, request: str = ""
) -> None:
    """Take over all objects of these platforms (ids, or `UNLABELLED`) in the cluster, for good.
    Raises InvalidInput."""
    known = read(write.sql)
    for platform in platforms:
        if platform != UNLABELLED and not PLATFORM_ID.match(platform):
            raise InvalidInput(
                f"{platform!r} is not a platform's id: `p-` and 16 hex digits, or {UNLABELLED!r}",
                parameter="platform",
                hint="`pilotlight cluster show` lists whose objects are in the cluster.",
            )
        if known.owns(platform):
            continue
        row = {"id": platform, "adopted_at": write.now, "adopted_by": actor}
        write.sql.execute(sa.insert(tables.adopted_platforms).values(**row))
        audit_trail.record(
            write,
            tenant=tenant,
            actor=actor,
            action="cluster.adopt",
            subject=platform,
            after={"platform": known.id},
            request=request,
        )

"""References to an app, with the SQL conditions of its rows, and to an environment, both with the
actor and request of a change."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.registry import launch_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRef:
    """An app, and the key and request that change it.

    Attributes:
        uid: the tenant's uid on nodes, part of every launch spec.
        actor: id of the key, for the audit log.
        request: id of the request, for the audit log.
    """

    tenant: str
    uid: int | None
    environment: str
    app: str
    actor: str
    request: str = ""

    @property
    def subject(self) -> str:
        """The app's name in the audit log."""
        return f"{self.environment}/{self.app}"

    def function_id(self, function: str) -> str:
        """The id of a function of the app, whether it exists or not."""
        return launch_spec.function_id(
            tenant=self.tenant, environment=self.environment, app=self.app, function=function
        )

    def is_app(self) -> tuple[sa.ColumnElement[bool], ...]:
        """SQL conditions that select the app's row of `apps`."""
        table = tables.apps
        return (
            table.c.tenant == self.tenant,
            table.c.environment == self.environment,
            table.c.name == self.app,
        )

    def in_app(self) -> tuple[sa.ColumnElement[bool], ...]:
        """SQL conditions that select the app's rows of `functions`."""
        table = tables.functions
        return (
            table.c.tenant == self.tenant,
            table.c.environment == self.environment,
            table.c.app == self.app,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRef:
    """An environment of a tenant, and the key and request that change it, for the audit log."""

    tenant: str
    environment: str
    actor: str = ""
    request: str = ""

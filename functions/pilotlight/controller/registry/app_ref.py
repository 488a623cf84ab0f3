"""Where an app is, and who changes it: what every change of the registry needs to know, and the
conditions that find its rows."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.registry import launch_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRef:
    """Where an app lives, and who changes it.

    Attributes:
        uid: the tenant's uid on nodes, which launches carry.
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
        """Its name in the audit log."""
        return f"{self.environment}/{self.app}"

    def function_id(self, function: str) -> str:
        """The id of a function of the app, whether it is there or not."""
        return launch_spec.function_id(
            tenant=self.tenant, environment=self.environment, app=self.app, function=function
        )

    def is_app(self) -> tuple[sa.ColumnElement[bool], ...]:
        """Conditions that find its row of `apps`."""
        table = tables.apps
        return (
            table.c.tenant == self.tenant,
            table.c.environment == self.environment,
            table.c.name == self.app,
        )

    def in_app(self) -> tuple[sa.ColumnElement[bool], ...]:
        """Conditions that find its rows of `functions`."""
        table = tables.functions
        return (
            table.c.tenant == self.tenant,
            table.c.environment == self.environment,
            table.c.app == self.app,
        )

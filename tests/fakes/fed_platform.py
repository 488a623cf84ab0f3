"""A platform's feed, written by hand: tenants, functions and secrets, without a deploy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import feed, platform_identity, tables
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.platform_identity import PlatformIdentity
from pilotlight.controller.database.store import Store
from pilotlight.controller.registry import launch_spec
from pilotlight.core.crypto import PlatformKey
from pilotlight.protocol import TenantRecord
from pilotlight.spec import traffic
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.traffic import TrafficDocument
from tests.fakes.databases import empty_sqlite

ACME = TenantRecord(id="t-0123456789ab", name="acme", uid=20_001, plan={"instances": 20, "gpus": 4})
CLOCK_S = 1_800_000_000.0


def spec(name: str = "embed", **changes: Any) -> FunctionSpec:
    """A small function."""
    return FunctionSpec(
        **{
            "name": name,
            "module": "app",
            "qualname": name,
            "bundle": "b" * 64,
            "methods": (MethodSpec(),),
            **changes,
        }
    )


class FedPlatform:
    """Owner: the test. `notifier` rings with every change; `close` ends it."""

    def __init__(self, home: Path, *, notifier: ChangeNotifier) -> None:
        self.notifier = notifier
        self.key = PlatformKey.load_or_create(home / "platform.key")
        self.store = Store(
            empty_sqlite(home / "controller.db"), clock=lambda: CLOCK_S, on_fed=notifier.ring
        )

    def identity(self) -> PlatformIdentity:
        """Who it is."""
        with self.store.read() as sql:
            return platform_identity.read(sql)

    def renewed(self, id: str) -> None:
        """Its database was replaced by another platform's."""
        with self.store.write() as write:
            write.sql.execute(sa.update(tables.platform).values(id=id))

    def adopt(self, *platforms: str) -> None:
        """Take over what these made in the cluster."""
        with self.store.write() as write:
            platform_identity.adopt(write, platforms, tenant=ACME.id, actor="k-1")
        self.notifier.ring()

    def close(self) -> None:
        """Close the database."""
        self.store.close()

    def tenant(self, record: TenantRecord = ACME) -> None:
        """A tenant, or a change of it."""
        self._feed((feed.TENANT, record.id, asdict(record)))

    def no_tenant(self, record: TenantRecord = ACME) -> None:
        """The tenant is gone."""
        self._feed((feed.TENANT, record.id, None))

    def function(self, specs: Mapping[str, FunctionSpec] | FunctionSpec, **how: Any) -> str:
        """Deploy (see `document_of`); returns the function's id."""
        path, route = document_of(specs, **how)
        self._feed((feed.FUNCTION, path, route))
        return str(route["id"])

    def functions(self, documents: Mapping[str, Any]) -> None:
        """Many at once: path → document."""
        self._feed(*((feed.FUNCTION, path, route) for path, route in documents.items()))

    def no_function(self, path: str) -> None:
        """`<tenant>/<environment>/<app>/<function>` is gone."""
        self._feed((feed.FUNCTION, path, None))

    def secret(
        self,
        name: str,
        values: Mapping[str, str],
        *,
        tenant: str = ACME.id,
        environment: str = "main",
    ) -> None:
        """A secret's values."""
        self._feed(
            (
                feed.SECRET,
                f"{tenant}/{environment}/{name}",
                self.key.activator.secrets.seal(json.dumps(dict(values))),
            )
        )

    def no_secret(self, name: str, *, tenant: str = ACME.id, environment: str = "main") -> None:
        """The secret is gone."""
        self._feed((feed.SECRET, f"{tenant}/{environment}/{name}", None))

    def _feed(self, *changes: tuple[str, str, Any]) -> None:
        with self.store.write() as write:
            for kind, key, value in changes:
                feed.append(write, kind, key, value)


def document_of(
    specs: Mapping[str, FunctionSpec] | FunctionSpec,
    *,
    app: str = "search",
    weights: Mapping[str, int] | None = None,
    stopped: bool = False,
    tenant: TenantRecord = ACME,
    environment: str = "main",
    **document: Any,
) -> tuple[str, dict[str, Any]]:
    """A function's key in the feed, and its route. `specs`: by revision, or one for `v1-000001`;
    `document`: of the traffic."""
    by_name = specs if isinstance(specs, Mapping) else {"v1-000001": specs}
    name = next(iter(by_name.values())).name
    whole = weights or {next(iter(by_name)): 100}
    told = traffic.with_weights(TrafficDocument(salt=f"{app}/{name}", **document), whole)
    route = launch_spec.function_route(
        tenant=tenant.id,
        uid=tenant.uid,
        environment=environment,
        app=app,
        function=name,
        document=told,
        specs=by_name,
        stopped=stopped,
        snapshots=True,
        variables={},
    )
    return f"{tenant.id}/{environment}/{app}/{name}", route

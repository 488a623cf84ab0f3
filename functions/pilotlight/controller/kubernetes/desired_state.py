"""The desired state of the cluster: functions, tenants and secrets from the feed that activators
also follow."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pilotlight.controller.database.feed import FUNCTION, SECRET, TENANT, Page
from pilotlight.controller.database.platform_identity import PlatformIdentity
from pilotlight.core.crypto import DecryptionFailed, PlatformKey
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.manifests.revisions import ParsedRevision, RevisionOf
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute, TenantRecord
from pilotlight.spec.function import FunctionSpec
from snapshotter.agent.launch_signature import KEY_LABEL, LaunchSigner

log = logging.getLogger(__name__)


class DesiredState:
    """The latest documents. Owner: the reconciler's event loop.

    Keys of work: a function's id, or `<tenant id>/<environment>` for a namespace.
    """

    def __init__(
        self,
        *,
        settings: ClusterSettings,
        platform: PlatformIdentity,
        key: PlatformKey,
        node_key: PlatformKey | None = None,
    ) -> None:
        """`node_key`: seals launch documents for the node agents; None: `key`, which they then
        use."""
        self.platform = platform
        self._grants = LaunchSigner((node_key or key).derived(KEY_LABEL))
        self.settings = settings
        self.tenants: dict[str, TenantRecord] = {}
        self.functions: dict[str, FunctionRoute] = {}
        self._paths: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        self._sealed: dict[str, str] = {}
        self._parsed: dict[str, dict[str, ParsedRevision]] = {}
        self._tenancies: dict[tuple[str, str, str], Tenancy] = {}
        self._key = key

    def __repr__(self) -> str:
        return f"<DesiredState {len(self.functions)} functions of {len(self.tenants)} tenants>"

    def take(self, page: Page) -> set[str]:
        """Apply a page of the feed. Returns the work keys that may have changed."""
        changed: set[str] = set()
        if page.reset:
            changed |= {*self.functions, *self.places()}
            self.tenants, self.functions, self._paths, self._sealed, self._unreadable = (
                {},
                {},
                {},
                {},
                {},
            )
            self._parsed.clear()
            self._tenancies.clear()
        for text in page.changes:
            change = json.loads(text)
            changed |= self._apply(change["kind"], change["key"], change["value"])
        return changed

    def places(self) -> set[str]:
        """`<tenant id>/<environment>` of every function."""
        return {f"{route.tenant}/{route.environment}" for route in self.functions.values()}

    def is_unreadable(self, function: str) -> bool:
        """Whether a route that cannot be parsed belongs, or may belong, to the function. Such a
        function must not be deleted."""
        return any(whose in (function, "") for whose in self._unreadable.values())

    def tenancy(self, tenant: str, environment: str) -> Tenancy | None:
        """Return a tenant in an environment; None if the tenant was deleted. Raises
        InvalidInput."""
        record = self.tenants.get(tenant)
        if record is None:
            return None
        key = (tenant, environment, self.platform.id)
        known = self._tenancies.get(key)
        if known is None:
            made = Tenancy.of(
                record,
                environment=environment,
                settings=self.settings,
                platform=self.platform.id,
            )
            known = self._tenancies[key] = replace(made, grants=self._grants)
        return known

    def revision(self, route: FunctionRoute, tenancy: Tenancy, revision: str) -> RevisionOf:
        """Return a revision of a route of `functions`, parsed once for as long as the route is
        that function's. Raises InvalidInput."""
        parsed = self._parse(route, revision)
        return RevisionOf.of(route, tenancy, revision, parsed=parsed)

    def spec(self, route: FunctionRoute, revision: str) -> FunctionSpec:
        """Return a revision's spec; see `revision`. Raises InvalidInput."""
        return self._parse(route, revision).spec

    def _parse(self, route: FunctionRoute, revision: str) -> ParsedRevision:
        if self.functions.get(route.id) is not route:  # an earlier one, of which a task is not done
            return ParsedRevision.of(route, revision)
        parsed = self._parsed.setdefault(route.id, {})
        if revision not in parsed:
            parsed[revision] = ParsedRevision.of(route, revision)
        return parsed[revision]

    def has_secret(self, path: str) -> bool:
        """Whether the platform holds the secret `<tenant id>/<environment>/<name>`."""
        return path in self._sealed

    def secret(self, tenant: str, environment: str, name: str) -> Mapping[str, str]:
        """Return the variables of a secret. Raises InvalidInput if it does not exist or was sealed
        with another key."""
        sealed = self._sealed.get(f"{tenant}/{environment}/{name}")
        if sealed is None:
            raise InvalidInput(
                f"secret {name!r} does not exist",
                hint=f"Create it with `pilotlight secret create {name} KEY=VALUE`.",
            )
        try:
            values: Mapping[str, str] = json.loads(self._key.activator.secrets.open(sealed))
        except (DecryptionFailed, ValueError) as e:
            raise InvalidInput(
                f"secret {name!r} was sealed with another platform's key",
                hint="Store its values again.",
            ) from e
        return values

    def _apply(self, kind: str, key: str, value: object) -> set[str]:
        if kind == FUNCTION:
            return self._function(key, value)
        if kind == TENANT:
            return self._tenant(key, value)
        if kind == SECRET:
            return self._secret(key, value)
        return set()

    def _function(self, path: str, value: object) -> set[str]:
        known = self._paths.pop(path, None)
        unread = self._unreadable.pop(path, None)
        if value is None:
            if known is not None:
                self._set(known, None)
            return {one for one in (known, unread) if one}
        try:
            if not isinstance(value, Mapping):
                raise TypeError("a route must be an object")
            route = FunctionRoute.from_json(value)
        except (KeyError, TypeError, ValueError) as e:
            # the last valid route stays in effect, as in activators
            log.error("event=route_broken path=%s error=%r", path, e)
            if known is not None:
                self._paths[path] = known
                return set()
            unread = self._unreadable[path] = (
                str(value.get("id") or "") if isinstance(value, Mapping) else ""
            )
            return {unread} if unread else set()
        self._paths[path] = route.id
        self._set(route.id, route)
        return {route.id}

    def _set(self, function: str, route: FunctionRoute | None) -> None:
        """Set or delete a function's route, and keep what was parsed of revisions that both have: a
        change of traffic parses nothing again."""
        before, parsed = self.functions.pop(function, None), self._parsed.pop(function, {})
        if route is None:
            return
        self.functions[function] = route
        if before is not None:
            self._parsed[function] = {
                name: one
                for name, one in parsed.items()
                if name in route.revisions and route.revisions[name] == before.revisions[name]
            }

    def _tenant(self, tenant: str, value: object) -> set[str]:
        record = TenantRecord(**value) if isinstance(value, Mapping) else None
        if record is not None and not record.deleted:
            self.tenants[tenant] = record
        else:
            self.tenants.pop(tenant, None)
        self._tenancies = {key: one for key, one in self._tenancies.items() if key[0] != tenant}
        those = [route for route in self.functions.values() if route.tenant == tenant]
        return {
            *(route.id for route in those),
            *(f"{tenant}/{route.environment}" for route in those),
        }

    def _secret(self, path: str, value: object) -> set[str]:
        if isinstance(value, str):
            self._sealed[path] = value
        else:
            self._sealed.pop(path, None)
        tenant, environment, name = path.split("/", 2)
        there = (
            route
            for route in self.functions.values()
            if (route.tenant, route.environment) == (tenant, environment)
        )
        return {
            f"{tenant}/{environment}",
            *(route.id for route in there if name in secrets_of(route)),
        }


def secrets_of(route: FunctionRoute) -> list[str]:
    """Names of the secrets that any revision of the function declares."""
    found: set[str] = set()
    for body in route.revisions.values():
        names: Iterable[str] = body["spec"].get("secrets") or ()
        found.update(names)
    return sorted(found)

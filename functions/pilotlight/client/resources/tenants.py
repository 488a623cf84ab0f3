"""Who may do what, and how much of it, as typed methods of the client: keys, secrets, environments,
tenants, plans, quotas, audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.weights import WeightsResources
from pilotlight.errors import Conflict, NotFound

AUDIT_PAGE = 500
"""Entries asked for at once: some hundred KiB."""


class TenantResources(WeightsResources):
    """Part of `pilotlight.client.client.Client`."""

    # -- secrets -----------------------------------------------------------------------------------
    def secrets(self) -> list[Json]:
        """The environment's secrets: names and variable names, never values."""
        return self._list("/v1/secrets", "secrets")

    def secret(self, name: str) -> Json:
        """One secret's description, without values. Raises NotFound."""
        for found in self.secrets():
            if found["name"] == name:
                return found
        raise NotFound(f"there is no secret {name!r} in this environment")

    def put_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Create or replace a secret: environment variables that instances see after their next
        start."""
        self._transport.request(
            "PUT", f"/v1/secrets/{_quoted(name)}", json={"values": dict(values)}
        )

    def delete_secret(self, name: str) -> None:
        """Remove a secret."""
        self._transport.request("DELETE", f"/v1/secrets/{_quoted(name)}")

    # -- keys --------------------------------------------------------------------------------------
    def whoami(self) -> Json:
        """The key that asks: its tenant, scope, and what it is bound to."""
        return self._get("/v1/whoami")

    def keys(self) -> list[Json]:
        """API keys: ids, scopes, reach and dates, never the secrets."""
        return self._list("/v1/keys", "keys")

    def key(self, key_id: str) -> Json:
        """One of them. Raises NotFound."""
        return self._get(_key_path(key_id))

    def create_key(
        self,
        *,
        scope: str = "invoke",
        name: str = "",
        environment: str | None = None,
        app: str | None = None,
        function: str | None = None,
        quotas: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
        tenant: str | None = None,
    ) -> Json:
        """A new API key; `secret` in the answer is its text, shown this one time. `ttl_s` None: it
        never expires.

        `environment`, `app` and `function` bind it to one of them; `quotas` bound what is called
        with it. `tenant`: another one's, which lost its last; for administrators of the platform.
        """
        path = "/v1/keys" if tenant is None else f"/v1/tenants/{_quoted(tenant)}/keys"
        reach = {
            "environment": environment,
            "app": app,
            "function": function,
            "expires_in_s": ttl_s,
            "quotas": quotas or None,
        }
        return self._change("POST", path, {"scope": scope, "name": name, **without_none(reach)})

    def set_key_quotas(self, key_id: str, quotas: Mapping[str, Any]) -> Json:
        """Let these be a key's quotas; {} takes them away."""
        return self._change("PATCH", _key_path(key_id), {"quotas": dict(quotas)})

    def set_key_expiry(self, key_id: str, *, ttl_s: float | None, force: bool = False) -> Json:
        """Let a key expire `ttl_s` seconds from now; None: never. Raises Conflict for the last
        admin key of a tenant, unless `force`."""
        path = f"{_key_path(key_id)}?force=true" if force else _key_path(key_id)
        return self._change("PATCH", path, {"expires_in_s": ttl_s})

    def rotate_key(self, key_id: str, *, grace_s: float = 0.0) -> Json:
        """A new key of the same reach, as `create_key` answers; the old one ends after `grace_s`, 0
        = now. Raises Conflict."""
        return self._change("POST", f"{_key_path(key_id)}:rotate", {"grace_s": grace_s})

    def revoke_key(self, key_id: str, *, force: bool = False) -> None:
        """Revoke an API key at once. Raises Conflict for the last admin key of a tenant, unless
        `force`."""
        self._transport.request(
            "DELETE", _key_path(key_id), params={"force": "true"} if force else None
        )

    # -- environments ------------------------------------------------------------------------------
    def environments(self) -> list[Json]:
        """This tenant's environments."""
        return self._list("/v1/environments", "environments")

    def create_environment(self, name: str) -> None:
        """Create an environment; harmless when it is there."""
        with contextlib.suppress(Conflict):
            self._transport.request(
                "POST", "/v1/environments", json={"name": name}, repeatable=True
            )

    def delete_environment(self, name: str) -> None:
        """Delete an environment with everything in it."""
        self._transport.request("DELETE", f"/v1/environments/{_quoted(name)}")

    # -- plans and tenants -------------------------------------------------------------------------
    def plans(self) -> Json:
        """`{"plans": [Plan…], "default": name}`."""
        return self._get("/v1/plans")

    def own_tenant(self) -> Json:
        """This key's tenant: its plan, what that means for it (`terms`), and what it uses."""
        return self._get("/v1/tenant")

    def tenants(self) -> list[Json]:
        """Every tenant, for administrators of the platform."""
        return self._list("/v1/tenants", "tenants")

    def tenant(self, name: str) -> Json:
        """One tenant and its terms, for administrators of the platform. Raises NotFound."""
        return self._get(f"/v1/tenants/{_quoted(name)}")

    def create_tenant(
        self, name: str, *, plan: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Json:
        """A new tenant; `key.secret` in the answer is its first admin key, shown this one time.
        Raises Conflict."""
        body = {"name": name, **without_none({"plan": plan}), "overrides": dict(overrides or {})}
        return self._change("POST", "/v1/tenants", body)

    def change_tenant(
        self,
        name: str,
        *,
        plan: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        clear: Sequence[str] | Literal["all"] = (),
        suspended: bool | None = None,
    ) -> Json:
        """Another plan, overrides of single keys of it, `clear` of some, or suspended; what is not
        named stays as it is."""
        given = clear if clear == "all" else list(clear)
        body = {
            **without_none({"plan": plan, "suspended": suspended}),
            "overrides": dict(overrides or {}),
            "clear": given,
        }
        return self._change("PATCH", f"/v1/tenants/{_quoted(name)}", body)

    # -- quotas ------------------------------------------------------------------------------------
    def quotas(self) -> Json:
        """`{"tenant": Quotas, "plan": name, "functions": […], "keys": […]}`: what bounds this
        tenant, and what it bounds itself."""
        return self._get("/v1/quotas")

    def function_quotas(self, app: str, function: str) -> Json:
        """A function's own quotas."""
        return dict(self._get(_function_path(app, function))["quotas"])

    def set_function_quotas(self, app: str, function: str, quotas: Mapping[str, Any]) -> Json:
        """Let these be a function's own quotas; {} takes them away."""
        return self._change("PUT", _function_path(app, function), dict(quotas))

    # -- audit log ---------------------------------------------------------------------------------
    def audit(self, *, limit: int | None = None, **filters: str | float | None) -> Iterator[Json]:
        """Who changed what, newest first, page by page; at most `limit`.

        `filters`: actor, action (`key.*`: all that begin so), subject, address, since and until
        (seconds since the epoch), and for administrators of the platform tenant (a name, `*` =
        all)."""
        before_id, left = None, limit
        while left is None or left > 0:
            page = self._get(
                "/v1/audit",
                before_id=before_id,
                limit=min(AUDIT_PAGE, left or AUDIT_PAGE),
                **filters,
            )
            yield from page["entries"]
            before_id = page["before_id"]
            if before_id is None:
                return
            left = None if left is None else left - len(page["entries"])

    def _change(self, method: str, path: str, body: Mapping[str, Any]) -> Json:
        return dict(self._transport.request(method, path, json=body).json())


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _key_path(key_id: str) -> str:
    return f"/v1/keys/{_quoted(key_id)}"


def _function_path(app: str, function: str) -> str:
    return f"/v1/quotas/functions/{_quoted(app)}/{_quoted(function)}"

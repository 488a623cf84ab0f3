"""Client methods for access and limits: secrets, keys, environments, plans, tenants, quotas and the
audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pilotlight.client.errors import error_from_response
from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.collections import CollectionResources
from pilotlight.client.transport import path_segment
from pilotlight.errors import Conflict, NotFound

AUDIT_PAGE = 500
"""Entries per page: some hundred KiB."""


class TenantResources(CollectionResources):
    """Methods of `pilotlight.client.client.Client` for access and limits."""

    # -- secrets -----------------------------------------------------------------------------------
    def secrets(self) -> list[Json]:
        """List the secrets of the environment: names and variable names, never values."""
        return self._list("/v1/secrets", "secrets")

    def secret(self, name: str) -> Json:
        """Return the description of a secret, without values. Raises NotFound."""
        for found in self.secrets():
            if found["name"] == name:
                return found
        raise NotFound(f"there is no secret {name!r} in this environment")

    def put_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Create or replace a secret: environment variables that instances get at their next
        start."""
        self._transport.request(
            "PUT", f"/v1/secrets/{path_segment(name)}", json={"values": dict(values)}
        )

    def delete_secret(self, name: str) -> None:
        """Delete a secret."""
        self._transport.request("DELETE", f"/v1/secrets/{path_segment(name)}")

    # -- keys --------------------------------------------------------------------------------------
    def whoami(self) -> Json:
        """Return the key of this client: its tenant, scope and restrictions."""
        return self._get("/v1/whoami")

    def sign_in_code(self) -> Json:
        """Create a one-time code that signs one browser in to the dashboard within a minute:
        `{"code", "expires_at", "dashboard_url"}`. Raises Forbidden, TooManyRequests."""
        return dict(self._transport.request("POST", "/v1/sign-in-codes").json())

    def begin_sign_in(self, issuer: str | None = None) -> Json:
        """Begin to sign in by an issuer of the platform, without a key: `{"code", "user_code",
        "verification_uri", "verification_uri_complete", "expires_at", "interval_s", "issuer"}`.
        Raises NotFound, InvalidInput, TooManyRequests, Unavailable."""
        return self._post_without_key("/v1/device-sign-ins", without_none({"issuer": issuer}))

    def redeem_sign_in(self, code: str) -> Json:
        """Exchange a sign-in to which the person has agreed for an API key, once: `{"status",
        "interval_s", "tenant", "key"}`. Raises Unauthenticated, Forbidden, Unavailable."""
        return self._post_without_key("/v1/device-sign-ins:redeem", {"code": code})

    def _post_without_key(self, path: str, body: Json) -> Json:
        # a 401 says why the person was refused, and not that a key is missing
        unauthenticated = frozenset({401})
        answer = self._transport.request("POST", path, json=body, accept_status=unauthenticated)
        if answer.status_code in unauthenticated:
            raise error_from_response(answer.status_code, dict(answer.headers), answer.content)
        return dict(answer.json())

    def keys(self) -> list[Json]:
        """List API keys: ids, scopes, restrictions and dates, never the secrets."""
        return self._list("/v1/keys", "keys")

    def key(self, key_id: str) -> Json:
        """Return an API key by its id. Raises NotFound."""
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
        customer: str | None = None,
    ) -> Json:
        """Create an API key. `secret` in the response is the key, shown only once.

        `ttl_s` None means no expiry. `environment`, `app` and `function` restrict the key to one of
        them; `quotas` limit calls made with it. All calls of a key with a `customer` are made for
        this one; None: its holder may name any. `tenant`: create it for another tenant, which lost
        its last key; for platform administrators."""
        path = "/v1/keys" if tenant is None else f"/v1/tenants/{path_segment(tenant)}/keys"
        reach = {
            "environment": environment,
            "app": app,
            "function": function,
            "expires_in_s": ttl_s,
            "quotas": quotas or None,
            "customer": customer,
        }
        return self._change("POST", path, {"scope": scope, "name": name, **without_none(reach)})

    def set_key_quotas(self, key_id: str, quotas: Mapping[str, Any]) -> Json:
        """Replace the quotas of a key; {} removes them."""
        return self._change("PATCH", _key_path(key_id), {"quotas": dict(quotas)})

    def set_key_expiry(self, key_id: str, *, ttl_s: float | None, force: bool = False) -> Json:
        """Let a key expire in `ttl_s` seconds; None: never. Raises Conflict for the last admin key
        of a tenant, unless `force`."""
        path = f"{_key_path(key_id)}?force=true" if force else _key_path(key_id)
        return self._change("PATCH", path, {"expires_in_s": ttl_s})

    def rotate_key(self, key_id: str, *, grace_s: float = 0.0) -> Json:
        """Create a key with the same restrictions, and return it like `create_key`. The old key
        expires after `grace_s`; 0 = now. Raises Conflict."""
        return self._change("POST", f"{_key_path(key_id)}:rotate", {"grace_s": grace_s})

    def revoke_key(self, key_id: str, *, force: bool = False) -> None:
        """Revoke an API key immediately. Raises Conflict for the last admin key of a tenant, unless
        `force`."""
        self._transport.request(
            "DELETE", _key_path(key_id), params={"force": "true"} if force else None
        )

    # -- environments ------------------------------------------------------------------------------
    def environments(self) -> list[Json]:
        """List the environments of this tenant."""
        return self._list("/v1/environments", "environments")

    def create_environment(self, name: str) -> None:
        """Create an environment unless it exists."""
        with contextlib.suppress(Conflict):
            self._transport.request(
                "POST", "/v1/environments", json={"name": name}, repeatable=True
            )

    def delete_environment(self, name: str) -> None:
        """Delete an environment with everything in it."""
        self._transport.request("DELETE", f"/v1/environments/{path_segment(name)}")

    # -- plans and tenants -------------------------------------------------------------------------
    def plans(self) -> Json:
        """Return all plans: `{"plans": [Plan…], "default": name}`."""
        return self._get("/v1/plans")

    def own_tenant(self) -> Json:
        """Return the tenant of this client: its plan, the effective `terms`, and its usage."""
        return self._get("/v1/tenant")

    def tenants(self) -> list[Json]:
        """List all tenants. For platform administrators."""
        return self._list("/v1/tenants", "tenants")

    def tenant(self, name: str) -> Json:
        """Return a tenant and its terms. For platform administrators. Raises NotFound."""
        return self._get(f"/v1/tenants/{path_segment(name)}")

    def create_tenant(
        self, name: str, *, plan: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Json:
        """Create a tenant. `key.secret` in the response is its first admin key, shown only once.
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
        """Change the plan of a tenant, override single keys of the plan, `clear` overrides, or
        suspend it. What is not given stays unchanged."""
        given = clear if clear == "all" else list(clear)
        body = {
            **without_none({"plan": plan, "suspended": suspended}),
            "overrides": dict(overrides or {}),
            "clear": given,
        }
        return self._change("PATCH", f"/v1/tenants/{path_segment(name)}", body)

    def delete_tenant(self, name: str) -> Json:
        """Delete a tenant; `deletion` in the response, and in that of `tenant`, says how far that
        is. For platform administrators. Raises NotFound, Conflict for the first tenant."""
        path = f"/v1/tenants/{path_segment(name)}"
        return dict(self._transport.request("DELETE", path).json())

    # -- quotas ------------------------------------------------------------------------------------
    def quotas(self) -> Json:
        """Return the quotas of this tenant, and those that it sets on its functions, keys and
        customers: `{"tenant": Quotas, "plan": name, "functions": […], "keys": […], "customers":
        […]}`."""
        return self._get("/v1/quotas")

    def function_quotas(self, app: str, function: str) -> Json:
        """Return the quotas of a function."""
        return dict(self._get(_function_path(app, function))["quotas"])

    def set_function_quotas(self, app: str, function: str, quotas: Mapping[str, Any]) -> Json:
        """Replace the quotas of a function; {} removes them."""
        return self._change("PUT", _function_path(app, function), dict(quotas))

    def customer_quotas(self, customer: str) -> Json:
        """Return the quotas of a customer; with "*" those of each without own ones."""
        return dict(self._get(f"/v1/quotas/customers/{path_segment(customer)}")["quotas"])

    def set_customer_quotas(self, customer: str, quotas: Mapping[str, Any]) -> Json:
        """Replace the quotas of a customer, or with "*" of each without own ones; {} removes
        them."""
        return self._change("PUT", f"/v1/quotas/customers/{path_segment(customer)}", dict(quotas))

    # -- audit log ---------------------------------------------------------------------------------
    def audit(self, *, limit: int | None = None, **filters: str | float | None) -> Iterator[Json]:
        """Yield entries of the audit log, newest first, at most `limit`.

        `filters`: actor, action (`key.*` matches a prefix), subject, address, since and until
        (seconds since the epoch), and for platform administrators tenant (a name, `*` = all)."""
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


def _key_path(key_id: str) -> str:
    return f"/v1/keys/{path_segment(key_id)}"


def _function_path(app: str, function: str) -> str:
    return f"/v1/quotas/functions/{path_segment(app)}/{path_segment(function)}"

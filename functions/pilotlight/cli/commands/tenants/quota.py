"""`pilotlight quota …`: show and change quotas of tenants, functions and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.tenants.tenant import format_plan_value, plan_table
from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import format_table, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec import quotas as records

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

OfTenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Quotas of this tenant; platform administrators only."),
]
OfFunction = Annotated[
    str | None,
    typer.Option("--function", metavar="APP/FUNCTION", help="Quotas of this function."),
]
OfKey = Annotated[str | None, typer.Option("--key", metavar="ID", help="Quotas of this API key.")]
Quotas = dict[str, Any]
QUOTA_NAMES = (*(f.name for f in dataclasses.fields(records.Quotas)), *records.STORAGE_KEYS)
"""Quotas of a tenant. Keys and functions have only those of `Quotas`; the platform refuses the
others."""


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "quota",
        "Show and change the quotas of tenants, functions and API keys.",
        {"show": quota_show, "set": quota_set, "clear": quota_clear},
    )


def quota_show(
    session: Session, tenant: OfTenant = None, function: OfFunction = None, key: OfKey = None
) -> None:
    """Show the quotas of your tenant, functions and keys. A call must satisfy all that apply."""
    with session.client() as client:
        if tenant is function is key is None:
            body = client.quotas()
            session.show(body, lambda: _overview(body))
            return
        found = _read(client, tenant, function, key)
    session.show(found, lambda: plan_table(found))


def quota_set(
    session: Session,
    quotas: Annotated[
        list[str],
        typer.Argument(
            metavar="QUOTA=VALUE…", help="Such as requests_per_s=5 burst=20; null = unlimited."
        ),
    ],
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
) -> None:
    """Set quotas of a tenant, function or key; other quotas are unchanged. Takes effect at once."""
    given = parse_pairs(quotas, option="quota")
    found = session.request(
        lambda client: _change(client, given, (), tenant=tenant, function=function, key=key)
    )
    session.show(found, lambda: plan_table(found))


def quota_clear(
    session: Session,
    quotas: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUOTA…]", help="Quotas to remove. Default: all."),
    ] = None,
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
) -> None:
    """Remove quotas of a function or key, or reset those of a tenant to its plan."""
    found = session.request(
        lambda client: _change(
            client, {}, quotas or None, tenant=tenant, function=function, key=key
        )
    )
    session.show(found, lambda: plan_table(found))


def _read(client: Client, tenant: str | None, function: str | None, key: str | None) -> Quotas:
    kind, name = _whose(tenant, function, key)
    if kind == "tenant":
        return _bounds(client.tenant(name))
    if kind == "function":
        return client.function_quotas(*parse_function(name, hint="Write --function APP/FUNCTION."))
    return dict(client.key(name)["quotas"])


def _change(
    client: Client,
    given: Quotas,
    clear: Sequence[str] | None,
    *,
    tenant: str | None,
    function: str | None,
    key: str | None,
) -> Quotas:
    """Set the quotas in `given` and remove those in `clear`; None removes all."""
    kind, name = _whose(tenant, function, key)
    if kind == "tenant":
        if wrong := sorted({*given, *(clear or ())} - set(QUOTA_NAMES)):
            raise InvalidInput(
                f"{wrong[0]!r} is not a quota",
                hint=f"Quotas are {', '.join(QUOTA_NAMES)}; set other keys of the plan with "
                f"`pilotlight tenant set --override`.",
            )
        overridden = (
            [quota for quota in client.tenant(name)["overrides"] if quota in QUOTA_NAMES]
            if clear is None
            else list(clear)
        )
        return _bounds(client.change_tenant(name, overrides=given, clear=overridden))
    before = _read(client, tenant, function, key)
    if missing := sorted(set(clear or ()) - set(before)):
        raise InvalidInput(
            f"{kind} {name} has no quota {missing[0]!r}",
            hint=f"It has {', '.join(before) or 'none'}.",
        )
    kept = (
        {}
        if clear is None
        else {quota: value for quota, value in before.items() if quota not in clear}
    )
    after = {
        quota: value
        for quota, value in {**kept, **given}.items()
        if value is not None or quota in given
    }
    if kind == "function":
        return dict(
            client.set_function_quotas(
                *parse_function(name, hint="Write --function APP/FUNCTION."), after
            )["quotas"]
        )
    return dict(client.set_key_quotas(name, after)["quotas"])


def _whose(tenant: str | None, function: str | None, key: str | None) -> tuple[str, str]:
    given = [
        (kind, name)
        for kind, name in (("tenant", tenant), ("function", function), ("key", key))
        if name is not None
    ]
    if len(given) != 1:
        raise InvalidInput(
            "no tenant, function or key was named"
            if not given
            else "only one of tenant, function and key can be named",
            hint="Pass one of --tenant, --function, --key.",
        )
    return given[0]


def _bounds(tenant: Mapping[str, Any]) -> Quotas:
    return {name: tenant["terms"][name] for name in QUOTA_NAMES}


def _overview(body: Mapping[str, Any]) -> RenderableType:
    own = {"of": f"tenant (plan {body['plan']})", "quotas": _text(body["tenant"])}
    functions = [
        {"of": f"function {f['app']}/{f['function']}", "quotas": _text(f["quotas"])}
        for f in body["functions"]
    ]
    keys = [
        {"of": f"key {k['key']} {k['name']}".rstrip(), "quotas": _text(k["quotas"])}
        for k in body["keys"]
    ]
    return format_table([own, *functions, *keys], {"of": "of", "quotas": "quotas"}, empty="")


def _text(quotas: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={format_plan_value(name, value)}"
        for name, value in quotas.items()
        if value is not None
    ]

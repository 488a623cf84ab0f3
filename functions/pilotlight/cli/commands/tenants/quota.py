"""`pilotlight quota …`: show and change quotas of tenants, functions, keys and customers."""

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
OfCustomer = Annotated[
    str | None,
    typer.Option(
        "--customer",
        metavar="ID",
        help="Quotas of this customer; '*': of each customer that has none of its own.",
    ),
]
Quotas = dict[str, Any]
QUOTA_NAMES = (*(f.name for f in dataclasses.fields(records.Quotas)), *records.STORAGE_KEYS)
"""Quotas of a tenant. Keys and functions have only those of `Quotas`; the platform refuses the
others."""


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "quota",
        "Show and change the quotas of tenants, functions, API keys and customers.",
        {"show": quota_show, "set": quota_set, "clear": quota_clear},
    )


def quota_show(
    session: Session,
    *,
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
    customer: OfCustomer = None,
) -> None:
    """Show the quotas of your tenant, functions, keys and customers. A call must satisfy all that
    apply."""
    with session.client() as client:
        if tenant is function is key is customer is None:
            body = client.quotas()
            session.show(body, lambda: _overview(body))
            return
        found = _read(client, _whose(tenant=tenant, function=function, key=key, customer=customer))
    session.show(found, lambda: plan_table(found))


def quota_set(
    session: Session,
    *,
    quotas: Annotated[
        list[str],
        typer.Argument(
            metavar="QUOTA=VALUE…", help="Such as requests_per_s=5 burst=20; null = unlimited."
        ),
    ],
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
    customer: OfCustomer = None,
) -> None:
    """Set quotas of a tenant, function, key or customer; other quotas are unchanged.

    Takes effect at once.
    """
    given = parse_pairs(quotas, option="quota")
    whose = _whose(tenant=tenant, function=function, key=key, customer=customer)
    found = session.request(lambda client: _change(client, given, (), whose))
    session.show(found, lambda: plan_table(found))


def quota_clear(
    session: Session,
    *,
    quotas: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUOTA…]", help="Quotas to remove. Default: all."),
    ] = None,
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
    customer: OfCustomer = None,
) -> None:
    """Remove quotas of a function, key or customer, or reset those of a tenant to its plan."""
    whose = _whose(tenant=tenant, function=function, key=key, customer=customer)
    found = session.request(lambda client: _change(client, {}, quotas or None, whose))
    session.show(found, lambda: plan_table(found))


def _read(client: Client, whose: tuple[str, str]) -> Quotas:
    kind, name = whose
    if kind == "tenant":
        return _bounds(client.tenant(name))
    if kind == "function":
        return client.function_quotas(*parse_function(name, hint="Write --function APP/FUNCTION."))
    if kind == "customer":
        return client.customer_quotas(name)
    return dict(client.key(name)["quotas"])


def _change(
    client: Client, given: Quotas, clear: Sequence[str] | None, whose: tuple[str, str]
) -> Quotas:
    """Set the quotas in `given` and remove those in `clear`; None removes all."""
    kind, name = whose
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
    before = _read(client, whose)
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
    if kind == "customer":
        return dict(client.set_customer_quotas(name, after)["quotas"])
    return dict(client.set_key_quotas(name, after)["quotas"])


def _whose(**names: str | None) -> tuple[str, str]:
    given = [(kind, name) for kind, name in names.items() if name is not None]
    if len(given) != 1:
        kinds = f"{', '.join(list(names)[:-1])} or {list(names)[-1]}"
        raise InvalidInput(
            f"no {kinds} was named" if not given else f"only one {kinds} can be named",
            hint=f"Pass one of {', '.join(f'--{kind}' for kind in names)}.",
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
    customers = [
        {"of": f"customer {c['customer']}", "quotas": _text(c["quotas"])} for c in body["customers"]
    ]
    return format_table(
        [own, *functions, *keys, *customers], {"of": "of", "quotas": "quotas"}, empty=""
    )


def _text(quotas: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={format_plan_value(name, value)}"
        for name, value in quotas.items()
        if value is not None
    ]

"""`pilotlight quota …`: what bounds a tenant, a function, a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.tenants.tenant import format_plan_value, plan_table
from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import format_table, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec import quotas as records
from pilotlight.spec.identifiers import parse_function_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="Of this tenant; for administrators of the platform.")
]
OfFunction = Annotated[
    str | None,
    typer.Option("--function", metavar="APP/FUNCTION", help="Of this function of yours."),
]
OfKey = Annotated[str | None, typer.Option("--key", metavar="ID", help="Of this key of yours.")]
Quotas = dict[str, Any]
QUOTA_NAMES = (*(f.name for f in dataclasses.fields(records.Quotas)), *records.STORAGE_KEYS)
"""Of a tenant; keys and functions have those of `Quotas` only, and the platform refuses the
others."""


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        help="Quotas: what bounds a tenant, a function, a key.", no_args_is_help=True
    )
    for verb, function in (("show", quota_show), ("set", quota_set), ("clear", quota_clear)):
        command(group, verb)(function)
    root.add_typer(group, name="quota")


def quota_show(
    session: Session, tenant: OfTenant = None, function: OfFunction = None, key: OfKey = None
) -> None:
    """What bounds you: your tenant's quotas, and those of your functions and keys. All that apply
    must leave room."""
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
            metavar="QUOTA=VALUE…", help="Such as requests_per_s=5 burst=20; null: no bound."
        ),
    ],
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
) -> None:
    """Bound a tenant, a function or a key; quotas that are not named stay. Every activator follows
    at once."""
    given = parse_pairs(quotas, option="quota")
    with session.client() as client:
        found = _change(client, given, (), tenant=tenant, function=function, key=key)
    session.show(found, lambda: plan_table(found))


def quota_clear(
    session: Session,
    quotas: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUOTA…]", help="Which; without a name all of them."),
    ] = None,
    tenant: OfTenant = None,
    function: OfFunction = None,
    key: OfKey = None,
) -> None:
    """Take quotas of a function or a key away; of a tenant: back to what its plan says."""
    with session.client() as client:
        found = _change(client, {}, quotas or None, tenant=tenant, function=function, key=key)
    session.show(found, lambda: plan_table(found))


def _read(client: Client, tenant: str | None, function: str | None, key: str | None) -> Quotas:
    kind, name = _whose(tenant, function, key)
    if kind == "tenant":
        return _bounds(client.tenant(name))
    if kind == "function":
        return client.function_quotas(*_address(name))
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
    """Set those `given` and take away those in `clear`, None = all."""
    kind, name = _whose(tenant, function, key)
    if kind == "tenant":
        if wrong := sorted({*given, *(clear or ())} - set(QUOTA_NAMES)):
            raise InvalidInput(
                f"{wrong[0]!r} is not a quota",
                hint=f"There are {', '.join(QUOTA_NAMES)}; `tenant set --override` does the rest.",
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
        return dict(client.set_function_quotas(*_address(name), after)["quotas"])
    return dict(client.set_key_quotas(name, after)["quotas"])


def _whose(tenant: str | None, function: str | None, key: str | None) -> tuple[str, str]:
    given = [
        (kind, name)
        for kind, name in (("tenant", tenant), ("function", function), ("key", key))
        if name is not None
    ]
    if len(given) != 1:
        raise InvalidInput(
            "whose quotas is not said" if not given else "one at a time",
            hint="Pass one of --tenant, --function, --key.",
        )
    return given[0]


def _address(path: str) -> tuple[str, str]:
    try:
        app, function, _ = parse_function_path(path)
    except ValueError as e:
        raise InvalidInput(str(e), hint="Write --function APP/FUNCTION.") from e
    return app, function


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

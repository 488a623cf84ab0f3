"""`pilotlight tenant …`: manage tenants, and show plans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_bytes, format_table, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, PilotlightError

if TYPE_CHECKING:
    from rich.table import Table

Name = Annotated[str, typer.Argument(metavar="NAME")]
OnPlan = Annotated[str | None, typer.Option("--plan", help="Plan, from `pilotlight tenant plans`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="KEY=VALUE",
        help="Override a key of the plan; null = unlimited. May be repeated.",
    ),
]
_PLAN_COLUMNS = {
    "name": "plan",
    "requests_per_s": "calls/s",
    "burst": "burst",
    "concurrent": "at once",
    "queued": "waiting",
    "instances": "instances",
    "gpus": "gpus",
    "body_bytes": "body",
    "tokens_per_min": "tokens/min",
    "stored_bytes": "stored",
    "builds_at_once": "builds",
    "pinned_bytes": "pinned",
    "log_bytes": "logs",
    "functions": "functions",
    "result_bytes": "results",
    "volume_files": "volume files",
    "weight": "weight",
    "priority": "priority",
    "isolation": "isolation",
    "prices": "prices",
}
_TENANT_COLUMNS = {
    "name": "name",
    "id": "id",
    "plan": "plan",
    "overrides": "overrides",
    "state": "state",
    "created_at": "created",
}
POLL_S = 0.5
"""Interval of looking how far a deletion is."""
DELETED = "deleted"
"""State of a deletion that is done."""


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "tenant",
        "Manage the tenants that share this platform.",
        {
            "create": tenant_create,
            "list": tenant_list,
            "show": tenant_show,
            "set": tenant_set,
            "suspend": tenant_suspend,
            "resume": tenant_resume,
            "delete": tenant_delete,
            "plans": tenant_plans,
        },
    )


def tenant_create(
    session: Session, name: Name, plan: OnPlan = None, override: Overrides = None
) -> None:
    """Create a tenant and its first admin key, which is shown only once.

    Needs an admin key of the platform's first tenant.
    """
    made = session.request(
        lambda client: client.create_tenant(
            name, plan=plan, overrides=parse_pairs(override or (), option="--override")
        )
    )
    session.show(made, lambda: str(made["key"]["secret"]))
    session.say(
        f"{name} is created with plan {made['plan']}; its first admin key, for "
        f"PILOTLIGHT_API_KEY, is shown only once"
    )


def tenant_list(session: Session) -> None:
    """List all tenants with their plans and overrides."""
    rows = session.request(lambda client: client.tenants())
    session.show(
        rows,
        lambda: format_table(
            [_format_row(row) for row in rows], _TENANT_COLUMNS, empty="No tenants."
        ),
    )


def tenant_show(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Tenant. Default: your own.")
    ] = None,
) -> None:
    """Show a tenant's plan, quotas and terms; for your own tenant also its usage."""
    found = session.request(
        lambda client: client.own_tenant() if name is None else client.tenant(name)
    )
    session.show(found, lambda: tenant_table(found))


def tenant_set(
    session: Session,
    name: Name,
    plan: OnPlan = None,
    override: Overrides = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Remove the override of this key, or `all`; may be repeated.",
        ),
    ] = None,
) -> None:
    """Change a tenant's plan or override keys of it. Takes effect at once."""
    changes = parse_pairs(override or (), option="--override")
    if not (plan or changes or clear):
        raise InvalidInput(
            "no change was given", hint="Pass --plan, --override KEY=VALUE or --clear KEY."
        )
    found = session.request(
        lambda client: client.change_tenant(
            name, plan=plan, overrides=changes, clear="all" if clear == ["all"] else clear or ()
        )
    )
    session.show(found, lambda: tenant_table(found))


def tenant_suspend(session: Session, name: Name, yes: Yes = False) -> None:
    """Suspend a tenant: refuse its calls and changes, and end what runs after 30 s. Its keys can
    still read; nothing is deleted."""
    session.confirm(
        f"Suspend {name}? Its calls are refused with 403, and what runs is ended after 30 s.",
        yes=yes,
    )
    found = session.request(lambda client: client.change_tenant(name, suspended=True))
    session.show(
        found, lambda: f"{name} is suspended; resume it with `pilotlight tenant resume {name}`"
    )


def tenant_resume(session: Session, name: Name) -> None:
    """Resume a suspended tenant."""
    found = session.request(lambda client: client.change_tenant(name, suspended=False))
    session.show(found, lambda: f"{name} is resumed")


def tenant_delete(
    session: Session,
    name: Name,
    yes: Yes = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until everything is deleted.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds to wait at most.")
    ] = 600.0,
) -> None:
    """Delete a tenant with all that it has; invoices, usage records and the audit log are kept.

    Its keys and calls are refused at once. It cannot be taken back. With --json each change of its
    progress is a line.
    """
    session.confirm(
        f"Delete {name} with its apps, data and keys? It cannot be taken back. Its invoices, and "
        f"its name with them, are kept.",
        yes=yes,
    )
    until = time.monotonic() + timeout_s
    with session.client() as client:
        found = client.delete_tenant(name)
        while _is_deleting(session, found) and wait:
            if time.monotonic() > until:
                raise PilotlightError(
                    f"{name} is not deleted after {timeout_s:g} s: {_deletion_text(found)}",
                    hint=f"It continues; `pilotlight tenant show {name}` says how far it is.",
                )
            before = found["deletion"]
            while found["deletion"] == before and time.monotonic() <= until:
                time.sleep(POLL_S)
                found = client.tenant(name)


def _is_deleting(session: Session, found: Mapping[str, Any]) -> bool:
    """Print how far a deletion is; returns whether it continues."""
    if session.is_json or found["deletion"]["state"] == DELETED:
        session.show(found, lambda: f"{found['name']} is deleted; its invoices are kept")
    else:
        session.say(_deletion_text(found))
    return bool(found["deletion"]["state"] != DELETED)


def _deletion_text(found: Mapping[str, Any]) -> str:
    deletion = found["deletion"]
    rows = sum(deletion["counts"].values())
    why = f": {deletion['waiting_for']}" if deletion["waiting_for"] else ""
    return f"{found['name']}: step {deletion['state']}, {rows} rows deleted{why}"


def tenant_plans(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this plan. Default: list all.")
    ] = None,
) -> None:
    """List all plans, which are sets of quotas and terms (section `plans` of platform.yaml), or
    show one; `-` = unlimited."""
    body = session.request(lambda client: client.plans())
    if name is None:
        session.show(body, lambda: format_table(body["plans"], _PLAN_COLUMNS, empty="No plans."))
        session.say(f"default plan of new tenants: {body['default']}")
        return
    plans = {plan["name"]: plan for plan in body["plans"]}
    if name not in plans:
        raise InvalidInput(
            f"there is no plan {name!r}",
            hint=f"Plans are {', '.join(plans)}; section `plans` of platform.yaml can define more.",
        )
    session.show(plans[name], lambda: plan_table(plans[name]))


def tenant_table(found: Mapping[str, Any]) -> Table | str:
    """Format a tenant in two columns: its identity, its terms (`*` = overridden), and its usage if
    known."""
    use = found.get("use") or {}
    marked = {
        key: f"{format_plan_value(key, value)}{' *' if key in found['overrides'] else ''}"
        for key, value in found["terms"].items()
        if key != "name"
    }
    used = {
        key: f"{bound}  (now {_used(key, use[key])})"
        for key, bound in marked.items()
        if use.get(key) is not None
    }
    head = {
        "tenant": found["name"],
        "id": found["id"],
        "plan": found["plan"],
        "suspended": "yes" if found["suspended"] else "no",
    }
    if found.get("deletion"):
        head["deletion"] = _deletion_text(found)
    return _two_columns({**head, **marked, **used})


def plan_table(terms: Mapping[str, Any]) -> Table | str:
    """Format a plan or quotas in two columns."""
    return _two_columns({key: format_plan_value(key, value) for key, value in terms.items()})


def format_plan_value(key: str, value: Any) -> str:
    """Format one value of a plan."""
    if value is None:
        return NO_VALUE
    return format_bytes(value) if key.endswith("_bytes") else str(value)


def _used(key: str, value: float) -> str:
    return format_bytes(int(value)) if key.endswith("_bytes") else f"{value:g}"


def _two_columns(values: Mapping[str, str]) -> Table | str:
    rows = [{"what": key, "value": value} for key, value in values.items()]
    return format_table(rows, {"what": "", "value": ""}, empty="No quotas.")


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "state": _state(row),
        "overrides": [
            f"{key}={format_plan_value(key, value)}" for key, value in row["overrides"].items()
        ],
    }


def _state(row: Mapping[str, Any]) -> str:
    if (deletion := row.get("deletion")) is not None:
        return DELETED if deletion["state"] == DELETED else "deleting"
    return "suspended" if row["suspended"] else "active"

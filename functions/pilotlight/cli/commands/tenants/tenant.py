"""`pilotlight tenant …` and `plan …`: who shares this platform, and what each was promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import NO_VALUE, format_bytes, format_table, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

Name = Annotated[str, typer.Argument(metavar="NAME")]
OnPlan = Annotated[
    str | None, typer.Option("--plan", help="Its plan; `pilotlight plan list` shows them.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="KEY=VALUE",
        help="One key of the plan otherwise; null lifts a bound. Repeatable.",
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
    "suspended": "suspended",
    "created_at": "created",
}


def register(root: typer.Typer) -> None:
    """Add both groups."""
    tenant = typer.Typer(help="Tenants: who shares this platform.", no_args_is_help=True)
    for verb, function in (
        ("create", tenant_create),
        ("list", tenant_list),
        ("show", tenant_show),
        ("set", tenant_set),
        ("suspend", tenant_suspend),
        ("resume", tenant_resume),
    ):
        command(tenant, verb)(function)
    root.add_typer(tenant, name="tenant")
    plan = typer.Typer(
        help="Plans: bundles of quotas and terms (section `plans` of platform.yaml).",
        no_args_is_help=True,
    )
    command(plan, "list")(plan_list)
    command(plan, "show")(plan_show)
    root.add_typer(plan, name="plan")


def tenant_create(
    session: Session, name: Name, plan: OnPlan = None, override: Overrides = None
) -> None:
    """Create a tenant with its first admin key, which is shown once. Needs an admin key of the
    platform's first tenant."""
    with session.client() as client:
        made = client.create_tenant(
            name, plan=plan, overrides=parse_pairs(override or (), option="--override")
        )
    session.show(made, lambda: str(made["key"]["secret"]))
    session.say(
        f"{name} is there, on plan {made['plan']}; its first admin key is shown this one time, "
        f"for its PILOTLIGHT_API_KEY"
    )


def tenant_list(session: Session) -> None:
    """Every tenant, its plan, and what is otherwise for it."""
    with session.client() as client:
        rows = client.tenants()
    session.show(
        rows,
        lambda: format_table([_listed(row) for row in rows], _TENANT_COLUMNS, empty="No tenants."),
    )


def tenant_show(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Without it: your own.")
    ] = None,
) -> None:
    """A tenant's plan and what that means for it; of your own also what it uses."""
    with session.client() as client:
        found = client.own_tenant() if name is None else client.tenant(name)
    session.show(found, lambda: tenant_table(found))


def tenant_set(
    session: Session,
    name: Name,
    plan: OnPlan = None,
    override: Overrides = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Back to what the plan says; `all` for every key."),
    ] = None,
) -> None:
    """Give a tenant another plan, or change single keys of it. Every activator follows at once."""
    changes = parse_pairs(override or (), option="--override")
    if not (plan or changes or clear):
        raise InvalidInput(
            "nothing to change was named", hint="Pass --plan, --override KEY=VALUE or --clear KEY."
        )
    with session.client() as client:
        found = client.change_tenant(
            name, plan=plan, overrides=changes, clear="all" if clear == ["all"] else clear or ()
        )
    session.show(found, lambda: tenant_table(found))


def tenant_suspend(session: Session, name: Name, yes: Yes = False) -> None:
    """Refuse a tenant's calls and changes; its keys can still look, and nothing is deleted."""
    session.confirm(f"Suspend {name}? Its calls are answered 403 from now on.", yes=yes)
    with session.client() as client:
        found = client.change_tenant(name, suspended=True)
    session.show(
        found, lambda: f"{name} is suspended; `pilotlight tenant resume {name}` lets it go on"
    )


def tenant_resume(session: Session, name: Name) -> None:
    """Let a suspended tenant go on."""
    with session.client() as client:
        found = client.change_tenant(name, suspended=False)
    session.show(found, lambda: f"{name} goes on")


def plan_list(session: Session) -> None:
    """Every plan; `-` is no bound."""
    with session.client() as client:
        body = client.plans()
    session.show(body, lambda: format_table(body["plans"], _PLAN_COLUMNS, empty="No plans."))
    session.say(f"new tenants have {body['default']}")


def plan_show(session: Session, name: Name) -> None:
    """All of one plan."""
    with session.client() as client:
        plans = {plan["name"]: plan for plan in client.plans()["plans"]}
    if name not in plans:
        raise InvalidInput(
            f"there is no plan {name!r}",
            hint=f"There are {', '.join(plans)}; section `plans` of platform.yaml adds more.",
        )
    session.show(plans[name], lambda: plan_table(plans[name]))


def tenant_table(found: Mapping[str, Any]) -> Table | str:
    """A tenant in two columns: who it is, its terms (`*`: overridden), and what it uses where that
    is known."""
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
    return _two_columns({**head, **marked, **used})


def plan_table(terms: Mapping[str, Any]) -> Table | str:
    """A plan, or quotas, in two columns."""
    return _two_columns({key: format_plan_value(key, value) for key, value in terms.items()})


def format_plan_value(key: str, value: Any) -> str:
    """One of a plan's values."""
    if value is None:
        return NO_VALUE
    return format_bytes(value) if key.endswith("_bytes") else str(value)


def _used(key: str, value: float) -> str:
    return format_bytes(int(value)) if key.endswith("_bytes") else f"{value:g}"


def _two_columns(values: Mapping[str, str]) -> Table | str:
    rows = [{"what": key, "value": value} for key, value in values.items()]
    return format_table(rows, {"what": "", "value": ""}, empty="Nothing is bounded.")


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "overrides": [
            f"{key}={format_plan_value(key, value)}" for key, value in row["overrides"].items()
        ],
    }

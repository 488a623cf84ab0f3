"""`pilotlight app revisions|diff|promote|rollback|pin|alias|protect|approve`: which revision
serves, and how another one comes to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps import release_options, rollout_options
from pilotlight.cli.core.command import Yes
from pilotlight.cli.core.formatting import format_cell, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Address = Annotated[
    str,
    typer.Argument(
        metavar="APP[/FUNCTION]", help="The function; of an app with one, the app will do."
    ),
]
Revision = Annotated[
    str, typer.Argument(metavar="REVISION", help="Its name, `v6`, an alias or a tag.")
]
MAX_SHOWN = 80
"""Characters of a value in a comparison: schemas are long."""


def revisions(session: Session, app: Address) -> None:
    """A function's revisions, newest first."""
    with session.client() as client:
        name, function = _split(app)
        rows = client.revisions(name, function=function)
    shown = [
        {
            **row,
            "needs": row["approvals"]["missing"] or None,
            "git": row["lineage"].get("git.commit", "")[:12],
        }
        for row in rows
    ]
    columns = {
        "revision": "revision",
        "weight": "%",
        "aliases": "aliases",
        "tags": "tags",
        "needs": "needs approvals",
        "git": "commit",
    }
    late = {
        "evaluation": "evaluation",
        "created_at": "made",
        "served_at": "first served",
        "created_by": "by",
    }
    session.show(
        rows, lambda: format_table(shown, {**columns, **late}, empty=f"{app} has no revisions.")
    )


def revision(session: Session, app: Address, name: Revision) -> None:
    """A revision's manifest: what it pins, and what was told of it."""
    with session.client() as client:
        owner, function = _split(app)
        body = client.revision(owner, name, function=function)
    session.show(body, lambda: _manifest(body))


def diff(session: Session, app: Address, before: Revision, after: Revision) -> None:
    """What differs between two revisions, and what of it breaks callers of the first."""
    with session.client() as client:
        name, function = _split(app)
        body = client.diff(name, before, after, function=function)
    session.show(body, lambda: _diff(body))


def promote(
    session: Session,
    *,
    app: Address,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[REVISION]", help="The revision that shall serve; without it name --from."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Environment whose serving revisions come to the one of -e."),
    ] = None,
    message: release_options.Message = "",
    evaluation: release_options.Evaluation = None,
    allow_breaking: release_options.AllowBreaking = False,
    override_freeze: release_options.OverrideFreeze = False,
    canary_steps: rollout_options.Canary = None,
    every: rollout_options.Every = None,
    min_samples: rollout_options.MinSamples = None,
    gate: rollout_options.Gates = None,
    yes: Yes = False,
) -> None:
    """Let a revision serve, at once or with --canary step by step; or with --from, what serves in
    another environment."""
    if (name is None) == (source is None):
        raise InvalidInput(
            "name a revision, or an environment with --from: one of them",
            hint="pilotlight app promote search/embed v7",
        )
    owner, function = _split(app)
    rollout = rollout_options.parse_rollout_plan(canary_steps, every, min_samples, gate)
    with session.client() as client:
        if source is not None:
            options = {"message": message, "allow_breaking": allow_breaking, "rollout": rollout}
            _promote_from(session, client, app=app, source=source, options=options, yes=yes)
            return
        assert name is not None
        session.confirm(
            f"Give {'' if rollout is None else 'step by step '}all traffic of {app} to {name}?",
            yes=yes,
        )
        body = client.promote(
            owner,
            name,
            function=function,
            message=message,
            rollout=rollout,
            evaluation=release_options.read_evaluation(evaluation),
            allow_breaking=allow_breaking,
            override_freeze=override_freeze,
        )
    session.show(body, lambda: _promoted(body))


def rollback(
    session: Session,
    *,
    app: Address,
    to: Annotated[
        str | None,
        typer.Option(help="The revision to go back to; the one that served before if left out."),
    ] = None,
    message: release_options.Message = "",
    yes: Yes = False,
) -> None:
    """All traffic back at once. Ends a rollout and an experiment of the function; asks for no
    approval."""
    session.confirm(f"Roll {app} back to {to or 'the revision that served before'}?", yes=yes)
    owner, function = _split(app)
    with session.client() as client:
        body = client.rollback(owner, function=function, to=to, message=message)
    session.show(body, lambda: f"{body['app']}/{body['function']} is back on {body['revision']}")


def pin(
    session: Session,
    *,
    app: Address,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose callers.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[REVISION]", help="The revision that answers them.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Let the weights decide again.")] = False,
) -> None:
    """Let one revision answer a tenant's callers, whatever the weights."""
    if (name is None) != remove:
        raise InvalidInput(
            "name a revision, or say --remove: one of them",
            hint="pilotlight app pin search/embed acme v6",
        )
    owner, function = _split(app)
    with session.client() as client:
        body = client.pin(owner, tenant, name, function=function)
    told = f"is answered by {body['revision']}" if body["revision"] else "follows the weights again"
    session.show(body, lambda: f"{body['app']}/{body['function']}: {tenant} {told}")


def alias(
    session: Session,
    *,
    app: Address,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ALIAS]", help="A name of yours; all are listed without it."),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="[REVISION]", help="What it shall stand for.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take it away.")] = False,
) -> None:
    """List a function's aliases, move one, or take one away. `stable` and `candidate` are kept by
    the platform."""
    owner, function = _split(app)
    if name is not None and (target is None) != remove:
        raise InvalidInput(
            "name a revision, or say --remove: one of them",
            hint="pilotlight app alias search/embed blessed v6",
        )
    with session.client() as client:
        if name is not None and remove:
            client.delete_alias(owner, name, function=function)
        elif name is not None and target is not None:
            client.set_alias(owner, name, target, function=function)
        found = client.aliases(owner, function=function)
    rows = [{"alias": one, "revision": found[one]} for one in sorted(found)]
    session.show(
        found,
        lambda: format_table(
            rows, {"alias": "alias", "revision": "revision"}, empty=f"{app} has no aliases."
        ),
    )


def protect(
    session: Session,
    *,
    app: Annotated[str, typer.Argument(metavar="APP", help="Name of the app.")],
    approvals: Annotated[
        int, typer.Option(min=0, max=10, help="Of how many keys a new revision needs; 0 = none.")
    ],
) -> None:
    """Let new revisions need approvals before they take traffic. Needs scope admin; what serves
    goes on."""
    with session.client() as client:
        body = client.protect_app(app, approvals=approvals)
    told = (
        f"new revisions need {approvals} approval{'s' if approvals > 1 else ''}"
        if approvals
        else "new revisions need no approval"
    )
    session.show({"app": app, **body}, lambda: f"{app}: {told}")


def approve(
    session: Session,
    *,
    app: Address,
    name: Revision,
    note: Annotated[str, typer.Option("--note", "-m", help="Kept with the approval.")] = "",
) -> None:
    """Agree that a revision takes traffic. A key counts once, and not for what it deployed
    itself."""
    owner, function = _split(app)
    with session.client() as client:
        body = client.approve(owner, name, function=function, note=note)
    full, left = f"{body['app']}/{body['function']}", body["missing"]
    after = (
        f"needs {left} more"
        if left
        else f"may serve: pilotlight app promote {full} {body['revision']}"
    )
    session.show(body, lambda: f"{full}@{body['revision']} is approved; it {after}")


VERBS: dict[str, Callable[..., None]] = {
    "revisions": revisions,
    "revision": revision,
    "diff": diff,
    "promote": promote,
    "rollback": rollback,
    "pin": pin,
    "alias": alias,
    "protect": protect,
    "approve": approve,
}


def _promoted(body: dict[str, Any]) -> str:
    name = f"{body['app']}/{body['function']}"
    if body["stage"] == "rollout":
        return (
            f"{body['revision']} takes over {name} step by step: `pilotlight rollout watch "
            f"{body['rollout']}` shows how it goes"
        )
    return f"{name} is answered by {body['revision']}"


def _promote_from(
    session: Session, client: Client, *, app: str, source: str, options: dict[str, Any], yes: bool
) -> None:
    owner, function = _split(app)
    target = client.profile.environment
    session.confirm(f"Deploy in {target} what serves {app} in {source}?", yes=yes)
    done = client.promote_app(
        owner, from_environment=source, to_environment=target, function=function, **options
    )
    rows = [
        {
            "function": f.function,
            "revision": f.revision,
            "stage": f.stage,
            "needs": f.approvals or None,
        }
        for f in done.functions
    ]
    columns = {
        "function": "function",
        "revision": "revision",
        "stage": "",
        "needs": "needs approvals",
    }
    session.show(
        {
            "app": done.app,
            "environment": done.environment,
            "version": done.version,
            "functions": rows,
        },
        lambda: format_table(rows, columns, empty="Nothing serves there."),
    )


def _split(address: str) -> tuple[str, str | None]:
    app, _, function = address.partition("/")
    return app, function or None


def _manifest(body: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    served = (
        f"first served {format_time(body['served_at'])}" if body["served_at"] else "never served"
    )
    head = (
        f"{body['app']}/{body['function']}@{body['revision']}, made "
        f"{format_time(body['created_at'])} by {body['created_by']}, {served}"
    )
    facts = {
        "traffic": f"{body['weight']} %",
        "names": [*body["aliases"], *body["tags"]],
        "bundle": body["code"]["bundle"],
        "image": body["lock"]["image"],
        "environment": body["environment_digest"],
        "weights": [f"{w['name']}@{w['manifest'][:12]}" for w in body["weights"]],
        "card": {k: v for k, v in body["card"].items() if v},
        "resources": body["resources"],
        "lineage": body["lineage"],
        "evaluation": body["evaluation"],
        "requires": [
            f"{g['gate']} ({'passed' if g['passes'] else 'not reached'})" for g in body["requires"]
        ],
        "approvals": [one["by"] for one in body["approvals"]["given"]],
        "needs": body["approvals"]["missing"] or None,
        "rollout": f"{body['rollout']['id']}: {body['rollout']['state']}"
        if body["rollout"]
        else None,
    }
    rows = [
        {"what": name, "value": format_cell(name, value)} for name, value in facts.items() if value
    ]
    return Group(head, "", format_table(rows, {"what": "", "value": ""}, empty=""))


def _diff(body: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    rows = [
        {"what": one["what"], "from": _short(one["from"]), "to": _short(one["to"])}
        for one in body["changes"]
    ]
    listed = format_table(
        rows, {"what": "what", "from": body["from"], "to": body["to"]}, empty="They are the same."
    )
    breaks = [f"breaks callers: {text}" for text in body["breaks"]]
    return Group(listed, *breaks)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"

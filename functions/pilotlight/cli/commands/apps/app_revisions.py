"""`pilotlight app revisions|diff|promote|rollback|pin|alias|protect|approve`: show and change which
revision serves."""

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
        metavar="APP[/FUNCTION]",
        help="The function; for an app with one function, the app is enough.",
    ),
]
Revision = Annotated[
    str,
    typer.Argument(metavar="REVISION", help="Revision name, `v6`, an alias or a tag."),
]
MAX_SHOWN = 80
"""Maximum characters of a value in a diff, because schemas are long."""


def revisions(session: Session, app: Address) -> None:
    """List a function's revisions, newest first."""
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
        "created_at": "created",
        "served_at": "first served",
        "created_by": "by",
    }
    session.show(
        rows, lambda: format_table(shown, {**columns, **late}, empty=f"{app} has no revisions.")
    )


def revision(session: Session, app: Address, name: Revision) -> None:
    """Show a revision's manifest: code, image, weights, lineage, evaluation and approvals."""
    with session.client() as client:
        owner, function = _split(app)
        body = client.revision(owner, name, function=function)
    session.show(body, lambda: _manifest(body))


def diff(session: Session, app: Address, before: Revision, after: Revision) -> None:
    """Compare two revisions, and list the differences that break callers of the first."""
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
            metavar="[REVISION]", help="The revision to promote. Required without --from."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="Environment whose serving revisions are deployed in that of -e."
        ),
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
    """Give a revision all traffic, at once or with --canary step by step.

    With --from, deploy the revisions that serve in another environment.
    """
    if (name is None) == (source is None):
        raise InvalidInput(
            "pass either a revision, or an environment with --from",
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
            f"Give all traffic of {app} to {name}{'' if rollout is None else ', step by step'}?",
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
    app: Annotated[
        str,
        typer.Argument(
            metavar="APP[/FUNCTION]", help="The function, or the app: each of its functions."
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(help="The revision to return to. Default: the one that served before."),
    ] = None,
    message: release_options.Message = "",
    yes: Yes = False,
) -> None:
    """Return all traffic to an earlier revision at once.

    Needs no approval. Ends the function's rollout and experiment, if any. An app's functions go
    back together: if one has no earlier revision, none is changed.
    """
    owner, function = _split(app)
    with session.client() as client:
        found = [function] if function else [one["name"] for one in client.app(owner)["functions"]]
        if len(found) > 1 and to is not None:
            raise InvalidInput(
                f"{owner} has {len(found)} functions, whose revisions are counted separately",
                hint=f"Name the function that returns to {to}: {owner}/{found[0]}",
            )
        which = f"the {len(found)} functions of {owner}" if len(found) > 1 else app
        session.confirm(f"Roll {which} back to {to or 'the revision that served before'}?", yes=yes)
        if len(found) <= 1:
            body = client.rollback(owner, function=function, to=to, message=message)
            session.show(body, lambda: _is_back(body))
            return
        back = client.rollback_app(owner, message=message)
    session.show({"functions": back}, lambda: "\n".join(map(_is_back, back)))


def _is_back(body: dict[str, Any]) -> str:
    return f"{body['app']}/{body['function']} is back on {body['revision']}"


def pin(
    session: Session,
    *,
    app: Address,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the calling tenant.")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[REVISION]", help="The revision that answers its calls."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the pin: traffic weights apply again.")
    ] = False,
) -> None:
    """Route a tenant's calls to one revision, regardless of traffic weights."""
    if (name is None) != remove:
        raise InvalidInput(
            "pass either a revision or --remove",
            hint="pilotlight app pin search/embed acme v6",
        )
    owner, function = _split(app)
    body = session.request(lambda client: client.pin(owner, tenant, name, function=function))
    text = f"is pinned to {body['revision']}" if body["revision"] else "is no longer pinned"
    session.show(body, lambda: f"{body['app']}/{body['function']}: {tenant} {text}")


def alias(
    session: Session,
    *,
    app: Address,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ALIAS]", help="A name you choose. Without it: list all aliases."),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="[REVISION]", help="The revision it refers to.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
) -> None:
    """List a function's aliases, set one, or remove one.

    The platform maintains the aliases `stable` and `candidate`.
    """
    owner, function = _split(app)
    if name is not None and (target is None) != remove:
        raise InvalidInput(
            "pass either a revision or --remove",
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
        int,
        typer.Option(
            min=0, max=10, help="Number of keys that must approve a new revision; 0 = none."
        ),
    ],
) -> None:
    """Require approvals before new revisions take traffic.

    Needs scope admin. Revisions that already serve are not affected.
    """
    body = session.request(lambda client: client.protect_app(app, approvals=approvals))
    text = (
        f"new revisions need {approvals} approval{'s' if approvals > 1 else ''}"
        if approvals
        else "new revisions need no approval"
    )
    session.show({"app": app, **body}, lambda: f"{app}: {text}")


def approve(
    session: Session,
    *,
    app: Address,
    name: Revision,
    note: Annotated[str, typer.Option("--note", "-m", help="Note kept with the approval.")] = "",
) -> None:
    """Approve that a revision takes traffic.

    Each key counts once. A key cannot approve a revision that it deployed.
    """
    owner, function = _split(app)
    body = session.request(lambda client: client.approve(owner, name, function=function, note=note))
    full, left = f"{body['app']}/{body['function']}", body["missing"]
    after = (
        f"needs {left} more"
        if left
        else f"may take traffic: pilotlight app promote {full} {body['revision']}"
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
            f"{body['rollout']}` follows it"
        )
    return f"{body['revision']} takes all traffic of {name}"


def _promote_from(
    session: Session, client: Client, *, app: str, source: str, options: dict[str, Any], yes: bool
) -> None:
    owner, function = _split(app)
    target = client.profile.environment
    session.confirm(f"Deploy the revisions of {app} that serve in {source} to {target}?", yes=yes)
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
        lambda: format_table(rows, columns, empty="No revision serves there."),
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
        f"{body['app']}/{body['function']}@{body['revision']}, created "
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
        rows,
        {"what": "what", "from": body["from"], "to": body["to"]},
        empty="The revisions are identical.",
    )
    breaks = [f"breaks callers: {text}" for text in body["breaks"]]
    return Group(listed, *breaks)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"

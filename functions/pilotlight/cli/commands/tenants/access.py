"""`pilotlight token …`, `secret …`, `environment …`: who may do what, and with which
credentials."""

from __future__ import annotations

import getpass
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import format_table, parse_duration_s, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import to_json
from pilotlight.spec.identifiers import Scope

Name = Annotated[str, typer.Argument(metavar="NAME")]


def register(root: typer.Typer) -> None:
    """Add the three groups."""
    groups: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
        "token": (
            "API keys.",
            {
                "create": token_create,
                "list": token_list,
                "rotate": token_rotate,
                "revoke": token_revoke,
            },
        ),
        "secret": (
            "Secrets: environment variables that instances see.",
            {"set": secret_set, "list": secret_list, "delete": secret_delete},
        ),
        "environment": (
            "Environments: the same app names, side by side.",
            {"create": environment_create, "list": environment_list, "delete": environment_delete},
        ),
    }
    for name, (help_text, functions) in groups.items():
        group = typer.Typer(help=help_text, no_args_is_help=True)
        for verb, function in functions.items():
            command(group, verb)(function)
        root.add_typer(group, name=name)


def token_create(
    session: Session,
    *,
    scope: Annotated[
        Scope,
        typer.Option(
            help="What it may do; admin includes deploy, deploy includes invoke and read-billing."
        ),
    ] = Scope.INVOKE,
    name: Annotated[str, typer.Option(help="A note to recognise it by.")] = "",
    only_environment: Annotated[
        str | None, typer.Option(help="It works in this environment only.")
    ] = None,
    app: Annotated[str | None, typer.Option(help="It reaches this app only.")] = None,
    function: Annotated[
        str | None, typer.Option(help="It reaches this function of --app only.")
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUOTA=VALUE",
            help="Bounds its calls: requests_per_s=5, concurrent=2. Repeatable.",
        ),
    ] = None,
    ttl: Annotated[str | None, typer.Option(help="It expires after this: 12h, 30d.")] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Of this tenant, which lost its last; for administrators of the platform."
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Without a key, as the owner of this machine's platform: when the last admin key "
            "was lost.",
        ),
    ] = False,
) -> None:
    """Create an API key. It is shown once and kept as a hash only."""
    ttl_s = parse_duration_s(ttl) if ttl else None
    reach: dict[str, Any] = {"environment": only_environment, "app": app, "function": function}
    reach["quotas"] = parse_pairs(quota or (), option="--quota")
    if local and tenant:
        raise InvalidInput(
            "--local makes keys of the platform's first tenant",
            hint="With that one: token create --tenant NAME.",
        )
    if local:
        body = operator_key(session, scope=scope, name=name, reach=reach, ttl_s=ttl_s)
    else:
        with session.client() as client:
            body = client.create_key(
                scope=scope.value, name=name, ttl_s=ttl_s, tenant=tenant, **reach
            )
    session.show(body, lambda: str(body["secret"]))
    session.say("shown this one time; use it as PILOTLIGHT_API_KEY")


def operator_key(
    session: Session, *, scope: Scope, name: str, reach: Mapping[str, Any], ttl_s: float | None
) -> dict[str, Any]:
    """A key straight from the database of the platform on this machine, running or not; a running
    controller is told."""
    from pilotlight.cli.commands.operations.up import process_states
    from pilotlight.cli.supervisor import local_platform, run_platform
    from pilotlight.controller.identity.api_keys import KeyRestrictions
    from pilotlight.controller.server.bootstrap import operator_key as make

    platform = local_platform.with_active_config(session.platform())
    found = local_platform.find_running(platform)
    os.environ.update(run_platform.process_environment(platform))
    made = make(
        platform.config, scope=scope, name=name, reach=KeyRestrictions(**reach), expires_in_s=ttl_s
    )
    controller = process_states(Path(found.run), platform.config)["controller"] if found else None
    if controller is not None:
        os.kill(controller, signal.SIGHUP)
    record = {
        key: value for key, value in to_json(made.record).items() if key not in ("hash", "tenant")
    }
    return {**record, "name": made.name, "created_at": made.created_at, "secret": made.secret}


def token_list(session: Session) -> None:
    """API keys: ids, scopes and dates."""
    with session.client() as client:
        rows = client.keys()
    columns = {
        "id": "id",
        "name": "name",
        "scope": "scope",
        "environment": "environment",
        "app": "app",
        "function": "function",
    }
    late = {"created_at": "created", "expires_at": "expires", "revoked_at": "revoked"}
    session.show(rows, lambda: format_table(rows, {**columns, **late}, empty="No keys."))


def token_rotate(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    grace: Annotated[
        str | None, typer.Option(help="The old text works so long: 1h, 7d. Without it not at all.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Give an API key a new text: same scope, reach and quotas, under a new id. It is shown
    once."""
    grace_s = parse_duration_s(grace) if grace else 0.0
    if grace_s == 0:
        session.confirm(
            f"Rotate {key_id}? Whoever uses the old text is refused from now on; --grace 1h gives "
            f"time to change it.",
            yes=yes,
        )
    with session.client() as client:
        body = client.rotate_key(key_id, grace_s=grace_s)
    session.show(body, lambda: str(body["secret"]))
    ends = f"{key_id} works for another {grace}" if grace_s else f"{key_id} has ended"
    session.say(f"shown this one time; it is {body['id']}, and {ends}")


def token_revoke(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also the last admin key of a tenant: the tenant cannot be administered then.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Revoke an API key at once. The last admin key of a tenant is kept without --force."""
    session.confirm(f"Revoke {key_id}? Whoever uses it is refused from now on.", yes=yes)
    with session.client() as client:
        client.revoke_key(key_id, force=force)
    session.show({"id": key_id, "revoked": True}, lambda: f"{key_id} is revoked")


def secret_set(
    session: Session,
    name: Name,
    keys: Annotated[
        list[str],
        typer.Argument(metavar="VARIABLE…", help="Environment variables; each value is asked for."),
    ],
    from_env: Annotated[
        bool, typer.Option("--from-env", help="Take the values from variables of the same names.")
    ] = False,
    from_file: Annotated[
        Path | None, typer.Option(help="Take the value of the one variable from this file.")
    ] = None,
) -> None:
    """Create or replace a secret. Values are asked for, or read from stdin, a line each; they are
    never printed.

    Instances see the new values after their next start.
    """
    values = secret_values(keys, from_env=from_env, from_file=from_file, environ=session.environ)
    with session.client() as client:
        client.put_secret(name, values)
    session.show(
        {"name": name, "variables": sorted(values)},
        lambda: f"{name} is set ({', '.join(sorted(values))})",
    )


def secret_values(
    keys: Sequence[str], *, from_env: bool, from_file: Path | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """A value for each variable, from where the options say. Raises InvalidInput."""
    if wrong := [key for key in keys if "=" in key or not key.isidentifier()]:
        raise InvalidInput(
            f"{wrong[0].partition('=')[0]!r}… is not a variable's name",
            hint="Give names only; values are asked for, so that no shell history keeps them.",
        )
    if from_env:
        if missing := [key for key in keys if key not in environ]:
            raise InvalidInput(
                f"the environment has no {', '.join(missing)}",
                hint="Export it first, or leave out --from-env.",
            )
        return {key: environ[key] for key in keys}
    if from_file is not None:
        if len(keys) != 1:
            raise InvalidInput("--from-file holds one value", hint="Name exactly one variable.")
        return {keys[0]: from_file.read_text()}
    if sys.stdin.isatty():
        return {key: getpass.getpass(f"{key}: ") for key in keys}
    lines = sys.stdin.read().splitlines()
    if len(lines) != len(keys):
        raise InvalidInput(
            f"{len(keys)} values are needed and stdin has {len(lines)} lines",
            hint="Write one value per line.",
        )
    return dict(zip(keys, lines, strict=True))


def secret_list(session: Session) -> None:
    """Names of secrets and of their variables."""
    with session.client() as client:
        rows = client.secrets()
    columns = {"name": "name", "variables": "variables", "updated_at": "changed"}
    session.show(rows, lambda: format_table(rows, columns, empty="No secrets."))


def secret_delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a secret. Functions that name it fail to start."""
    session.confirm(
        f"Delete the secret {name}? Functions that use it will not start any more.", yes=yes
    )
    with session.client() as client:
        client.delete_secret(name)
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")


def environment_create(session: Session, name: Name) -> None:
    """Create an environment."""
    with session.client() as client:
        client.create_environment(name)
    session.show({"name": name}, lambda: f"{name} is there; use it with -e {name}")


def environment_list(session: Session) -> None:
    """Environments of this tenant."""
    with session.client() as client:
        rows = client.environments()
    session.show(
        rows,
        lambda: format_table(rows, {"name": "name", "created_at": "created"}, empty="Only `main`."),
    )


def environment_delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete an environment without apps; its secrets and keys go with it."""
    session.confirm(f"Delete the environment {name} with its secrets and keys?", yes=yes)
    with session.client() as client:
        client.delete_environment(name)
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")

"""`pilotlight token …`, `secret …`, `environment …`: manage API keys, secrets and environments."""

from __future__ import annotations

import getpass
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotlight.cli.commands.tenants.login import token_show
from pilotlight.cli.core.addresses import parse_optional_function
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_table, parse_duration_s, parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.record_json import to_json

Name = Annotated[str, typer.Argument(metavar="NAME")]


def register(root: typer.Typer) -> None:
    """Add the three command groups."""
    groups: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
        "token": (
            "Manage API keys.",
            {
                "create": token_create,
                "list": token_list,
                "show": token_show,
                "rotate": token_rotate,
                "revoke": token_revoke,
            },
        ),
        "secret": (
            "Manage secrets, which instances receive as environment variables.",
            {"set": secret_set, "list": secret_list, "delete": secret_delete},
        ),
        "environment": (
            "Manage environments, such as staging and production, each with its own apps.",
            {"create": environment_create, "list": environment_list, "delete": environment_delete},
        ),
    }
    for name, (help_text, functions) in groups.items():
        command_group(root, name, help_text, functions)


KeyScope = Annotated[
    Scope,
    typer.Option(
        help="Permissions: admin includes deploy, deploy includes invoke and read-billing."
    ),
]
KeyName = Annotated[str, typer.Option(help="Name to recognize the key by.")]
OnlyEnvironment = Annotated[str | None, typer.Option(help="Restrict the key to this environment.")]
OnlyApp = Annotated[str | None, typer.Option(help="Restrict the key to this app.")]
OnlyFunction = Annotated[
    str | None,
    typer.Option(metavar="APP/FUNCTION", help="Restrict the key to this function."),
]
KeyQuota = Annotated[
    list[str] | None,
    typer.Option(
        metavar="QUOTA=VALUE",
        help="Quota of the key's calls, such as requests_per_s=5 or concurrent=2; may be repeated.",
    ),
]
OnlyCustomer = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Make all calls of the key for this customer; its holder can name no other.",
    ),
]
Lifetime = Annotated[
    str | None, typer.Option(help="Lifetime of the key, such as 12h or 30d. Default: no limit.")
]
OfTenant = Annotated[
    str | None,
    typer.Option(
        help="Create the key for this tenant, which has lost its last one; platform "
        "administrators only."
    ),
]
Local = Annotated[
    bool,
    typer.Option(
        "--local",
        help="Create the key in the local platform's database, without an API key: for when "
        "the last admin key is lost.",
    ),
]


def token_create(
    session: Session,
    *,
    scope: KeyScope = Scope.INVOKE,
    name: KeyName = "",
    only_environment: OnlyEnvironment = None,
    app: OnlyApp = None,
    function: OnlyFunction = None,
    quota: KeyQuota = None,
    customer: OnlyCustomer = None,
    ttl: Lifetime = None,
    tenant: OfTenant = None,
    local: Local = False,
) -> None:
    """Create an API key. It is shown only once; the platform stores only its hash."""
    ttl_s = parse_duration_s(ttl) if ttl else None
    only_app, only_function = parse_optional_function(function, app)
    reach: dict[str, Any] = {
        "environment": only_environment,
        "app": only_app,
        "function": only_function,
        "customer": customer,
    }
    reach["quotas"] = parse_pairs(quota or (), option="--quota")
    if local and tenant:
        raise InvalidInput(
            "--local creates keys of the platform's first tenant only",
            hint="Use such a key to run `pilotlight token create --tenant NAME`.",
        )
    if local:
        body = operator_key(session, scope=scope, name=name, reach=reach, ttl_s=ttl_s)
    else:
        body = session.request(
            lambda client: client.create_key(
                scope=scope.value, name=name, ttl_s=ttl_s, tenant=tenant, **reach
            )
        )
    session.show(body, lambda: str(body["secret"]))
    session.say("shown only once; use it as PILOTLIGHT_API_KEY")


def operator_key(
    session: Session, *, scope: Scope, name: str, reach: Mapping[str, Any], ttl_s: float | None
) -> dict[str, Any]:
    """Create a key in the database of the local platform, running or not, and notify a running
    controller."""
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
    """List API keys with their ids, scopes and dates."""
    rows = session.request(lambda client: client.keys())
    columns = {
        "id": "id",
        "name": "name",
        "scope": "scope",
        "environment": "environment",
        "app": "app",
        "function": "function",
    }
    if any(row.get("customer") for row in rows):
        columns["customer"] = "customer"
    late = {"created_at": "created", "expires_at": "expires", "revoked_at": "revoked"}
    session.show(rows, lambda: format_table(rows, {**columns, **late}, empty="No keys."))


def token_rotate(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    grace: Annotated[
        str | None,
        typer.Option(
            help="How long the old key keeps working, such as 1h or 7d. Default: it is revoked at "
            "once."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Replace an API key by a new one with the same scope, restrictions and quotas.

    The new key has a new id and is shown only once.
    """
    grace_s = parse_duration_s(grace) if grace else 0.0
    if grace_s == 0:
        session.confirm(
            f"Rotate {key_id}? The old key stops working at once; --grace 1h gives time to replace "
            f"it.",
            yes=yes,
        )
    body = session.request(lambda client: client.rotate_key(key_id, grace_s=grace_s))
    session.show(body, lambda: str(body["secret"]))
    ends = f"{key_id} works for another {grace}" if grace_s else f"{key_id} is revoked"
    session.say(f"shown only once; its id is {body['id']}; {ends}")


def token_revoke(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Revoke even a tenant's last admin key: the tenant can then not be administered.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Revoke an API key at once. A tenant's last admin key is revoked only with --force."""
    session.confirm(f"Revoke {key_id}? Requests with it are refused at once.", yes=yes)
    session.request(lambda client: client.revoke_key(key_id, force=force))
    session.show({"id": key_id, "revoked": True}, lambda: f"{key_id} is revoked")


def secret_set(
    session: Session,
    name: Name,
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="VARIABLE…", help="Names of environment variables; values are prompted for."
        ),
    ],
    from_env: Annotated[
        bool,
        typer.Option(
            "--from-env", help="Read the values from environment variables of this shell."
        ),
    ] = False,
    from_file: Annotated[
        Path | None, typer.Option(help="Read the value of the one variable from this file.")
    ] = None,
) -> None:
    """Create or replace a secret.

    Values are prompted for, or read from stdin, one per line; they are never printed. Instances
    receive the new values at their next start.
    """
    values = secret_values(keys, from_env=from_env, from_file=from_file, environ=session.environ)
    session.request(lambda client: client.put_secret(name, values))
    session.show(
        {"name": name, "variables": sorted(values)},
        lambda: f"{name} is set ({', '.join(sorted(values))})",
    )


def secret_values(
    keys: Sequence[str], *, from_env: bool, from_file: Path | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Read the value of each variable from the source in the options. Raises InvalidInput."""
    if wrong := [key for key in keys if "=" in key or not key.isidentifier()]:
        raise InvalidInput(
            f"{wrong[0].partition('=')[0]!r}… is not the name of a variable",
            hint="Pass names only. Values are prompted for, so that they stay out of the shell "
            "history.",
        )
    if from_env:
        if missing := [key for key in keys if key not in environ]:
            raise InvalidInput(
                f"the environment has no {', '.join(missing)}",
                hint="Export it first, or omit --from-env.",
            )
        return {key: environ[key] for key in keys}
    if from_file is not None:
        if len(keys) != 1:
            raise InvalidInput(
                "--from-file takes the value of one variable", hint="Name exactly one variable."
            )
        return {keys[0]: from_file.read_text()}
    if sys.stdin.isatty():
        return {key: getpass.getpass(f"{key}: ") for key in keys}
    lines = sys.stdin.read().splitlines()
    if len(lines) != len(keys):
        raise InvalidInput(
            f"{len(keys)} values are needed, but stdin has {len(lines)} lines",
            hint="Write one value per line.",
        )
    return dict(zip(keys, lines, strict=True))


def secret_list(session: Session) -> None:
    """List secrets and the names of their variables."""
    rows = session.request(lambda client: client.secrets())
    columns = {"name": "name", "variables": "variables", "updated_at": "changed"}
    session.show(rows, lambda: format_table(rows, columns, empty="No secrets."))


def secret_delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a secret. Functions that use it fail to start."""
    session.confirm(f"Delete the secret {name}? Functions that use it will fail to start.", yes=yes)
    session.request(lambda client: client.delete_secret(name))
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")


def environment_create(session: Session, name: Name) -> None:
    """Create an environment."""
    session.request(lambda client: client.create_environment(name))
    session.show({"name": name}, lambda: f"{name} is created; use it with -e {name}")


def environment_list(session: Session) -> None:
    """List the tenant's environments."""
    rows = session.request(lambda client: client.environments())
    session.show(
        rows,
        lambda: format_table(rows, {"name": "name", "created_at": "created"}, empty="Only `main`."),
    )


def environment_delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete an environment without apps, and its secrets and keys."""
    session.confirm(f"Delete the environment {name} with its secrets and keys?", yes=yes)
    session.request(lambda client: client.delete_environment(name))
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")

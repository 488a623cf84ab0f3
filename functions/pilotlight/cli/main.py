"""Root of the `pilotlight` command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pilotlight.cli.core.command import common_callback
from pilotlight.cli.core.session import CommonOptions

_PARTS = {
    "up": "operations.up",
    "down": "operations.up",
    "status": "operations.up",
    "deploy": "apps.deploy",
    "run": "apps.deploy",
    "serve": "apps.deploy",
    "render": "apps.render",
    "call": "calls.call",
    "shell": "operations.instance",
    "audit": "tenants.audit",
    "doctor": "operations.doctor",
    "top": "operations.top",
    "loadtest": "calls.loadtest",
    "schedule": "calls.schedule",
    "webhook": "tenants.webhook",
    "app": "apps.app",
    "traffic": "apps.traffic",
    "rollout": "apps.rollout",
    "experiment": "apps.experiment",
    "feedback": "calls.feedback",
    "slo": "operations.slo",
    "trace": "calls.trace",
    "engine": "apps.engine",
    "image": "apps.image",
    "instance": "operations.instance",
    "snapshot": "operations.snapshot",
    "template": "operations.snapshot",
    "storage": "tenants.storage",
    "node": "operations.node",
    "weights": "apps.weights",
    "login": "tenants.login",
    "dashboard": "tenants.login",
    "token": "tenants.access",
    "secret": "tenants.access",
    "environment": "tenants.access",
    "tenant": "tenants.tenant",
    "plan": "tenants.tenant",
    "quota": "tenants.quota",
    "budget": "tenants.budget",
    "billing": "tenants.billing",
    "state": "operations.state",
}
"""Module that registers each command or command group, in the order of --help."""
_HELP = (
    "Serverless functions for models: they scale to zero, restart in milliseconds, and are billed "
    "per request."
)


class _Root(TyperGroup):
    """Imports a command's module on first use: importing all of them takes longer than most
    commands run."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return list(_PARTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command `cmd_name`. For an unknown name load all commands, so that typer can suggest
        the closest ones, and return None."""
        for part in (
            dict.fromkeys(_PARTS.values()) if cmd_name not in _PARTS else [_PARTS[cmd_name]]
        ):
            if not any(_PARTS.get(name) == part for name in self.commands):
                self.commands.update(_load(part))
        return self.commands.get(cmd_name)


def _load(part: str) -> Mapping[str, Any]:
    made = typer.Typer()
    importlib.import_module(f"pilotlight.cli.commands.{part}").register(made)
    return typer.main.get_group(made).commands


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"pilotlight {metadata.version('pilotlight')}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    options: CommonOptions,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    ctx.obj = options


def build() -> typer.Typer:
    """Build the complete command tree."""
    root = typer.Typer(
        name="pilotlight",
        cls=_Root,
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    root.callback()(common_callback(_root))
    return root


def main() -> None:
    """Run the `pilotlight` script, or `python -m pilotlight`."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    build()(prog_name="pilotlight")
    sys.exit(0)

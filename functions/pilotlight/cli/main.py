"""`pilotlight`: the command line's root."""

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
"""The module that registers each command or group of commands, in the order in which --help lists
them."""
_HELP = "Serverless functions for models: scale to zero, back in milliseconds, billed per request."


class _Root(TyperGroup):
    """Imports and builds a command when it is named: all of them would take longer than most
    commands run."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them."""
        return list(_PARTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of them; None for a name that is not there, after loading all: the closest ones are
        suggested."""
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
    """The whole tree of commands."""
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
    """Entry point of the `pilotlight` script and of `python -m pilotlight`."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    build()(prog_name="pilotlight")
    sys.exit(0)

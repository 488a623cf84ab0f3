"""Root of the `pilotlight` command line."""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from pilotlight.cli.core.command import common_callback
from pilotlight.cli.core.session import CommonOptions

_PANELS: dict[str, dict[str, str]] = {
    "Every day": {
        "up": "operations.up",
        "deploy": "apps.deploy",
        "run": "apps.run",
        "serve": "apps.serve",
        "call": "calls.call",
        "logs": "apps.logs",
        "app": "apps.app",
        "top": "operations.top",
        "billing": "tenants.billing",
        "dashboard": "tenants.login",
    },
    "This machine and the cluster": {
        "down": "operations.up",
        "status": "operations.up",
        "doctor": "operations.doctor",
        "drill": "operations.drill",
        "state": "operations.state",
        "node": "operations.node",
        "cluster": "operations.cluster",
        "render": "apps.render",
    },
    "Releases": {
        "rollout": "apps.rollout",
        "traffic": "apps.traffic",
        "experiment": "apps.experiment",
        "feedback": "calls.feedback",
        "slo": "operations.slo",
    },
    "Calls and instances": {
        "schedule": "calls.schedule",
        "webhook": "tenants.webhook",
        "trace": "calls.trace",
        "batch": "calls.batch",
        "log": "calls.log",
        "drift": "calls.drift",
        "replay": "calls.replay",
        "loadtest": "calls.loadtest",
        "plan": "calls.plan",
        "engine": "apps.engine",
        "instance": "operations.instance",
        "shell": "operations.instance",
        "sandbox": "calls.sandbox",
    },
    "Images, models and snapshots": {
        "image": "apps.image",
        "weights": "apps.weights",
        "volume": "apps.volume",
        "dict": "apps.collection",
        "queue": "apps.collection",
        "snapshot": "operations.snapshot",
        "template": "operations.snapshot",
        "storage": "tenants.storage",
    },
    "Access": {
        "login": "tenants.login",
        "token": "tenants.access",
        "secret": "tenants.access",
        "environment": "tenants.access",
        "audit": "tenants.audit",
    },
    "Tenants and limits": {
        "tenant": "tenants.tenant",
        "quota": "tenants.quota",
        "budget": "tenants.budget",
        "customer": "tenants.customer",
    },
}
"""Panels of --help in their order, and in each the commands and command groups with the module that
registers them."""
_PARTS = {name: part for panel in _PANELS.values() for name, part in panel.items()}
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
        command = self.commands.get(cmd_name)
        if command is not None:
            for panel, names in _PANELS.items():
                if cmd_name in names:
                    cast(TyperGroup, command).rich_help_panel = panel
        return command


def _load(part: str) -> Mapping[str, Any]:
    made = typer.Typer()
    importlib.import_module(f"pilotlight.cli.commands.{part}").register(made)
    import_gc.imported()
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

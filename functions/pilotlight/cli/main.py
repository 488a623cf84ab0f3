"""`pilotlight`: the command line's root."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pilotlight.cli import (
    admin,
    app,
    audit,
    billing,
    budget,
    call,
    deploy,
    doctor,
    engine,
    experiment,
    feedback,
    image,
    instance,
    loadtest,
    node,
    quota,
    render,
    rollout,
    schedule,
    slo,
    snapshot,
    state,
    storage,
    tenant,
    top,
    trace,
    traffic,
    up,
    webhook,
    weights,
)
from pilotlight.cli.commands import common_callback
from pilotlight.cli.session import Options

_PARTS = (
    up, deploy, render, call, schedule, webhook, app, traffic, rollout, experiment, feedback, slo, trace, engine, image, instance, snapshot,
    storage, node, weights, admin, tenant, quota, audit, budget, billing, state, doctor, top, loadtest,
)  # fmt: skip
"""In the order in which --help lists them."""
_HELP = "Serverless functions for models: scale to zero, back in milliseconds, billed per request."


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"pilotlight {metadata.version('pilotlight')}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    options: Options,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,  # noqa: ARG001 - its callback acts
) -> None:
    ctx.obj = options


def build() -> typer.Typer:
    """The whole tree of commands."""
    root = typer.Typer(name="pilotlight", help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False)
    root.callback()(common_callback(_root))
    for part in _PARTS:
        part.register(root)
    return root


def main() -> None:
    """Entry point of the `pilotlight` script and of `python -m pilotlight`."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    build()(prog_name="pilotlight")
    sys.exit(0)

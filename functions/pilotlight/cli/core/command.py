"""Registers functions as commands: adds the common options, a Session, and uniform error handling.

Exit statuses: 0 success, 1 failure (one line says what happened, one what to do), 2 wrong usage,
130 interrupted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pilotlight.cli.core.next_step import names_in_arguments, next_step
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.errors import DEBUG_VARIABLE, PilotlightError

INTERRUPTED = 130
Command = TypeVar("Command", bound=Callable[..., Any])

COMMON_PANEL = "Common options"
_COMMON: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[
            Path | None,
            typer.Option(
                help="platform.yaml of the local platform. Default: the first of platform.yaml in "
                "--home, $PILOTLIGHT_PLATFORM, ./platform.yaml, platform.yaml in the home.",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "home": (
        Annotated[
            Path | None,
            typer.Option(
                help="Home directory of the local platform.", rich_help_panel=COMMON_PANEL
            ),
        ],
        None,
    ),
    "profile": (
        Annotated[
            str | None,
            typer.Option(
                help="Profile (URL, API key, environment) to use. Default: $PILOTLIGHT_PROFILE, or "
                "the active profile of the profile file.",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "profile_file": (
        Annotated[
            Path | None,
            typer.Option(
                help="Profile file. Default: $PILOTLIGHT_CONFIG, or ~/.pilotlight.toml.",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "environment": (
        Annotated[
            str | None,
            typer.Option(
                "--environment",
                "-e",
                help="Environment to use. Default: $PILOTLIGHT_ENVIRONMENT, or the profile's.",
                rich_help_panel=COMMON_PANEL,
            ),
        ],
        None,
    ),
    "as_json": (
        Annotated[
            bool,
            typer.Option(
                "--json", help="Print results and errors as JSON.", rich_help_panel=COMMON_PANEL
            ),
        ],
        False,
    ),
}
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_YES = Annotated[
    bool, typer.Option("--yes", "-y", help="Accepted for scripts: this command does not ask.")
]
_ENDING = frozenset(
    {"abort", "cancel", "clear", "collect", "delete", "disable", "down", "drop", "prune", "revoke"}
    | {"stop", "suspend"}
)
"""Commands that end or delete something: all accept --yes, also those that do not ask."""


def pop_common_options(values: dict[str, Any]) -> CommonOptions:
    """Remove the common options from a command's arguments and return them."""
    taken = {name: values.pop(name) for name in _COMMON}
    return CommonOptions(json=taken.pop("as_json"), **taken)


def command(
    app: typer.Typer, name: str | None = None, **settings: Any
) -> Callable[[Command], Command]:
    """Register `function(session, …)` as a command of `app` and add the common options; and --yes
    to a command that ends something without asking."""

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> None:
            options = pop_common_options(values).over(ctx.obj or CommonOptions())
            if never_asks:
                values.pop("yes")
            extra = {"rest": list(ctx.args)} if takes_rest else {}
            handle_errors(
                lambda session: function(session, **values, **extra),
                Session(options=options, names=names_in_arguments(own, values)),
            )

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        takes_rest = any(p.name == "rest" for p in own)
        never_asks = name in _ENDING and all(p.name != "yes" for p in own)
        added = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            for n, (hint, default) in _COMMON.items()
        ]
        if never_asks:
            added.append(
                inspect.Parameter(
                    "yes", inspect.Parameter.KEYWORD_ONLY, annotation=_YES, default=False
                )
            )
        context = inspect.Parameter(
            "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [
            context,
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "rest"),
            *added,
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, **settings)(run)
        return function

    return register


def command_group(
    parent: typer.Typer, name: str, help: str, verbs: Mapping[str, Callable[..., None]]
) -> typer.Typer:
    """Add a group of commands to `parent`: `verbs` are its functions by the name of the command."""
    group = typer.Typer(help=help, no_args_is_help=True)
    for verb, function in verbs.items():
        command(group, verb)(function)
    parent.add_typer(group, name=name)
    return group


def common_callback(run: Callable[[typer.Context, CommonOptions], None]) -> Callable[..., None]:
    """Make a callback of the root command that also accepts the common options."""

    def callback(ctx: typer.Context, **values: Any) -> None:
        run(ctx, pop_common_options(values))

    own = [
        p for p in inspect.signature(run, eval_str=True).parameters.values() if p.name != "options"
    ]
    added = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=h, default=d)
        for n, (h, d) in _COMMON.items()
    ]
    callback.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    callback.__doc__ = run.__doc__
    return callback


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the body as Ctrl-C does on SIGTERM and on SIGHUP (a closed terminal), so that it removes
    what it made. A signal that is ignored (nohup) or handled stays so. Main thread only."""
    ending = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows
    found = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in found:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in found:
            signal.signal(number, signal.SIG_DFL)


def handle_errors(body: Callable[[Session], Any], session: Session) -> None:
    """Run a command's body. Report an expected error as two lines and an exit status."""
    from pilotlight.core.settings import SettingsInvalid
    from snapshotter.errors import SnapshotterError

    try:
        body(session)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `pilotlight logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (PilotlightError, SettingsInvalid, SnapshotterError, OSError) as e:
        if session.environ.get(DEBUG_VARIABLE):
            raise
        report_error(e, session)
        raise typer.Exit(1) from None


def report_error(error: Exception, session: Session) -> None:
    """Print what happened and what to do on stderr; with --json as one JSON object."""
    body = describe_error(error, session)
    message, detail = body["message"], body["detail"]
    if session.is_json:
        print(json.dumps({"error": body}, default=str), file=sys.stderr)
        return
    notes = session.notes()
    for line in detail.get("log_tail") or ():
        notes.print(
            f"  {line if isinstance(line, str) else line.get('text', '')}",
            style="dim",
            markup=False,
        )
    notes.print(f"[bold red]error[/] {_escape(message)}")
    notes.print(f"[bold]try[/]   {_escape(body['hint'])}")
    if log := detail.get("log"):
        notes.print(f"[bold]log[/]   {_escape(str(log))}")


def describe_error(error: Exception, session: Session) -> dict[str, Any]:
    """The error as JSON: `type`, `message`, `hint` (what to do) and `detail`."""
    return {
        "type": error.type if isinstance(error, PilotlightError) else type(error).__name__,
        "message": str(error) or type(error).__name__,
        "hint": next_step(error, session.names),
        "detail": dict(error.detail) if isinstance(error, PilotlightError) else {},
    }


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)

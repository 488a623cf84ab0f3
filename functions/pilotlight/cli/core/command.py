"""Turns a plain function into a command: gives it the common options, a Session, and one way to
fail.

Exit statuses: 0 done, 1 failed (one line what happened, one line what to do), 2 wrong usage, 130
interrupted."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.errors import PilotlightError

DEBUG_VARIABLE = "PILOTLIGHT_DEBUG"
INTERRUPTED = 130
Command = TypeVar("Command", bound=Callable[..., Any])

_PANEL = "Common options"
_COMMON: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[
            Path | None,
            typer.Option(
                help="platform.yaml of the platform on this machine.", rich_help_panel=_PANEL
            ),
        ],
        None,
    ),
    "home": (
        Annotated[
            Path | None,
            typer.Option(
                help="Home directory of the platform on this machine.", rich_help_panel=_PANEL
            ),
        ],
        None,
    ),
    "profile": (
        Annotated[
            str | None, typer.Option(help="Profile of the profile file.", rich_help_panel=_PANEL)
        ],
        None,
    ),
    "profile_file": (
        Annotated[
            Path | None, typer.Option(help="Instead of ~/.pilotlight.toml.", rich_help_panel=_PANEL)
        ],
        None,
    ),
    "environment": (
        Annotated[
            str | None,
            typer.Option("--environment", "-e", help="Environment.", rich_help_panel=_PANEL),
        ],
        None,
    ),
    "as_json": (
        Annotated[
            bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_PANEL)
        ],
        False,
    ),
}
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_WHAT_TO_DO = {
    "invalid-input": "Correct it and try again; --help, and `pilotlight app show APP` for a "
    "function's settings, say what is expected.",
    "conflict": "Look at what is there with the matching `list` or `show` command, then try again.",
    "incompatible-schema": "Keep what callers use, or deploy with --allow-breaking if none does; "
    "`pilotlight app diff` compares revisions.",
    "gate-failed": "Give the numbers with --eval metrics.json, or change require= of the "
    "function; nothing was changed.",
    "approval-required": "Let somebody else run `pilotlight app approve`; `pilotlight app "
    "revisions` shows what is missing.",
    "release-frozen": "Wait until the budget recovers, or release with --override-freeze (scope "
    "admin); `pilotlight slo show` shows it.",
    "circuit-open": "Try again in a moment; `pilotlight app logs APP` may say why it failed, "
    "`pilotlight app rollback APP` goes back.",
    "too-large": "Send less; the limits are in platform.yaml (max_body_bytes, bundle_max_bytes, "
    "blob_max_bytes).",
    "unsupported-media-type": "Send JSON: another tenant's function takes nothing else.",
    "unauthenticated": "Set PILOTLIGHT_API_KEY, or pass --profile: `pilotlight up` wrote the "
    "first key to ~/.pilotlight.toml.",
    "forbidden": "Use a key of a higher scope: `pilotlight token create --scope deploy`.",
    "not-found": "See what is there: `pilotlight app list`, or the `list` command of what you "
    "named.",
    "unavailable": "Try again in a moment; `pilotlight app list` shows what is stopped, "
    "`pilotlight status` whether the platform runs.",
    "function-raised": "It is the function's own error: `pilotlight app logs APP --call ID` has "
    "its traceback.",
    "too-many-requests": "Try again later, or raise max_instances or max_queued of the function.",
    "over-quota": "Try again later; `pilotlight quota show` says what bounds you. Your quotas of "
    "functions and keys you set yourself.",
    "shed": "Try again later, or with a higher priority: there was not enough for all.",
    "over-budget": "`pilotlight budget list` shows it; raise it with `pilotlight budget set`, or "
    "wait for the next period.",
    "budget-reserved": "Try again once calls that run have ended; `pilotlight budget list` shows "
    "what is left.",
    "snapshot-refused": "Correct what is named, or write snapshot=False: then it starts COLD or "
    "by FORK only.",
    "unsupported": "`pilotlight doctor` says what this machine can do, and what would help.",
    "storage-full": "Free disk space in the platform's home; nothing was changed.",
    "start-failed": "Read the function's own log: `pilotlight app logs APP`.",
    "worker-crashed": "Read the function's own log: `pilotlight app logs APP`.",
    "deadline-exceeded": "Raise the function's timeout or startup_timeout, or pass a longer "
    "--timeout.",
    "process-failed": "Read the whole log; `pilotlight doctor` checks this machine and the "
    "configuration.",
}


def take_common_options(values: dict[str, Any]) -> CommonOptions:
    """Take the common options out of a command's arguments."""
    taken = {name: values.pop(name) for name in _COMMON}
    return CommonOptions(json=taken.pop("as_json"), **taken)


def command(
    app: typer.Typer, name: str | None = None, **settings: Any
) -> Callable[[Command], Command]:
    """Register `function(session, …)` as a command of `app`, with the common options added."""

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> None:
            options = take_common_options(values).over(ctx.obj or CommonOptions())
            extra = {"rest": list(ctx.args)} if takes_rest else {}
            handle_errors(
                lambda session: function(session, **values, **extra), Session(options=options)
            )

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        takes_rest = any(p.name == "rest" for p in own)
        added = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            for n, (hint, default) in _COMMON.items()
        ]
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


def common_callback(run: Callable[[typer.Context, CommonOptions], None]) -> Callable[..., None]:
    """A callback of the root command that accepts the common options too."""

    def callback(ctx: typer.Context, **values: Any) -> None:
        run(ctx, take_common_options(values))

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


def handle_errors(body: Callable[[Session], Any], session: Session) -> None:
    """Run a command's body; what is expected to go wrong becomes two lines and an exit status."""
    from pilotlight.core.settings import SettingsInvalid
    from snapshotter.errors import SnapshotterError

    try:
        body(session)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `pilotlight app logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (PilotlightError, SettingsInvalid, SnapshotterError, OSError) as e:
        if session.environ.get(DEBUG_VARIABLE):
            raise
        report_error(e, session)
        raise typer.Exit(1) from None


def next_step(error: Exception) -> str:
    """The second line: the error's own `hint`, else by its type, else how to see more."""
    if isinstance(error, PilotlightError):
        if hint := error.detail.get("hint"):
            return str(hint)
        if known := _WHAT_TO_DO.get(error.type):
            return known
    return f"Set {DEBUG_VARIABLE}=1 to see where it comes from."


def report_error(error: Exception, session: Session) -> None:
    """What happened and what to do, on stderr; as one JSON object with --json."""
    detail = dict(error.detail) if isinstance(error, PilotlightError) else {}
    message = str(error) or type(error).__name__
    if session.is_json:
        kind = error.type if isinstance(error, PilotlightError) else type(error).__name__
        body = {"type": kind, "message": message, "hint": next_step(error), "detail": detail}
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
    notes.print(f"[bold]try[/]   {_escape(next_step(error))}")
    if log := detail.get("log"):
        notes.print(f"[bold]log[/]   {_escape(str(log))}")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)

"""The second line of an error report: what to do, with the names that the command knows in place of
APP, APP/FUNCTION, REVISION and ID."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pilotlight.errors import DEBUG_VARIABLE, NotFound, PilotlightError

APP, FUNCTION, REVISION = "APP", "APP/FUNCTION", "REVISION"
"""Placeholders in commands; the keys of a session's names."""
_OF_CALL = " --call ID"
_COMMAND = re.compile(r"`pilotlight [^`]*`")
_PLACEHOLDER = re.compile(rf"(?<!\S)({FUNCTION}|{APP}|{REVISION})(?=[\s`])")
_WHAT_TO_DO = {
    "invalid-input": "Correct the value and try again. See the command's --help; `pilotlight app "
    "show APP` shows a function's settings.",
    "conflict": "Check the current state with the matching `list` or `show` command, then try "
    "again.",
    "incompatible-schema": "Keep the fields that callers use, or deploy with --allow-breaking if "
    "no caller depends on them; `pilotlight app diff APP/FUNCTION FROM TO` compares revisions.",
    "gate-failed": "Pass the evaluation with --eval metrics.json, or change the function's "
    "require=. Nothing was changed.",
    "approval-required": "Ask another person to run `pilotlight app approve APP/FUNCTION "
    "REVISION`; `pilotlight app revisions APP/FUNCTION` shows the missing approvals.",
    "release-frozen": "Wait until the error budget recovers, or release with --override-freeze "
    "(scope admin). `pilotlight slo show APP/FUNCTION` shows the budget.",
    "circuit-open": "Try again in a moment. `pilotlight logs APP` shows why calls failed; "
    "`pilotlight app rollback APP` restores the previous revision.",
    "too-large": "Send less data; platform.yaml sets the limits (max_body_bytes, bundle_max_bytes, "
    "blob_max_bytes).",
    "unsupported-media-type": "Send JSON: a function of another tenant accepts no other type.",
    "unauthenticated": "Run `pilotlight login`, set PILOTLIGHT_API_KEY or pass --profile; "
    "`pilotlight login --oidc` signs in with an issuer; "
    "`pilotlight up` wrote the first key of this machine's platform to ~/.pilotlight.toml.",
    "forbidden": "Use a key with a higher scope: `pilotlight token create --scope deploy`.",
    "method-not-allowed": "Use one of the methods that the answer's header `Allow` names.",
    NotFound.type: "List what exists: `pilotlight app list`, or the `list` command of the "
    "resource.",
    "unavailable": "Try again in a moment. `pilotlight app list` shows stopped apps, `pilotlight "
    "status` whether the platform runs.",
    "function-raised": "The function's own code failed: `pilotlight logs APP --call ID` shows "
    "the traceback.",
    "too-many-requests": "Try again later, or raise the function's max_instances or max_queued.",
    "over-quota": "Try again later. `pilotlight quota show` shows the quotas; you can change those "
    "of your own functions and keys.",
    "shed": "Try again later, or with a higher priority: the platform is overloaded.",
    "over-budget": "Raise the budget with `pilotlight budget set`, or wait for the next period; "
    "`pilotlight budget list` shows it.",
    "insufficient-credit": "Grant credit with `pilotlight customer credit grant`; `pilotlight "
    "customer credit show` shows the balance.",
    "budget-reserved": "Try again when running calls have ended; `pilotlight budget list` shows "
    "the remaining amount.",
    "snapshot-refused": "Fix the named cause, or set snapshot=False: the function then starts by "
    "COLD or FORK only.",
    "unsupported": "Run `pilotlight doctor` to see what this machine supports and how to fix it.",
    "storage-full": "Free disk space in the platform's home. Nothing was changed.",
    "start-failed": "Read the function's log: `pilotlight logs APP`.",
    "worker-crashed": "Read the function's log: `pilotlight logs APP`.",
    "deadline-exceeded": "Raise the function's timeout or startup_timeout, or pass a longer "
    "--timeout.",
    "process-failed": "Read the complete log; `pilotlight doctor` checks this machine and the "
    "configuration.",
}


def names_in_arguments(
    parameters: Iterable[inspect.Parameter], values: Mapping[str, Any]
) -> dict[str, str]:
    """Return the app and the function that a command's arguments name: those whose metavar is a
    placeholder of the advice (`APP`, `APP/FUNCTION`), which are the keys."""
    names: dict[str, str] = {}
    for parameter in parameters:
        value = values.get(parameter.name)
        for info in typing.get_args(parameter.annotation)[1:]:
            metavar = str(getattr(info, "metavar", "") or "")
            if isinstance(value, str) and metavar.lstrip("[").startswith(APP):
                names |= name_target(value, is_app=metavar != FUNCTION)
    return names


def name_target(text: str, *, is_app: bool = False) -> dict[str, str]:
    """Return the names in `app/function`, or with `is_app` also in `app`, as
    `names_in_arguments`."""
    app, slash, function = text.partition("@")[0].partition("/")
    function = function.partition(".")[0]
    if not app or not (slash or is_app):
        return {}
    return {APP: app, **({FUNCTION: f"{app}/{function}"} if function else {})}


def next_step(error: Exception, names: Mapping[str, str] | None = None) -> str:
    """The second line of an error report: the error's `hint`, else advice for its type, else how to
    get a traceback. `names`: what the command is about, as from `names_in_arguments`; the
    error's own names take precedence."""
    if isinstance(error, PilotlightError):
        detail = error.detail
        known = {**(names or {}), **_names_in_error(error, names or {})}
        text = str(detail.get("hint") or "") or _advice(error, known)
        if text:
            call = str(detail.get("request_id") or "")
            return _COMMAND.sub(lambda found: _fill(found[0], known, call), text)
    return f"Set {DEBUG_VARIABLE}=1 to see the traceback."


def _advice(error: PilotlightError, known: Mapping[str, str]) -> str:
    """The advice for the error's type; "" if there is none. Where something was not found, it lists
    what is next to it."""
    app, function = known.get(APP, ""), known.get(FUNCTION, "")
    if error.type != NotFound.type or not app:
        return _WHAT_TO_DO.get(error.type, "")
    text = (
        f"`pilotlight app list` shows whether {app} is deployed, `pilotlight app show {app}` its "
        f"functions"
    )
    if function:
        text += f", `pilotlight app revisions {function}` the revisions of {function}"
    if not error.detail.keys() & {"app", "function", "revision"}:
        text += "; of another resource, use its `list` command"
    return f"{text}."


def _names_in_error(error: PilotlightError, names: Mapping[str, str]) -> dict[str, str]:
    """The names in an error's detail; its function may be named without its app."""
    function = str(error.detail.get("function") or "")
    app = error.detail.get("app") or names.get(APP, "")
    found = name_target(function if "/" in function else f"{app}/{function}")
    revision = error.detail.get("revision")
    return {**found, **({REVISION: str(revision)} if revision else {})}


def _fill(command: str, names: Mapping[str, str], call: str) -> str:
    """A command with the known names; without a known call, its option is left out."""
    command = command.replace(_OF_CALL, f" --call {call}" if call else "")
    return _PLACEHOLDER.sub(lambda found: names.get(found[0], found[0]), command)

"""`pilotlight run`: deploys an app under a temporary name, and calls one of its functions."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps.deploy_progress import (
    Deployer,
    load_user_app,
    remote_errors,
    user_code_errors,
)
from pilotlight.cli.core.command import command, ended_by_signals
from pilotlight.cli.core.next_step import APP
from pilotlight.cli.core.session import Session
from pilotlight.cli.core.signature_flags import parse_flags
from pilotlight.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from pilotlight.packaging.app import App
    from pilotlight.packaging.progress_output import ProgressOutput
    from pilotlight.sdk.cls import Cls


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(
        root, "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(run)


def run(
    session: Session,
    *,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="FILE[::FUNCTION]",
            help="The file; with ::FUNCTION, which of several functions to call.",
        ),
    ],
    rest: list[str],
) -> None:
    """Deploy an app under a temporary name, call one function, and remove the app again.

    Pass the function's parameters as options: `pilotlight run app.py::hello --name Ada`. A function
    with @app.local_entrypoint() runs on this machine while the app is deployed. Common options must
    precede the file."""
    from pilotlight.client import sessions as sdk
    from pilotlight.packaging.app import EphemeralRun
    from pilotlight.packaging.progress_output import ProgressOutput

    target, _, wanted = reference.partition("::")
    app = load_user_app(target)
    chosen = runnable(app, wanted)
    args, kwargs = parse_flags(chosen.signature, rest, what=wanted or app.name)
    results: list[Any] = []
    try:
        with ended_by_signals(), session.client() as client, sdk.use_profile(client.profile):
            output = ProgressOutput(is_json=session.is_json)
            name = f"{app.name}/{chosen.function}"
            errors = remote_errors(name) if chosen.function else user_code_errors(reference)
            with EphemeralRun(app, None, output) as ephemeral:
                session.names[APP] = ephemeral.name
                if chosen.function:
                    deployer = Deployer(session, client, output)
                    deployer.start(ephemeral.name, chosen.function, name=name)
                    output.step(f"{name}: calling")
                with errors:
                    results += _finish(session, chosen.call(*args, **kwargs), output)
    finally:
        sdk.close()
        for value in results:  # last, below the output of the function
            _print_result(session, value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """What `run` calls. `function`: its name in the app; "" for a local entrypoint."""

    signature: inspect.Signature
    call: Callable[..., Any]
    function: str = ""


def runnable(app: App, wanted: str) -> Runnable:
    """Find the callable for `run`: the named local entrypoint or function, else the only one.
    Raises NotFound or InvalidInput."""
    choices = {
        name: Runnable(signature=entry.signature, call=entry.raw)
        for name, entry in app.local_entrypoints.items()
    }
    if not choices or wanted:
        choices |= {address: each for address, each in _remote(app) if address not in choices}
    if wanted and wanted not in choices:
        raise NotFound(
            f"{app.name} has no function or local entrypoint {wanted!r}",
            hint=f"It has: {', '.join(choices) or 'none'}.",
        )
    if not wanted and len(choices) != 1:
        hint = (
            f"Name one, such as ::{next(iter(choices))}"
            if choices
            else "Declare one with @app.function()."
        )
        raise InvalidInput(
            f"{app.name} has {len(choices)} functions to run: {', '.join(choices) or 'none'}",
            hint=hint,
        )
    return choices[wanted or next(iter(choices))]


def _remote(app: App) -> Iterator[tuple[str, Runnable]]:
    from pilotlight.sdk.cls import Cls
    from pilotlight.sdk.function import Function

    for name, declaration in app.declarations.items():
        if declaration.kind in ("asgi", "engine"):
            continue
        for method in declaration.method_names():
            verb = "remote_gen" if declaration.is_generator(method) else "remote"
            if method:
                runnable = _method_runnable(
                    Cls(app=app.name, name=name, declaration=declaration), method, verb
                )
            else:
                handle: Any = Function(app=app.name, name=name, declaration=declaration)
                signature = inspect.signature(declaration.raw, eval_str=True)
                runnable = Runnable(signature=signature, call=getattr(handle, verb), function=name)
            yield f"{name}.{method}" if method else name, runnable


def _method_runnable(kind: Cls[Any], method: str, verb: str) -> Runnable:
    """A method, whose options are the parameters of its class, too."""
    from pilotlight.sdk.cls import parameters_of

    declaration = kind.__pilotlight__
    found = parameters_of(declaration) or {}
    own = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=one.kind,
            default=one.default if one.has_default else inspect.Parameter.empty,
        )
        for name, one in found.items()
    ]
    signature = inspect.signature(getattr(declaration.raw, method), eval_str=True)
    parameters = list(signature.parameters.values())[1:]
    rest = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    variable = parameters[len(rest) :]

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {name: kwargs.pop(name) for name in found if name in kwargs}
        return getattr(getattr(kind(**arguments), method), verb)(*args, **kwargs)

    return Runnable(
        signature=signature.replace(parameters=[*rest, *own, *variable]),
        call=call,
        function=declaration.name,
    )


def _finish(session: Session, value: Any, output: ProgressOutput) -> list[Any]:
    """Run what a call returned to its end, printing items as they come; return the results that
    remain to be printed. A coroutine or an asynchronous iterator is the result of an `async def`
    local entrypoint."""

    def show(item: Any) -> None:
        output.clear()
        _print_result(session, item)

    async def wait() -> Any:
        if not isinstance(value, AsyncIterator):
            return await value
        async for item in value:
            show(item)
        return iter(())

    if inspect.isawaitable(value) or isinstance(value, AsyncIterator):
        import asyncio

        value = asyncio.run(wait())
    if not isinstance(value, Iterator):
        return [value]
    for item in value:
        show(item)
    return []


def _print_result(session: Session, value: Any) -> None:
    if session.is_json:
        print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
    elif value is not None:
        print(value, flush=True)

"""`pilotlight deploy`, `run` and `serve`: deploy an app from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps import release_options
from pilotlight.cli.commands.apps import rollout_options as canaries
from pilotlight.cli.commands.apps.deploy_progress import (
    Deployer,
    Starts,
    load_user_app,
    remote_errors,
    user_code_errors,
)
from pilotlight.cli.core.command import command, ended_by_signals, report_error
from pilotlight.cli.core.next_step import APP
from pilotlight.cli.core.session import Session
from pilotlight.cli.core.signature_flags import parse_flags
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.protocol import TENANT_PATH
from pilotlight.spec.function import PUBLIC

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.client.resources.releases import DeployedFunction, Deployment, ReleaseOptions
    from pilotlight.packaging.app import App
    from pilotlight.packaging.progress_output import ProgressOutput
    from pilotlight.sdk.cls import Cls

File = Annotated[
    str, typer.Argument(metavar="FILE[::APP]", help="app.py, app.py::name, or package.module.")
]
_STARTS = (
    "cold: the first start, from nothing; restore: from its snapshot on disk; fork: from its process "
    "in memory. A call takes the fastest that is possible."
)


def register(root: typer.Typer) -> None:
    """Add the three commands."""
    command(root, "deploy")(deploy)
    command(
        root, "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(run)
    command(root, "serve")(serve)


Name = Annotated[str | None, typer.Option(help="Deploy under this name instead of the app's own.")]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait",
        help="Start each function once and wait until its snapshot is proven.",
    ),
]
Proof = Annotated[
    bool,
    typer.Option(
        "--proof/--no-proof",
        help="With --no-proof, wait until each function has started only: its snapshot is made "
        "and proven in the background.",
    ),
]


def deploy(
    session: Session,
    *,
    file: File,
    name: Name = None,
    message: release_options.Message = "",
    wait: Wait = True,
    proof: Proof = True,
    meta: release_options.Meta = None,
    evaluation: release_options.Evaluation = None,
    no_traffic: release_options.NoTraffic = False,
    tag: release_options.Tag = None,
    allow_breaking: release_options.AllowBreaking = False,
    override_freeze: release_options.OverrideFreeze = False,
    lease: release_options.Lease = None,
    canary: canaries.Canary = None,
    every: canaries.Every = None,
    min_samples: canaries.MinSamples = None,
    gate: canaries.Gates = None,
) -> None:
    """Package an app, upload it and make it live; then start each function once and prove its
    snapshot.

    The deploy is refused, before any traffic moves, if a schema change breaks callers of the
    serving revision, or if an evaluation misses a function's requirements. Each new revision
    records the git commit of the file. With --canary, a new revision takes over step by step as
    long as it is no worse than the serving one: follow it with `pilotlight rollout watch`."""
    from pilotlight.client import sessions as sdk

    terms: ReleaseOptions = {
        "meta": release_options.parse_lineage(meta),
        "evaluation": release_options.read_evaluation(evaluation),
        "no_traffic": no_traffic,
        "tag": tag,
        "allow_breaking": allow_breaking,
        "override_freeze": override_freeze,
        "lease_s": release_options.parse_lease_s(lease),
        "rollout": canaries.parse_rollout_plan(canary, every, min_samples, gate),
    }
    app = load_user_app(file)
    session.names[APP] = name or app.name
    with session.client() as client, sdk.use_profile(client.profile):
        deployment, starts = Deployer(session, client).deploy(
            app, name=name, message=message, wait=wait, proof=proof, terms=terms
        )
        addresses = addresses_of(client, deployment, app)
        url = client.profile.url
    session.show(
        report(deployment, starts, url, addresses),
        lambda: _deployed(deployment, starts, addresses, url),
    )
    if starts.failures:
        for error in starts.failures.values():
            report_error(error, session)
        raise typer.Exit(1)
    if starts.proofs and not session.is_json:
        _explain_starts_once(session)


def report(
    deployment: Deployment,
    starts: Starts,
    url: str,
    addresses: Mapping[str, list[str]],
) -> dict[str, Any]:
    """Format a deployment as JSON. `failed`: the functions that do not start, with the error."""
    return {
        **dataclasses.asdict(deployment),
        "url": url,
        "addresses": dict(addresses),
        "proofs": [dataclasses.asdict(proof) for proof in starts.proofs],
        "failed": [
            {"function": name, "type": error.type, "error": str(error)}
            for name, error in starts.failures.items()
        ],
    }


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


def serve(session: Session, *, file: File) -> None:
    """Deploy an app as APP-serve, redeploy it when a source file changes, and remove it on Ctrl-C.

    A deploy ends when the new code has started; its snapshot follows in the background. A file that
    is saved meanwhile supersedes it. Changes that break callers are accepted.
    """
    from watchfiles import Change, DefaultFilter, watch

    from pilotlight.cli.commands.apps.redeploy import Redeployer
    from pilotlight.client.app_lease import LEASE_S, AppLease
    from pilotlight.packaging.ignore import is_in_platform_home

    by_default = DefaultFilter()

    def is_source(change: Change, path: str) -> bool:
        return by_default(change, path) and not is_in_platform_home(Path(path), root)

    app = load_user_app(file)
    root = Path(file.partition("::")[0]).resolve().parent
    name = f"{app.name}-serve"
    argv = [
        *_as_words(session),
        "deploy",
        file,
        "--name",
        name,
        "--message",
        "serve",
    ]
    argv += ["--no-proof"]  # the next change may come sooner
    argv += ["--allow-breaking"]  # its only caller is its developer
    argv += ["--lease", f"{LEASE_S:.0f}s"]  # it ends with this process, also when that is killed

    def on_done(status: int) -> None:
        session.say(
            f"serving {name}; watching {root}; stop with Ctrl-C"
            if status == 0
            else "deploy failed; waiting for the next change"
        )

    with (
        Redeployer(file, root, argv, on_done) as redeployer,
        ended_by_signals(),
        session.client() as client,
    ):
        lease = AppLease(client, name, on_lost=lambda: _explain_lost(session, name))
        try:
            lease.start()
            # In another process, because this one cannot import a changed module again.
            redeployer.deploy()
            for _ in watch(root, watch_filter=is_source, raise_interrupt=True):
                session.say("source changed: deploying again")
                redeployer.deploy()
        finally:
            redeployer.close()  # it would deploy what is removed here
            lease.close()
            with contextlib.suppress(OSError):  # the terminal was closed
                session.say(f"removing {name}")
            client.delete_app(name)


def _explain_lost(session: Session, name: str) -> None:
    session.say(
        f"{name} was deleted: its lease was not renewed in time, or somebody deleted it; save a "
        "file to deploy it again"
    )


def _as_words(session: Session) -> list[str]:
    options = session.options
    named: Mapping[str, Any] = {
        "--profile": options.profile,
        "--profile-file": options.profile_file,
        "--environment": options.environment,
    }
    return [word for flag, value in named.items() if value for word in (flag, str(value))]


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


def _explain_starts_once(session: Session) -> None:
    """Explain the kinds of starts after the first deploy with this profile."""
    from pilotlight import profile

    environ = session.profile_environ()
    name = session.options.profile or profile.selected_name(environ)
    if profile.is_first_time(f"starts:{name}", path=profile.config_path(environ)):
        session.say(_STARTS)


def _deployed(
    deployment: Deployment,
    starts: Starts,
    addresses: Mapping[str, list[str]],
    url: str,
) -> str:
    is_live = any(f.stage == "live" for f in deployment.functions) and not starts.failures
    lines = [
        (
            f"{deployment.app} version {deployment.version} is {'live' if is_live else 'deployed'} in "
            f"{deployment.environment}{_failed(starts)}"
        )
    ]
    by_name = {proof.function: proof for proof in starts.proofs}
    for f in deployment.functions:
        proof = f"  {by_name[f.function]}" if f.function in by_name else ""
        if f.function in starts.failures:  # the error follows, once
            lines.append(f"  {f.function:<20} {f.revision}  does not start")
            continue
        lines.append(f"  {f.function:<20} {f.revision}{'' if f.created else ' (unchanged)'}{proof}")
        lines += [f"    {text}" for text in stage_of(deployment.app, f)]
        lines += [f"    {remark}" for remark in (by_name[f.function].remarks() if proof else ())]
        for address in addresses[f.function]:
            is_public = f"{url}{TENANT_PATH}" in address
            lines.append(f"    {address}{' (public, without a key)' if is_public else ''}")
    return "\n".join(lines)


def _failed(starts: Starts) -> str:
    names = ", ".join(starts.failures)
    return (
        f", but {names} {'do' if len(starts.failures) > 1 else 'does'} not start" if names else ""
    )


def stage_of(app: str, f: DeployedFunction) -> list[str]:
    """What remains to be done until a function's new revision serves; empty if it is live."""
    name = f"{app}/{f.function}"
    match f.stage:
        case "waiting":
            text = (
                f"needs {f.approvals} more approval{'s' if f.approvals > 1 else ''}: ask another "
                f"person to run"
            )
            return [
                (
                    f"{text} `pilotlight app approve {name} {f.revision}`, then `pilotlight app "
                    f"promote {name} {f.revision}`"
                )
            ]
        case "no_traffic":
            return [
                f"takes no traffic: `pilotlight app promote {name} {f.revision}` gives it all traffic"
            ]
        case "rollout":
            return [f"is being rolled out: `pilotlight rollout watch {f.rollout}` follows it"]
    return []


def addresses_of(client: Client, deployment: Deployment, app: App) -> dict[str, list[str]]:
    """Where each deployed function is called; a public one also under its tenant's name, which
    needs no key."""
    url, names = client.profile.url, [f.function for f in deployment.functions]
    public = {name for name in names if PUBLIC in app.declarations[name].access}
    tenant = client.whoami()["tenant"]["name"] if public else ""
    found = {name: _addresses(deployment.app, app, name, url) for name in names}
    for name in public:
        found[name] += _addresses(deployment.app, app, name, f"{url}{TENANT_PATH}{tenant}")
    return found


def _addresses(name: str, app: App, function: str, url: str) -> list[str]:
    declaration = app.declarations[function]
    if declaration.kind == "asgi":
        server = declaration.policies.get("web_server")
        paths = [f"{url}/fn/{name}/{function}/"]
        if server is not None and server.openai is not None:
            paths.append(f'POST {url}/v1/chat/completions with "model": "{name}/{function}"')
        return paths
    if declaration.kind == "engine":
        verb = "embeddings" if getattr(declaration, "task", "") == "embed" else "chat/completions"
        return [f'POST {url}/v1/{verb} with "model": "{name}/{function}"']
    paths = [
        f"{function}.{method}" if method else function for method in declaration.method_names()
    ]
    return [f"POST {url}/v1/functions/{name}/{path}:invoke" for path in paths]

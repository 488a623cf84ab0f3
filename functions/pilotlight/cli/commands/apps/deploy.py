"""`pilotlight deploy`: deploys an app from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps import release_options
from pilotlight.cli.commands.apps import rollout_options as canaries
from pilotlight.cli.commands.apps.deploy_progress import (
    Deployer,
    Starts,
    load_user_app,
)
from pilotlight.cli.core.command import command, report_error
from pilotlight.cli.core.next_step import APP
from pilotlight.cli.core.session import Session
from pilotlight.protocol import TENANT_PATH
from pilotlight.spec.function import PUBLIC

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.client.resources.releases import DeployedFunction, Deployment, ReleaseOptions
    from pilotlight.packaging.app import App

File = Annotated[
    str, typer.Argument(metavar="FILE[::APP]", help="app.py, app.py::name, or package.module.")
]
_STARTS = (
    "cold: the first start, from nothing; restore: from its snapshot on disk; fork: from its process "
    "in memory. A call takes the fastest that is possible."
)


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "deploy")(deploy)


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

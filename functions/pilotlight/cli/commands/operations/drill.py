"""`pilotlight drill`: let a part of the running platform fail on purpose, and report what that cost
its callers."""

from __future__ import annotations

import asyncio
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.calls.loadtest import Data, read_arguments, serving_spec
from pilotlight.cli.core.addresses import parse_address
from pilotlight.cli.core.command import Yes, command, ended_by_signals
from pilotlight.cli.core.formatting import format_milliseconds, parse_duration_s
from pilotlight.cli.core.session import Session
from pilotlight.errors import Conflict, InvalidInput
from pilotlight.spec.engines import is_language_model

if TYPE_CHECKING:
    from pilotlight.cli.supervisor.local_platform import LocalPlatform
    from pilotlight.client.client import Client
    from pilotlight.drills.faults import Fault
    from pilotlight.drills.runner import DrillPlan
    from pilotlight.drills.verdict import DrillReport

MAX_RATE = 500.0


class FaultName(enum.Enum):
    """What fails."""

    ACTIVATOR = "activator"
    CONTROLLER = "controller"
    NODE = "node"
    BAD_ROUTE = "bad-route"
    OOM = "oom"
    WEIGHT_STORM = "weight-storm"
    REDIS = "redis"
    POSTGRES = "postgres"


Name = Annotated[FaultName, typer.Argument(metavar="FAULT", help="What fails: see below.")]
Target = Annotated[
    str,
    typer.Argument(metavar="APP/FUNCTION", help="A function of yours that is called meanwhile."),
]
Rate = Annotated[float, typer.Option("--rate", "-r", help="Calls to send per second.")]
Before = Annotated[str, typer.Option(help="How long to call it before the fault.")]
Hold = Annotated[str, typer.Option("--for", help="How long redis or postgres stays stopped.")]
After = Annotated[str, typer.Option(help="How long to call it after the fault is over.")]
Timeout = Annotated[str, typer.Option(help="How long to wait until what failed is back.")]
MaxOutage = Annotated[
    str, typer.Option(help="Fail if calls failed for longer than this. Default: any time.")
]
Stop = Annotated[str, typer.Option(metavar="COMMAND", help="Stops redis or postgres.")]
Start = Annotated[
    str,
    typer.Option(metavar="COMMAND", help="Starts it again, or promotes its standby."),
]


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "drill")(drill)


def drill(
    session: Session,
    fault: Name,
    target: Target,
    *,
    data: Data = None,
    rate: Rate = 20.0,
    before: Before = "5s",
    hold: Hold = "10s",
    after: After = "5s",
    timeout: Timeout = "60s",
    max_outage: MaxOutage = "",
    stop: Stop = "",
    start: Start = "",
    yes: Yes = False,
) -> None:
    """Let a part of the platform on this machine fail on purpose while a function is called, and
    report what failed, for how long, and what was lost. Exit status 1 if the verdict is bad.

    activator, controller, node: the process is killed (kill -9). bad-route: the activator's routes
    on disk are overwritten, and it is killed. oom: a function beside yours uses up its memory.
    weight-storm: eight functions beside yours want weights that are not on this node, at once.
    redis, postgres: the service is stopped by --stop, and started, or its standby promoted, by
    --start.

    Refused where platform.yaml says `platform.production: true`.
    """
    from pilotlight.cli.supervisor import local_platform

    app, function, method = parse_address(target)
    spec = serving_spec(session, app, function)
    if is_language_model(spec) or spec.get("kind") == "asgi":
        raise InvalidInput(
            f"{target} is a language model or a web application, which drills do not call",
            hint="Name a function that takes JSON.",
        )
    plan = _plan(
        (app, f"{function}.{method}" if method else function),
        read_arguments(data, spec, method),
        rate=rate,
        durations={"before": before, "for": hold, "after": after, "timeout": timeout},
        max_outage=max_outage,
    )
    platform = local_platform.with_active_config(session.platform())
    with session.client() as client, ended_by_signals():
        run = _drilled_platform(platform, client.profile.url)
        made = _fault(session, client, fault, platform.paths.home, run, stop=stop, start=start)
        session.confirm(
            f"This {made.summary}, on {platform.url}, while {target} is called {rate:g} times a "
            f"second. Go on?",
            yes=yes,
        )
        report = _run(session, client, fault, made, plan)
    session.show(report.to_json(), lambda: _rendered(report))
    if not report.passed:
        raise typer.Exit(1)


def _run(
    session: Session, client: Client, name: FaultName, fault: Fault, plan: DrillPlan
) -> DrillReport:
    from pilotlight.drills.runner import run_drill

    fault.prepare()
    try:
        return asyncio.run(run_drill(client, name.value, fault, plan, say=session.say))
    finally:
        fault.close()


def _plan(
    target: tuple[str, str],
    arguments: list[Any],
    *,
    rate: float,
    durations: dict[str, str],
    max_outage: str,
) -> DrillPlan:
    """Raises InvalidInput."""
    from pilotlight.drills.runner import DrillPlan
    from pilotlight.loadtest.requests import FunctionCalls

    if not 0 < rate <= MAX_RATE:
        raise InvalidInput(
            f"--rate {rate:g}: must be more than 0 and at most {MAX_RATE:g} per second"
        )
    seconds = {name: parse_duration_s(text) for name, text in durations.items()}
    for name, value in seconds.items():
        if not 0 < value <= 600:
            raise InvalidInput(f"--{name} {durations[name]}: must be more than 0 and at most 600 s")
    return DrillPlan(
        target=target,
        calls=FunctionCalls(path=f"/v1/functions/{'/'.join(target)}:invoke", arguments=arguments),
        rate_per_s=rate,
        before_s=seconds["before"],
        hold_s=seconds["for"],
        after_s=seconds["after"],
        timeout_s=seconds["timeout"],
        max_outage_s=parse_duration_s(max_outage) if max_outage else float("inf"),
    )


def _drilled_platform(platform: LocalPlatform, url: str) -> Path:
    """Return the run directory of the platform on this machine. Raises Conflict where there is
    none, it is not the one at `url`, or it is in production."""
    from pilotlight.cli.supervisor import local_platform

    if (found := local_platform.find_running(platform)) is None:
        raise Conflict(
            f"no platform runs in {platform.paths.home}",
            hint="Run the drill on the platform's machine; name its home with --home.",
        )
    if url.rstrip("/") != platform.url:
        raise Conflict(
            f"the profile means the platform at {url}, and the one on this machine is at "
            f"{platform.url}",
            hint="Choose another --profile, or another --home.",
        )
    refuse_production(platform.config)
    return Path(found.run)


def refuse_production(config: Path) -> None:
    """Raises Conflict where a platform.yaml says that others depend on the platform."""
    from pilotlight.core.settings import PlatformSettings, load_section

    if load_section(PlatformSettings, "platform", config).production:
        raise Conflict(
            f"{config} says platform.production: true, so nothing fails here on purpose",
            hint="Run drills on a platform that no one depends on.",
        )


def _fault(
    session: Session,
    client: Client,
    name: FaultName,
    home: Path,
    run: Path,
    *,
    stop: str,
    start: str,
) -> Fault:
    from pilotlight.drills import faults, neighbours

    if (stop or start) and name not in (FaultName.REDIS, FaultName.POSTGRES):
        raise InvalidInput(
            f"--stop and --start have no effect on the drill {name.value}",
            hint="They stop and start redis or postgres.",
        )
    match name:
        case FaultName.ACTIVATOR | FaultName.CONTROLLER:
            return faults.ProcessKill(process=name.value, run=run)
        case FaultName.NODE:
            return faults.ProcessKill(process="snapshotter", run=run)
        case FaultName.BAD_ROUTE:
            return faults.BadRoutes(run=run, home=home)
        case FaultName.REDIS | FaultName.POSTGRES:
            made = faults.ServiceStop(service=name.value, stop=stop, start=start)
            made.prepare()
            return made
    is_oom = name is FaultName.OOM
    return neighbours.Neighbour(
        summary="has a function beside yours use up its memory"
        if is_oom
        else f"starts {neighbours.MODELS} functions at once whose weights are not here",
        client=client,
        deploy=lambda file: _deploy(session, client, file),
        functions=["grow"] if is_oom else [f"model_{n}" for n in range(neighbours.MODELS)],
        fails=is_oom,
    )


def _deploy(session: Session, client: Client, file: Path) -> None:
    from pilotlight.cli.commands.apps.deploy_progress import Deployer, load_user_app
    from pilotlight.client import sessions as sdk

    app = load_user_app(str(file))
    with sdk.use_profile(client.profile):
        Deployer(session, client).deploy(app, wait=False)


def _rendered(report: DrillReport) -> str:
    o, led, sent = report.outage, report.ledger, report.submitted
    errors = ", ".join(f"{count} times {what}" for what, count in o.errors.items())
    back = (
        "was not back in time" if report.recovered_s is None else f"RTO {report.recovered_s:.2f} s"
    )
    verdict = "passed" if report.passed else "FAILED"
    failed = f" within {o.unavailable_s:.2f} s ({errors})" if o.failed else ""
    lines = (
        f"{verdict}: drill {report.fault}, which {report.summary}, on {report.target}\n"
        f"{back}, RPO {led.rpo_s:.2f} s\n"
        f"{o.calls} calls, {o.failed} failed{failed}\n"
        f"p99 {_ms(o.before_p99_ms)} before, {_ms(o.after_p99_ms)} from then on, slowest "
        f"{_ms(o.slowest_ms)}\n"
        f"{led.checked} answered calls: {len(led.missing)} without a record, {len(led.doubled)} "
        f"with more than one\n"
        f"{sent.accepted} accepted background calls: {len(sent.lost)} lost, {len(sent.failed)} "
        f"ended with an error"
    )
    return "\n- ".join([lines, *report.problems])


def _ms(value: float | None) -> str:
    return "nothing" if value is None else format_milliseconds(value)

"""`make demo`: a model from zero to an answer, and what it cost.

Starts a platform of its own, deploys examples/embed.py, calls it from nothing, from its Template,
from its snapshot where the machine can (root and CRIU), and warm; prints times and costs from the
answers' own headers, the bill from the ledger, and stops. `--keep` (or `KEEP=1`) leaves it up."""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from pilotlight import profile
from pilotlight.cli.commands.apps import deploy_progress
from pilotlight.cli.commands.calls.call import parse_response_headers
from pilotlight.cli.commands.operations import up
from pilotlight.cli.commands.operations.snapshot import drop_templates
from pilotlight.cli.commands.tenants import billing
from pilotlight.cli.core.formatting import format_milliseconds, format_money
from pilotlight.cli.core.next_step import next_step
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.cli.supervisor import local_platform, run_platform, stale_processes
from pilotlight.client.client import Client
from pilotlight.errors import PilotlightError

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The stock market fell today.",
]
APP = "search"
STOP_S = 60.0
SHIPPED_S = 20.0
ATTEMPTS = 3
console = Console(highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One call: what its answer says about itself, and how long the caller waited."""

    vectors: list[list[float]]
    start: str
    weights: str
    timing_ms: Mapping[str, float]
    cost: str
    waited_ms: float


def main() -> int:
    """Run the demo. Exit status 0, 1 when something failed, 130 on Ctrl-C."""
    platform = local_platform.find_platform(config=None, home=None, environ=os.environ, cwd=ROOT)
    try:
        local_platform.refuse_running(platform)
    except PilotlightError as e:
        console.print(
            f"[red]{e}[/]\nThe demo starts its own: stop that one with `pilotlight down`, or set "
            f"PILOTLIGHT_HOME to another directory."
        )
        return 1
    keep = "--keep" in sys.argv[1:] or os.environ.get("KEEP") == "1"
    try:
        session = start(platform)
        show(session)
        console.print(
            f"\ndashboard: [bold]{platform.dashboard}[/] (sign in with the admin key)",
            soft_wrap=True,
        )
        if keep:
            console.print("It stays up: stop it with `.venv/bin/pilotlight down`.")
        return 0
    except PilotlightError as e:
        keep = False
        for line in e.detail.get("log_tail") or ():
            console.print(f"  {line}", style="dim", markup=False)
        console.print(f"[red]{e}[/]\n{next_step(e)}")
        return 1
    except KeyboardInterrupt:
        keep = False
        return 130
    finally:
        if not keep:
            stop(platform)


def start(platform: local_platform.LocalPlatform) -> Session:
    """Bring the platform up; returns a session that means it."""
    began = time.monotonic()
    session = Session(options=CommonOptions(config=platform.config))
    os.environ.update(run_platform.process_environment(platform))
    key = run_platform.prepare_home(platform)
    for notice in run_platform.detach(platform):
        console.print(f"  {notice.process:<13}{notice.text} ({notice.seconds:.2f} s)", style="dim")
    name = profile_name(platform, session, key)
    console.print(
        f"pilotlight is up at {platform.url} after {time.monotonic() - began:.1f} s; dashboard: "
        f"{platform.dashboard}",
        soft_wrap=True,
    )
    return Session(options=CommonOptions(config=platform.config, profile=name))


def profile_name(platform: local_platform.LocalPlatform, session: Session, key: str | None) -> str:
    """The profile that holds this platform's admin key: written now on a fresh home, found
    otherwise."""
    if key is not None:
        file, name = up.save_key(platform, session, key)
        console.print(f"  admin key    written to {file}", style="dim")
        return name
    for name in profile.names():
        found = profile.load({**os.environ, "PILOTLIGHT_PROFILE": name})
        if found.url == platform.url and found.api_key:
            return name
    raise PilotlightError(
        f"the home {platform.paths.home} has keys already, and no profile holds one: set "
        f"PILOTLIGHT_HOME to an empty directory for the demo"
    )


def show(session: Session) -> None:
    """Deploy, call, print."""
    app = deploy_progress.load_user_app(str(ROOT / "examples/embed.py"))
    with session.client() as client:
        began = time.monotonic()
        deployer = deploy_progress.Deployer(session, client)
        deployment, _ = deployer.deploy(app, message="make demo", wait=False)
        console.print(
            f"deployed {deployment.app} version {deployment.version} in "
            f"{time.monotonic() - began:.1f} s: nothing runs yet\n"
        )
        with httpx.Client(
            base_url=client.profile.url,
            headers={"authorization": f"Bearer {client.profile.api_key}"},
            timeout=300,
        ) as http:
            cold = call(http)
            fork = call_from_zero(client, http)
            restored = (
                [call_from_zero(client, http, templates=False)]
                if snapshot_is_proven(deployer)
                else []
            )
            warm = call(http)
        calls = [cold, *restored, fork, warm]
        wait_billed(client, len(calls))
    similarities(cold.vectors)
    console.print(timings(calls))
    console.print("\n[italic]The bill, from the ledger (`pilotlight billing report`)[/]")
    billing.report(session, app=APP)


def snapshot_is_proven(deployer: deploy_progress.Deployer) -> bool:
    """Wait for the snapshot; where there is none, one line says why."""
    proof = deployer.prove(APP, "Embedder")
    if proof.restore_ms is not None:
        console.print(f"its snapshot is proven: {proof}\n", soft_wrap=True)
        return True
    console.print(
        f"RESTORE is left out: {'; '.join(proof.remarks()) or 'the platform made no snapshot'}\n",
        soft_wrap=True,
    )
    return False


def call_from_zero(client: Client, http: httpx.Client, *, templates: bool = True) -> Measured:
    """A call when no instance is there; without `templates` nothing of the function is left in
    memory."""
    for _ in range(ATTEMPTS):
        if not templates:
            drop_templates(client, APP)
        stop_instances(client)
        measured = call(http)
        # else the autoscaler was faster: the last minute's calls want an instance
        if measured.start != "WARM":
            break
    return measured


def call(http: httpx.Client) -> Measured:
    """Embed the sentences over HTTP, as any program would."""
    began = time.monotonic()
    answer = http.post(f"/v1/functions/{APP}/Embedder.embed_all:invoke", json={"texts": SENTENCES})
    waited_ms = (time.monotonic() - began) * 1000
    if answer.status_code != 200:
        raise PilotlightError(f"the call was answered {answer.status_code}: {answer.text}")
    known = parse_response_headers(answer.headers)
    return Measured(
        vectors=answer.json(),
        start=str(known["start"]),
        weights=known["weights"] or "the instance",
        timing_ms=known["timing_ms"],
        cost=str(known["cost"]),
        waited_ms=waited_ms,
    )


def stop_instances(client: Client) -> None:
    """Back to zero: the next call finds no instance, only the Template."""
    for instance in client.instances(app=APP):
        client.stop_instance(str(instance["id"]))


def wait_billed(client: Client, calls: int) -> None:
    """Until the ledger has them: activators send their records within a second or two."""
    deadline = time.monotonic() + SHIPPED_S
    while time.monotonic() < deadline:
        rows = client.billing_report(app=APP)["rows"]
        if sum(row["records"] for row in rows if row["kind"] == "CALL") >= calls:
            return
        time.sleep(0.2)
    raise PilotlightError(f"the ledger did not get the records of {calls} calls in {SHIPPED_S:g} s")


def similarities(vectors: list[list[float]]) -> None:
    """Every pair of sentences, most alike first."""
    # The vectors have length 1, so their dot product is the cosine of the angle between them.
    pairs = [
        (sum(map(operator.mul, vectors[i], vectors[j])), i, j)
        for i in range(len(vectors))
        for j in range(i)
    ]
    table = Table(
        title="How alike the sentences are", box=None, title_justify="left", pad_edge=False
    )
    for heading in ("similarity", "", ""):
        table.add_column(heading)
    for similarity, i, j in sorted(pairs, reverse=True):
        table.add_row(f"{similarity:+.3f}", SENTENCES[j], SENTENCES[i])
    console.print(table)
    console.print()


def timings(calls: list[Measured]) -> Table:
    """How each call came to its answer, and what it cost."""
    table = Table(
        title="The same call, from zero and warm", box=None, title_justify="left", pad_edge=False
    )
    table.add_column("start")
    table.add_column("weights from")
    for heading in ("queue", "start-up", "execution", "answer after", "cost USD"):
        table.add_column(heading, justify="right")
    for measured in calls:
        spans = [
            format_milliseconds(measured.timing_ms.get(name, 0.0))
            for name in ("queue", "start", "exec")
        ]
        table.add_row(
            measured.start,
            measured.weights,
            *spans,
            format_milliseconds(measured.waited_ms),
            format_money(measured.cost),
        )
    return table


def stop(platform: local_platform.LocalPlatform) -> None:
    """Stop the platform that we started; nothing happens when it is down."""
    found = local_platform.find_running(platform)
    if found is not None:
        stale_processes.terminate(found.pid, grace_s=STOP_S)
        console.print("\nstopped; `make demo KEEP=1` leaves it up", style="dim")


if __name__ == "__main__":
    sys.exit(main())

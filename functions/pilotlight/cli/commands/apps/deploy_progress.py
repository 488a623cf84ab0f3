"""Deploys an app with progress bars, and proves that each function starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotlight.cli.commands.apps.start_report import StartReport, summarize_start
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, PilotlightError, StartFailed

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.client.resources.releases import Deployment, ReleaseOptions
    from pilotlight.packaging.app import App
    from pilotlight.packaging.deploy import Progress, ProgressEvent
    from pilotlight.packaging.progress_output import ProgressOutput


CLUSTER_PATIENCE_S = 180.0
"""How long to wait until Knative has accepted a revision; its start is timed by the proof."""
_CLUSTER_LOOK_S = 0.5
_STAGES = {
    "template": "importing, entering, warming up",
    "instance": "starting an instance",
    "snapshot": "making and proving a snapshot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """The first starts of a deployment's functions: reports of those that started, and the errors
    of those that did not, by function."""

    proofs: list[StartReport] = field(default_factory=list)
    failures: dict[str, PilotlightError] = field(default_factory=dict)


class Deployer:
    """Deploys for one session, which determines the platform and how to print.

    Attributes:
        output: where the current step is shown."""

    def __init__(
        self, session: Session, client: Client, output: ProgressOutput | None = None
    ) -> None:
        from pilotlight.packaging.progress_output import ProgressOutput

        self._session = session
        self._client = client
        self.output = output or ProgressOutput(is_json=session.is_json)

    def deploy(
        self,
        app: App,
        *,
        name: str | None = None,
        message: str = "",
        wait: bool = True,
        proof: bool = True,
        terms: ReleaseOptions | None = None,
    ) -> tuple[Deployment, Starts]:
        """Deploy; with `wait`, also start each live function once and, with `proof`, prove its
        snapshot. A function that does not start leaves the deployment and the other functions as
        they are."""
        from pilotlight.packaging.deploy import deploy

        with self.progress() as report:
            deployment = deploy(
                app, client=self._client, name=name, message=message, terms=terms, progress=report
            )
        starts = Starts()
        if wait:
            until = time.monotonic() + CLUSTER_PATIENCE_S
            for function in [f.function for f in deployment.functions if f.stage == "live"]:
                self._try_start(deployment.app, function, starts, until=until, proof=proof)
        return deployment, starts

    def _try_start(
        self, app: str, function: str, starts: Starts, *, until: float, proof: bool
    ) -> None:
        try:
            self.wait_cluster(app, [function], until=until)
            starts.proofs.append(self.prove(app, function, snapshot=proof))
        except PilotlightError as e:
            starts.failures[function] = e

    def wait_cluster(
        self, app: str, functions: Collection[str], *, until: float | None = None
    ) -> None:
        """Wait until these functions are ready in the cluster; return at once without a cluster.
        `until`: monotonic clock; None = in CLUSTER_PATIENCE_S.

        Raises StartFailed with the cluster's reason and what to do about it.
        """
        waiting = self._in_cluster(app, functions)
        until = time.monotonic() + CLUSTER_PATIENCE_S if until is None else until
        with self._cleared():
            while waiting:
                name, status = next(iter(waiting.items()))
                if status["phase"] == "failed" or time.monotonic() > until:
                    raise StartFailed(
                        f"{app}/{name} is not ready in the cluster: {status['reason']}: "
                        f"{status['message']}",
                        hint=f"Fix the cause; the platform retries. `pilotlight app show {app}` "
                        f"shows the current state.",
                    )
                self.output.step(f"{app}/{name}: {status['message'] or status['reason']}")
                time.sleep(_CLUSTER_LOOK_S)
                waiting = self._in_cluster(app, functions)

    def _in_cluster(self, app: str, functions: Collection[str]) -> dict[str, Any]:
        """Functions that are not ready yet: name → status."""
        there = (
            (f["name"], f.get("cluster"))
            for f in self._client.app(app)["functions"]
            if f["name"] in functions
        )
        return {
            name: status
            for name, status in there
            if status is not None and status["phase"] != "ready"
        }

    def prove(self, app: str, function: str, *, snapshot: bool = True) -> StartReport:
        """Start one function and, with `snapshot`, wait for its snapshot. Raises StartFailed, with
        its last log lines, or another PilotlightError."""
        began = time.monotonic()
        body: Mapping[str, Any] = {}
        with self._cleared():
            for part in self._client.warmup_stages(app, function, snapshot=snapshot):
                body = part.get("report", body)
                self._show_stage(f"{app}/{function}", part)
        return summarize_start(function, body, waited_ms=(time.monotonic() - began) * 1000)

    def start(self, app: str, function: str, *, name: str) -> None:
        """Start one instance of a function, shown as `name`, without waiting for a snapshot.
        Raises what `wait_cluster` and `prove` raise."""
        self.wait_cluster(app, [function])
        for part in self._client.warmup_stages(app, function, snapshot=False):
            self._show_stage(name, part)

    def _show_stage(self, name: str, part: Mapping[str, Any]) -> None:
        if "report" not in part:
            self.output.step(f"{name}: {_STAGES.get(str(part.get('stage')), 'starting')}")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callback that shows a progress bar for each stage; in a pipe it prints a line for each
        step, with --json nothing."""
        if self._session.is_json or not self._session.notes().is_terminal:
            yield self.output.progress
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        from pilotlight.packaging.progress import NOTICE

        columns = (
            TextColumn("{task.fields[stage]:>8}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._session.notes(), transient=True) as bars:
            tasks: dict[str, Any] = {}

            def report(event: ProgressEvent) -> None:
                if event.stage == NOTICE:
                    bars.console.print(event.text, markup=False)
                    return
                if event.stage not in tasks:
                    tasks[event.stage] = bars.add_task("", total=None, stage=event.stage)
                total = event.total_bytes or None
                bars.update(
                    tasks[event.stage],
                    description=event.text[-60:],
                    completed=event.done_bytes,
                    total=total,
                )

            yield report

    @contextlib.contextmanager
    def _cleared(self) -> Iterator[None]:
        """Remove the status line at the end."""
        try:
            yield
        finally:
            self.output.clear()


def load_user_app(reference: str) -> App:
    """Load the app of `FILE[::app]`. An exception in the file is reported with the user's stack
    frames only."""
    from pilotlight.packaging.app import App as Kind
    from pilotlight.packaging.app_loader import load_app

    with user_code_errors(reference):
        app = load_app(reference)
    assert isinstance(app, Kind)
    return app


@contextlib.contextmanager
def remote_errors(function: str) -> Iterator[None]:
    """Convert an exception that a called function raised into FunctionRaised."""
    from pilotlight.errors import FunctionRaised

    try:
        yield
    except (PilotlightError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise FunctionRaised(
            f"{function} raised {type(e).__name__}: {e}",
            hint="Correct the function: the output above has its traceback.",
        ) from e


@contextlib.contextmanager
def user_code_errors(reference: str) -> Iterator[None]:
    """Convert an exception in the user's file into InvalidInput that shows where it was raised."""
    import traceback

    try:
        yield
    except (PilotlightError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        file = Path(reference.partition("::")[0]).resolve()
        frames = traceback.extract_tb(e.__traceback__)
        ours = Path(__file__).parents[3]
        lines = [
            line
            for frame in frames
            if ours not in Path(frame.filename).parents
            for line in _lines_of(frame)
        ]
        syntax = isinstance(e, SyntaxError) and e.filename
        where = (
            [f"{e.filename}:{e.lineno}  {(e.text or '').strip()}"]
            if syntax and isinstance(e, SyntaxError)
            else lines
        )
        raise InvalidInput(
            f"{file.name} raised {type(e).__name__}: {e}",
            log_tail=where,
            hint="Correct the file. It runs in the Python environment of this command."
            + _missing(e),
        ) from e


def _lines_of(frame: Any) -> list[str]:
    if "importlib" in frame.filename:
        return []
    return [f"{frame.filename}:{frame.lineno}  {frame.line}"]


def _missing(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f" `{error.name}` is not installed in it: if only instances need the module, import it "
            f"inside the function."
        )
    return ""

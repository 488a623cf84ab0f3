"""Deploying with something to look at: a line or a bar per stage, and the proof that each function
starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotlight.cli.commands.apps.start_report import StartReport, summarize_start
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, StartFailed

if TYPE_CHECKING:
    from pilotlight.client.client import Client, Deployment
    from pilotlight.client.resources.releases import ReleaseOptions
    from pilotlight.packaging.deploy import Progress, ProgressEvent
    from pilotlight.sdk.app import App


CLUSTER_PATIENCE_S = 180.0
"""For a revision to be known to Knative, whatever it takes to start: that is the proof's own
time."""
_CLUSTER_LOOK_S = 0.5
_STAGES = {
    "template": "importing, entering, warming up",
    "instance": "starting an instance",
    "snapshot": "making its snapshot and proving it",
}


class Deployer:
    """Deploys for one session. `session` says where to and how to print."""

    def __init__(self, session: Session, client: Client) -> None:
        self._session = session
        self._client = client

    def deploy(
        self,
        app: App,
        *,
        name: str | None = None,
        message: str = "",
        wait: bool = True,
        terms: ReleaseOptions | None = None,
    ) -> tuple[Deployment, list[StartReport]]:
        """Deploy, and with `wait` bring each function that is live up once and prove its
        snapshot."""
        from pilotlight.packaging.deploy import deploy

        with self.progress() as report:
            deployment = deploy(
                app, client=self._client, name=name, message=message, terms=terms, progress=report
            )
        if wait and any(f.stage == "live" for f in deployment.functions):
            self.wait_cluster(
                deployment.app, [f.function for f in deployment.functions if f.stage == "live"]
            )
        proofs = (
            [
                self.prove(deployment.app, f.function)
                for f in deployment.functions
                if f.stage == "live"
            ]
            if wait
            else []
        )
        return deployment, proofs

    def wait_cluster(self, app: str, functions: Collection[str]) -> None:
        """Wait until these are in the cluster as they were declared; at once where the platform has
        none.

        Raises StartFailed with the cluster's own reason, and what to do about it.
        """
        from rich.markup import escape

        until = time.monotonic() + CLUSTER_PATIENCE_S
        with self._spinner(f"{app}: on its way to the cluster") as show:
            while waiting := self._in_cluster(app, functions):
                name, status = next(iter(waiting.items()))
                if status["phase"] == "failed" or time.monotonic() > until:
                    raise StartFailed(
                        f"{app}/{name} is not ready in the cluster: {status['reason']}: "
                        f"{status['message']}",
                        hint=f"Mend what it says; it is tried again by itself, and `pilotlight "
                        f"app show {app}` has the newest word.",
                    )
                show(escape(f"{app}/{name}: {status['message'] or status['reason']}"))
                time.sleep(_CLUSTER_LOOK_S)

    def _in_cluster(self, app: str, functions: Collection[str]) -> dict[str, Any]:
        """Those that are not ready yet: name → status."""
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

    def prove(self, app: str, function: str) -> StartReport:
        """Bring one function up and wait for its snapshot. Raises what keeps it down (StartFailed
        carries its last log lines)."""
        began = time.monotonic()
        body: Mapping[str, Any] = {}
        with self._spinner(f"{app}/{function}: starting") as show:
            for part in self._client.warmup_stages(app, function):
                if "report" in part:
                    body = part["report"]
                else:
                    seconds = float(part.get("elapsed_ms") or 0) / 1000
                    show(
                        f"{app}/{function}: {_STAGES.get(str(part.get('stage')), 'starting')} "
                        f"({seconds:.0f} s)"
                    )
        return summarize_start(function, body, waited_ms=(time.monotonic() - began) * 1000)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callback that shows each stage; silent with --json."""
        if self._session.is_json:
            yield lambda _: None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[stage]:>8}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._session.notes(), transient=True) as bars:
            tasks: dict[str, Any] = {}

            def report(event: ProgressEvent) -> None:
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
    def _spinner(self, text: str) -> Iterator[Callable[[str], None]]:
        if self._session.is_json:
            yield lambda _: None
            return
        with self._session.notes().status(text) as status:
            yield status.update


def load_user_app(reference: str) -> App:
    """The app of `FILE[::app]`. What the file raises is shown with the lines of the file, without
    ours."""
    from pilotlight.packaging.app_loader import load_app
    from pilotlight.sdk.app import App as Kind

    with user_code_errors(reference):
        app = load_app(reference)
    assert isinstance(app, Kind)
    return app


@contextlib.contextmanager
def user_code_errors(reference: str) -> Iterator[None]:
    """Turn an exception of the user's own file into InvalidInput that shows where it came from."""
    import traceback

    from pilotlight.errors import PilotlightError

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
            hint="Correct it; it was run with the Python of this environment." + _missing(e),
        ) from e


def _lines_of(frame: Any) -> list[str]:
    if "importlib" in frame.filename:
        return []
    return [f"{frame.filename}:{frame.lineno}  {frame.line}"]


def _missing(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f" `{error.name}` is not installed here: import it inside the function if only "
            f"instances need it."
        )
    return ""

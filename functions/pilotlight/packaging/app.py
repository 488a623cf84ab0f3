"""`App`: a named set of functions and classes that are deployed together."""

from __future__ import annotations

import asyncio
import secrets as randomness
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from pilotlight.client import sessions
from pilotlight.client.app_lease import LEASE_S, AppLease
from pilotlight.errors import InvalidInput
from pilotlight.sdk import active_app
from pilotlight.sdk.declared_app import DeclaredApp
from pilotlight.sdk.sync_async import with_short_errors
from pilotlight.sdk.unsupported import is_unsupported, refuse, refuse_attributes
from pilotlight.spec.identifiers import RUN_SUFFIX_LENGTH, ephemeral_name

if TYPE_CHECKING:  # loaded on first use: workers import this module too
    from pilotlight.client.resources.releases import Deployment, ReleaseOptions
    from pilotlight.packaging.progress import Progress
    from pilotlight.packaging.progress_output import ProgressOutput


@refuse_attributes
class App(DeclaredApp):
    """A named set of functions and classes that are deployed together.

    Args:
        name: name of the app.
        image: default image of its functions; a function with an image of its own uses that.
        secrets: added to those of each function.
        env: added to those of each function, whose values take precedence.
        tags: added to those of each function, whose values take precedence.
        description: a short text about the app."""

    @classmethod
    def lookup(cls, name: str, *, create_if_missing: bool = False, **modal_options: Any) -> App:
        """Return a handle of a deployed app. Raises NotFound if it was not deployed, unless
        `create_if_missing`: an app has its first version with its first deploy."""
        refuse(modal_options, "App.lookup")
        app = cls(name)
        if not create_if_missing:
            sessions.client().app(app.name)
        return app

    def run(
        self,
        *,
        progress: Progress | None = None,
        show_output: bool = True,
        **modal_options: Any,
    ) -> EphemeralRun:
        """Deploy the app temporarily: `with app.run():` deploys it under a unique name, directs its
        calls there, and deletes it at the end.

        `show_output`: print the steps of the deploy, and the lines that the app's functions print,
        to stderr. `progress`: receives the steps instead. `modal_options`: raise NotSupported."""
        from pilotlight.packaging.progress_output import ProgressOutput

        refuse(modal_options, "app.run")
        return EphemeralRun(
            self, progress, ProgressOutput() if show_output and sys.stderr is not None else None
        )

    @with_short_errors
    def deploy(
        self,
        *,
        name: str | None = None,
        message: str = "",
        progress: Progress | None = None,
        **terms: Unpack[ReleaseOptions],
    ) -> Deployment:
        """Deploy the app with the active profile, like `pilotlight deploy`.

        `name` deploys it under another name. `terms` say how the revision is released
        (`pilotlight.client.resources.releases.ReleaseOptions`)."""
        from pilotlight.packaging.deploy import deploy
        from pilotlight.packaging.progress_output import ProgressOutput, is_output_enabled

        refuse([option for option in terms if is_unsupported(f"{option}=")], "app.deploy")
        is_shown = progress is None and is_output_enabled() and sys.stderr is not None
        output = ProgressOutput() if is_shown else None
        try:
            return deploy(
                self,
                client=sessions.client(),
                name=name,
                message=message,
                progress=progress if output is None else output.progress,
                terms=terms,
            )
        finally:
            if output is not None:
                output.close()

    @property
    def is_running(self) -> bool:
        """Whether this process runs an ephemeral deployment of the app (`with app.run()`)."""
        return active_app.is_running(self.name)


class EphemeralRun:
    """The context manager of `with app.run():` or `async with`, which owns the ephemeral
    deployment. Can be entered once. If this process is killed, the platform deletes the app after
    LEASE_S."""

    def __init__(self, app: App, progress: Progress | None, output: ProgressOutput | None) -> None:
        """`output`: where the lines of the app's functions go; None = nowhere."""
        self._app = app
        self._output = output
        self._progress = progress or (output.progress if output is not None else None)
        self._lease: AppLease | None = None
        self.name = ephemeral_name(app.name, randomness.token_hex(RUN_SUFFIX_LENGTH // 2))

    def __repr__(self) -> str:
        return f"<EphemeralRun {self.name}>"

    @with_short_errors
    def __enter__(self) -> Self:
        if active_app.is_running(self._app.name):
            raise InvalidInput(
                f"app {self._app.name!r} is already running: leave the outer 'with app.run():' "
                "first"
            )
        try:
            self._app.deploy(
                name=self.name, message="run", progress=self._progress, lease_s=LEASE_S
            )
        finally:
            if self._output is not None:
                self._output.clear()
        if self._output is not None:
            self._output.follow(self.name)
        active_app.start_ephemeral(self._app.name, self.name)
        self._lease = AppLease(sessions.client(), self.name)
        self._lease.start()
        return self

    @with_short_errors
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        active_app.end_ephemeral(self._app.name)
        if self._lease is not None:
            self._lease.close()
        try:
            sessions.client().delete_app(self.name)
        finally:
            if self._output is not None:
                self._output.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

"""The session of one command: the platform, the profile, and how to print results.

Every command accepts the options of `CommonOptions` before and after its name. Commands receive a
`Session` and do not read environment variables themselves."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pilotlight.core.logging_config import dump_json
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pilotlight.cli.supervisor.local_platform import LocalPlatform
    from pilotlight.client.client import Client
    from pilotlight.profile import Profile

PROFILE_FILE_VARIABLE = "PILOTLIGHT_CONFIG"

T = TypeVar("T")
RETRY_BUDGET_S = 5.0
"""Retry for the duration of a process restart, and no longer, because a person is waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options that every command accepts; None or False means "not given"."""

    config: Path | None = None
    home: Path | None = None
    profile: str | None = None
    profile_file: Path | None = None
    environment: str | None = None
    json: bool = False

    def over(self, earlier: CommonOptions) -> CommonOptions:
        """These options, with missing ones taken from those before the command's name."""
        mine = {
            f.name: getattr(self, f.name) or getattr(earlier, f.name)
            for f in dataclasses.fields(self)
        }
        return CommonOptions(**mine)


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of one command. Results go to stdout, everything else to stderr.

    Attributes:
        names: the app and function that the command is about, for the advice in errors
            (`pilotlight.cli.core.next_step`); commands that learn them later add them."""

    options: CommonOptions
    names: dict[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def is_json(self) -> bool:
        """Whether to print results as JSON."""
        return self.options.json

    def console(self) -> Console:
        """Console for results. Honours NO_COLOR."""
        from pilotlight.core.terminal import terminal_of

        return terminal_of(sys.stdout)

    def notes(self) -> Console:
        """Console for progress, questions and errors."""
        from pilotlight.core.terminal import terminal_of

        return terminal_of(sys.stderr)

    def say(self, text: str) -> None:
        """Print a line for people; silent with --json."""
        if not self.is_json:
            self.notes().print(text, markup=False)

    def show(self, value: Any, render: Callable[[], RenderableType]) -> None:
        """Print a result: `value` as JSON with --json, else what `render` returns."""
        if self.is_json:
            print(dump_json(value), flush=True)
        else:
            self.console().print(render())

    def platform(self) -> LocalPlatform:
        """The local platform that the options select. Raises InvalidInput."""
        from pilotlight.cli.supervisor.local_platform import find_platform

        return find_platform(
            config=self.options.config, home=self.options.home, environ=self.environ, cwd=self.cwd
        )

    def profile_environ(self) -> Mapping[str, str]:
        """Environment variables for `pilotlight.profile`; options override them."""
        given = {
            PROFILE_FILE_VARIABLE: self.options.profile_file,
            "PILOTLIGHT_ENVIRONMENT": self.options.environment,
        }
        return {**self.environ, **{key: str(value) for key, value in given.items() if value}}

    def profile(self) -> Profile:
        """The selected profile: URL, API key and environment. Raises InvalidInput."""
        from pilotlight import profile

        return profile.load(self.profile_environ(), name=self.options.profile)

    def client(self) -> Client:
        """A client of the platform; the caller closes it. Raises InvalidInput."""
        from pilotlight.client.client import Client

        return Client(self.profile(), retry_budget_s=RETRY_BUDGET_S)

    def request(self, make: Callable[[Client], T]) -> T:
        """Make one request with a client of its own. Raises InvalidInput, PilotlightError."""
        with self.client() as client:
            return make(client)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before a destructive change. Raises InvalidInput if the answer is no, or if there is
        no terminal to ask at."""
        if yes:
            return
        if self.is_json or not sys.stdin.isatty():
            raise InvalidInput(
                f"{question} Cannot ask: there is no terminal.", hint="Pass --yes to confirm."
            )
        from rich.prompt import Confirm

        if not Confirm.ask(question, console=self.notes(), default=False):
            raise InvalidInput("Nothing was changed.", hint="Answer y, or pass --yes, to confirm.")

"""What one command line said about itself: where the platform is, who asks, how to print.

The options of `CommonOptions` are accepted before and after every command's name. Commands receive
a `Session` and do not look at the environment themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pilotlight.cli.supervisor.local_platform import LocalPlatform
    from pilotlight.client.client import Client
    from pilotlight.profile import Profile

PROFILE_FILE_VARIABLE = "PILOTLIGHT_CONFIG"

PIPE_WIDTH = 1000
"""Columns when nobody looks: wide enough that a table's row stays one line for grep."""
RETRY_BUDGET_S = 5.0
"""A person waits in front of the terminal: long enough for a process that is being restarted, no
longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The options that every command takes; None or False means "not given"."""

    config: Path | None = None
    home: Path | None = None
    profile: str | None = None
    profile_file: Path | None = None
    environment: str | None = None
    json: bool = False

    def over(self, earlier: CommonOptions) -> CommonOptions:
        """These options, completed by those given before the command's name."""
        mine = {
            f.name: getattr(self, f.name) or getattr(earlier, f.name)
            for f in dataclasses.fields(self)
        }
        return CommonOptions(**mine)


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of one command. `stdout` carries results, `stderr` everything else."""

    options: CommonOptions
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def is_json(self) -> bool:
        """Results are wanted as JSON."""
        return self.options.json

    def console(self) -> Console:
        """For results; honours NO_COLOR."""
        from pilotlight.cli.core.terminal import Terminal

        return Terminal(sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)

    def notes(self) -> Console:
        """For progress, questions and errors."""
        from pilotlight.cli.core.terminal import Terminal

        return Terminal(sys.stderr, width=None if sys.stderr.isatty() else PIPE_WIDTH)

    def say(self, text: str) -> None:
        """A line for people; silent with --json."""
        if not self.is_json:
            self.notes().print(text, markup=False)

    def show(self, value: Any, render: Callable[[], RenderableType]) -> None:
        """Print a result: `value` as JSON where that was asked for, else what `render` returns."""
        if self.is_json:
            print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
        else:
            self.console().print(render())

    def platform(self) -> LocalPlatform:
        """The platform of this machine that the options mean. Raises InvalidInput."""
        from pilotlight.cli.supervisor.local_platform import find_platform

        return find_platform(
            config=self.options.config, home=self.options.home, environ=self.environ, cwd=self.cwd
        )

    def profile_environ(self) -> Mapping[str, str]:
        """The environment as `pilotlight.profile` should see it, the options having won."""
        given = {
            PROFILE_FILE_VARIABLE: self.options.profile_file,
            "PILOTLIGHT_ENVIRONMENT": self.options.environment,
        }
        return {**self.environ, **{key: str(value) for key, value in given.items() if value}}

    def profile(self) -> Profile:
        """Who asks whom. Raises InvalidInput."""
        from pilotlight import profile

        return profile.load(self.profile_environ(), name=self.options.profile)

    def client(self) -> Client:
        """A client of the platform; the caller closes it. Raises InvalidInput."""
        from pilotlight.client.client import Client

        return Client(self.profile(), retry_budget_s=RETRY_BUDGET_S)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is destroyed. Raises InvalidInput when nobody can be asked, or the
        answer is no."""
        if yes:
            return
        if self.is_json or not sys.stdin.isatty():
            raise InvalidInput(f"{question} Nobody can be asked here.", hint="Pass --yes to go on.")
        from rich.prompt import Confirm

        if not Confirm.ask(question, console=self.notes(), default=False):
            raise InvalidInput("Nothing was changed.", hint="Answer y, or pass --yes, to go on.")

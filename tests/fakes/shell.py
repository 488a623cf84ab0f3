"""A command line at which a test types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner, Result

from pilotlight.cli.main import build


class Typist:
    """Types commands of one environment. `first`: the first words of each command."""

    first: tuple[str, ...] = ()

    def environment(self, key: str | None) -> Mapping[str, str]:
        """Variables of a command: whom it asks, as whom."""
        raise NotImplementedError

    def run(self, *words: str, key: str | None = None) -> Result:
        """A command, however it ends."""
        words = (*self.first, *words)
        return CliRunner().invoke(
            build(), list(words), env=self.environment(key), prog_name="pilotlight"
        )

    def good(self, *words: str, key: str | None = None, status: int = 0) -> str:
        """What a command prints that ends with `status`."""
        done = self.run(*words, key=key)
        assert done.exit_code == status, done.output
        return done.stdout

    def json(self, *words: str, key: str | None = None, status: int = 0) -> Any:
        """What it prints with --json."""
        return json.loads(self.good(*words, "--json", key=key, status=status))

    def failed(self, *words: str, key: str | None = None) -> str:
        """What was said, in two lines: the error, and the way out."""
        done = self.run(*words, key=key)
        assert done.exit_code == 1, done.output
        said, hint = done.stderr.strip().splitlines()[-2:]
        assert (said[:6], hint[:4]) == ("error ", "try ")
        return f"{said}\n{hint}"

"""The check of a batch's whole file before anything of it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.controller.batches.batches import MAX_ERRORS, MAX_LINES
from pilotlight.errors import PilotlightError


class Validation:
    """What was checked of a file so far: kept in memory, so that a new process begins again.

    Attributes:
        position, line: bytes and lines that were checked.
        total: requests among the lines.
        problems: what is wrong, as OpenAI's clients read it.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.position = self.line = self.total = 0
        self.problems: list[dict[str, Any]] = []
        self._names: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Validation {self.total} requests, {len(self.problems)} problems>"

    @property
    def is_hopeless(self) -> bool:
        """Whether enough is wrong to end the check."""
        return len(self.problems) >= MAX_ERRORS or self.total > MAX_LINES

    def add(
        self, lines: Sequence[Mapping[str, Any]], refused: Mapping[str, PilotlightError]
    ) -> None:
        """Check the parsed lines (`line_process.parsed_lines`) that follow. `refused`: by model,
        why it cannot be called."""
        for one in lines:
            self.total += 1
            name = hashlib.blake2b(one["id"].encode(), digest_size=16).digest()
            if "code" in one:
                self._problem(one, one["code"], one["message"], one["param"])
            elif name in self._names:
                text = f"custom_id {one['id'][:80]!r} is that of an earlier line, too"
                self._problem(one, "duplicate_custom_id", text, "custom_id")
            elif (error := refused.get(one["model"])) is not None:
                self._problem(one, error.type, str(error), "body.model" if one["model"] else "url")
            self._names.add(name)
        if self.total > MAX_LINES:
            text = f"a batch has at most {MAX_LINES} requests: split the file into several"
            self.problems = [
                {"code": "too_many_requests", "message": text, "line": None, "param": None}
            ]

    def _problem(self, one: Mapping[str, Any], code: str, message: str, param: str | None) -> None:
        if not self.is_hopeless:
            line = self.line + one["n"] + 1
            self.problems.append(
                {"code": code, "message": message[:1000], "line": line, "param": param}
            )

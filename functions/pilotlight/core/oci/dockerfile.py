"""Dockerfiles of the plain kind, as instructions. What an image of the platform cannot have is
refused by name, with the line. Source: the Dockerfile reference of Docker."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

MAX_BYTES = 1024 * 1024
IGNORED = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER"})
"""Instructions about containers, of which functions have none."""
TAKEN = frozenset({"COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"})
_WAYS_OUT = {
    "ADD": "COPY for files, RUN with curl or tar for the rest",
    "ARG": "the value in its place",
    "ONBUILD": "the instruction itself",
    "SHELL": "RUN with bash -c '…'",
    "STOPSIGNAL": "@pilotlight.exit()",
    "VOLUME": "volumes= of the function",
}
_CONTINUED = re.compile(r"\\[ \t]*\n")
_HERE_DOCUMENT = re.compile(r"<<-?['\"]?[A-Za-z_]")
_GLOB = re.compile(r"[*?\[\]]")


class DockerfileRefused(ValueError):
    """Raised for what is no Dockerfile, or asks for what an image cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: `name` in capitals, `value` behind it on joined lines, from `line` on."""

    line: int
    name: str
    value: str

    def refused(self, what: str, way_out: str) -> DockerfileRefused:
        """Return the error for a part of it."""
        return DockerfileRefused(f"line {self.line}: {what} is not supported: use {way_out}")

    def words(self) -> list[str]:
        """Return its arguments: a JSON list, or words with quotes. Raises DockerfileRefused."""
        try:
            if self.value.startswith("["):
                found = json.loads(self.value)
                if all(isinstance(one, str) for one in found):
                    return list(found)
                raise ValueError("not a list of texts")
            return shlex.split(self.value)
        except ValueError as e:
            raise DockerfileRefused(f"line {self.line}: {self.name}: {e}") from e

    def command(self) -> str:
        """Return what RUN executes, for sh(1). Raises DockerfileRefused."""
        if self.value.startswith("--"):
            raise self.refused(f"RUN {self.value.split('=')[0]}", "RUN without options")
        return shlex.join(self.words()) if self.value.startswith("[") else self.value

    def image(self) -> str:
        """Return what FROM names. Raises DockerfileRefused."""
        words = self.words()
        if words and words[0].startswith("--"):
            raise self.refused(f"FROM {words[0]}", "FROM without options")
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise DockerfileRefused(f"line {self.line}: FROM: write FROM image")
        return self.plain(words[0])

    def copies(self) -> tuple[list[str], str]:
        """Return sources and target of COPY. Raises DockerfileRefused."""
        words = self.words()
        for word in words:
            if word.startswith("--"):
                raise self.refused(f"COPY {word.split('=')[0]}", "COPY without options")
            if _GLOB.search(word):
                raise self.refused(f"the pattern {word!r}", "the names of files and directories")
        if len(words) < 2:
            raise DockerfileRefused(f"line {self.line}: COPY: write COPY source target")
        *sources, target = map(self.plain, words)
        return sources, target

    def variables(self) -> dict[str, str]:
        """Return what ENV sets. Raises DockerfileRefused."""
        words = self.words()
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        pairs = (word.partition("=") for word in words)
        return {name: self.plain(value) for name, _, value in pairs}

    def plain(self, value: str) -> str:
        """Return a value without variables. Raises DockerfileRefused."""
        if "$" in value:
            raise self.refused(f"the variable in {value[:80]!r}", "its value")
        return value


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile, which begin with its only FROM. Raises
    DockerfileRefused."""
    found = list(_instructions(text))
    if not found or found[0].name != "FROM":
        raise DockerfileRefused("the first instruction must be FROM")
    for one in found[1:]:
        if one.name == "FROM":
            raise one.refused("a second FROM", "the last stage alone")
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    number = 0
    lines = iter(text.splitlines())
    for raw in lines:
        number += 1
        first = number
        if not raw.strip() or raw.lstrip().startswith("#"):
            if re.match(r"#\s*escape\s*=", raw.strip(), re.IGNORECASE):
                raise DockerfileRefused(f"line {number}: another escape character: use \\")
            continue
        whole = raw
        while re.search(r"\\[ \t]*\Z", whole):
            following = next(lines, None)
            number += 1
            if following is None:
                break
            if not following.lstrip().startswith("#"):
                whole += "\n" + following
        name, _, value = _CONTINUED.sub("", whole + "\n").strip().partition(" ")
        name = name.upper()
        if name in _WAYS_OUT:
            raise DockerfileRefused(f"line {first}: {name} is not supported: use {_WAYS_OUT[name]}")
        if name not in TAKEN | IGNORED:
            raise DockerfileRefused(f"line {first}: {name[:40]!r} is no instruction")
        found = Instruction(line=first, name=name, value=value.strip())
        if name in ("COPY", "RUN") and _HERE_DOCUMENT.search(value):
            raise found.refused("a here-document", "RUN with && between commands")
        yield found

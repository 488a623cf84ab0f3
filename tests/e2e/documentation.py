"""Runs the blocks of a page of the documentation as a reader would, in one shell and one Python.

`console`: each line that begins with `$ ` is a command; the lines below are what it prints, in this
order, numbers and ids aside; lines in between may be left out, and `…` stands for any text. A
command succeeds, unless what it prints begins with `error `. `python` with `title="NAME"`, and
`yaml` with one, are files; without one, Python runs in a namespace of the page, which has
`pilotlight` and an `app`, and YAML must be valid settings. `text` is not run. A comment of its own
before a block says otherwise: `<!-- not run: REASON -->`, `<!-- run last -->`, or
`<!-- given: CODE -->`, which a block of Python needs and a reader does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import yaml

from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.settings import parse_item
from scripts.documentation import ROOT, Block, blocks

_COMMENT = re.compile(r"<!-- (?P<kind>not run|run last|given)(?:: (?P<text>.*))? -->$")
_TITLE = re.compile(r'title="([^"]+)"')
_UNITS = re.compile(r"# (?:ms|s|µs|B|KiB|MiB|GiB|MB|GB)\b")
_PYTHON = """
import contextlib, io, json, sys, traceback
for line in sys.stdin:
    given = json.loads(line)
    if given["fresh"]:
        names = {"__name__": "__main__"}
        exec("import pilotlight\\napp = pilotlight.App('docs')", names)
    error = ""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(given["code"], given["name"], "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps(error), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What went otherwise than a page says. `line`: of the page, from 1."""

    page: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}"


class Reader:
    """A reader with a shell, a directory and a Python of its own. `replaced`: texts of the pages
    that are others here, such as ports."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], replaced: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._environment = environment
        self._replaced = replaced
        self._python = self._start(sys.executable, "-c", _PYTHON)
        self._shell = self._start("bash", "--norc")
        self._deferred: list[tuple[str, Block]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in (self._python, self._shell):
            _end(process)

    def read(self, page: Path) -> list[Fault]:
        """Run what the page has in a new shell, but for what runs last; what went otherwise."""
        _end(self._shell)
        self._shell = self._start("bash", "--norc")
        name = str(page.relative_to(ROOT))
        found: list[Fault] = []
        is_fresh = True
        for block in blocks(page.read_text()):
            comment = _COMMENT.search(block.before)
            kind = comment["kind"] if comment else ""
            if kind == "run last":
                self._deferred.append((name, block))
            elif kind != "not run":
                given = comment["text"] if comment else ""
                found += self._run(name, block, given=given, is_fresh=is_fresh)
                is_fresh = is_fresh and block.language != "python"
        return found

    def finish(self) -> list[Fault]:
        """Run what runs last."""
        return [fault for name, block in self._deferred for fault in self._run(name, block)]

    def shell(self, command: str) -> tuple[str, int]:
        """What a command prints, and its exit status. It has no input: one that asks for some
        fails."""
        text = f"{{ {command}\n}} < /dev/null\nstatus=$?; echo; echo '==end==' $status\n"
        out, into = _pipes(self._shell)
        into.write(text)
        into.flush()
        lines: list[str] = []
        while not (line := out.readline()).startswith("==end=="):
            if not line:
                raise AssertionError(f"the shell ended: {''.join(lines)}")
            lines.append(line)
        return "".join(lines).removesuffix("\n"), int(line.split()[1])

    def _start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self._directory,
            env=dict(self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _run(
        self, page: str, block: Block, *, given: str = "", is_fresh: bool = False
    ) -> Iterator[Fault]:
        title = _TITLE.search(block.info)
        text = self._here(block.text)
        if title is not None:
            if title[1] == "platform.yaml":
                text += f"activator: {{listen: '{self._replaced['127.0.0.1:8700']}'}}\n"
            (self._directory / title[1]).write_text(text)
        elif block.language == "python":
            code = f"{given}\n" * bool(given) + text
            if error := self._execute(f"{page}:{block.line}", code, is_fresh=is_fresh):
                yield Fault(page=page, line=block.line, what=error)
        elif block.language == "yaml":
            if error := settings_error(text):
                yield Fault(page=page, line=block.line, what=error)
        elif block.language == "console":
            yield from self._console(page, block)
        elif block.language != "text":
            yield Fault(page=page, line=block.line, what=f"a block of {block.info or 'nothing'!r}")

    def _execute(self, name: str, code: str, *, is_fresh: bool) -> str:
        out, into = _pipes(self._python)
        into.write(json.dumps({"code": code, "name": name, "fresh": is_fresh}) + "\n")
        into.flush()
        return str(json.loads(out.readline()))

    def _console(self, page: str, block: Block) -> Iterator[Fault]:
        for line, command, shown in commands(self._here(block.text)):
            printed, status = self.shell(command)
            is_to_fail = any(text.startswith("error ") for text in shown)
            missing = missing_line(shown, printed)
            # one without output in the page may ask a question, or be of an app of the reader's
            if missing is not None or (shown and (status != 0) != is_to_fail):
                what = f"printed no {missing!r}" if missing else f"ended with {status}"
                text = textwrap.indent(printed, "    ")
                yield Fault(
                    page=page,
                    line=block.line + line,
                    what=f"{command}\n  {what}; it printed\n{text}",
                )

    def _here(self, text: str) -> str:
        for theirs, ours in self._replaced.items():
            text = text.replace(theirs, ours)
        return text


def _end(process: subprocess.Popen[str]) -> None:
    """With what it runs in the background."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in _pipes(process):
        stream.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdout is not None
    assert process.stdin is not None
    return process.stdout, process.stdin


def commands(text: str) -> list[tuple[int, str, list[str]]]:
    """The commands of a block: line within the block from 0, command, what it shows below."""
    found: list[tuple[int, str, list[str]]] = []
    is_continued = False
    for number, line in enumerate(text.splitlines()):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
        elif is_continued:
            place, command, shown = found.pop()
            found.append((place, f"{command}\n{line}", shown))
        elif found and line.strip():
            found[-1][2].append(line)
        is_continued = line.endswith("\\")
    return found


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first line that is shown and was not printed, in this order; None where all were."""
    lines = iter(printed.splitlines())
    for wanted in shown:
        if wanted.strip() != "…" and not any(_is_shown_as(wanted, line) for line in lines):
            return wanted
    return None


def _is_shown_as(wanted: str, line: str) -> bool:
    """Whether a printed line is the shown one, numbers and ids aside."""
    parts = [_masked(part) for part in wanted.split("…")]
    pattern = ".*".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, _masked(line)) is not None


def _masked(text: str) -> str:
    words = " ".join("#" if re.search(r"\d", word) else word for word in text.split())
    return _UNITS.sub("#", words)


def settings_error(text: str) -> str:
    """What is wrong with a piece of platform.yaml; empty where nothing is."""
    known: dict[str, Any] = yaml.safe_load((ROOT / "platform.yaml").read_text())
    for section, values in yaml.safe_load(text).items():
        if section not in known:
            return f"there is no section {section!r} of platform.yaml"
        unknown = set() if section in ("plans", "issuers") else set(values) - set(known[section])
        if section == "issuers":
            try:
                for name, given in values.items():
                    parse_item(Issuer, f"issuers.{name}", given)
            except ValueError as e:
                return str(e)
        if unknown:
            return f"section {section!r} has no {', '.join(sorted(unknown))}"
    return ""

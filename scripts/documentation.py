#!/usr/bin/env python3
"""Check the documentation without running it: `scripts/documentation.py [PAGE…]`.

Links and anchors of the README and of docs/ resolve, and so do pages of docs/ that code, settings
and messages name; blocks of Python parse; retired words stay away. Every page has at most 1,500
words (docs/architecture.md 2,500, the README 1,300); what the site generates into a page does not
count. A page of the tutorial, the how-to part, the explanation or the benchmarks begins with an
example: a block of code or a picture within its first 100 words. Names in docs/architecture.md are
in the code. `tests/e2e/test_documentation.py` runs the blocks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.structure import PACKAGES, RETIRED_WORDS, sources  # noqa: E402 - needs the path

_WITH_EXAMPLE = ("tutorial", "how-to", "explanation", "benchmarks")
"""Parts of docs/ whose pages begin with an example."""
_MOST_WORDS = {"docs/architecture.md": 2500, "README.md": 1300}
"""Words of single pages, at most: others than `_MOST_WORDS_OF_A_PAGE`."""
_MOST_WORDS_OF_A_PAGE = 1500
_FIRST_SCREEN = 100
"""Words before the first example, at most."""
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
_FILE = re.compile(r"`((?:activator|snapshotter|weight_cache|functions|scripts)/[\w/]+\.py)`")
_METHOD = re.compile(r"`([A-Z]\w+)\.(\w+)`")
_TEXT_FILES = (".py", ".yaml", ".yml", ".md", ".toml", ".sh", ".json", "Makefile", "Dockerfile")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page. `line`: of its first line of content, from 1. `info`: what stands
    behind the fence. `before`: the last line of text before it."""

    line: int
    info: str
    text: str
    before: str

    @property
    def language(self) -> str:
        """The language that the fence names; empty where it names none."""
        return self.info.split()[0] if self.info.split() else ""


def pages() -> Iterator[Path]:
    """The README and every page of docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    found = []
    lines = text.splitlines()
    number, before = 0, ""
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            before = lines[number] if lines[number].strip() else before
            number += 1
            continue
        end = next(
            (
                i
                for i in range(number + 1, len(lines))
                if lines[i].strip() == opened["fence"] and _FENCE.match(lines[i])
            ),
            len(lines),
        )
        content = [line.removeprefix(opened["indent"]) for line in lines[number + 1 : end]]
        found.append(
            Block(
                line=number + 2,
                info=opened["info"].strip(),
                text="\n".join(content) + "\n",
                before=before,
            )
        )
        number, before = end + 1, ""
    return found


def prose(text: str) -> str:
    """A page with the lines of its fenced blocks empty."""
    out, inside = [], False
    for line in text.splitlines():
        is_fence = _FENCE.match(line) is not None
        out.append("" if inside or is_fence else line)
        inside ^= is_fence
    return "\n".join(out)


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it and mkdocs.yml has it made."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    heading = unicodedata.normalize("NFC", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page: its headings and `<a id="…">`."""
    text = prose(page.read_text())
    found = {anchor_of(heading) for heading in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE)}
    return frozenset(found | set(re.findall(r'<a id="([^"]+)"', text)))


def link_faults(page: Path) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    for number, line in enumerate(prose(page.read_text()).splitlines(), 1):
        for url in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", url):
                continue
            path, _, anchor = url.partition("#")
            target = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(ROOT)}:{number}"
            if not target.exists():
                yield f"{where}: the link {url} leads to no file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{where}: {target.name} has no heading for {url}"


def named_page_faults() -> Iterator[str]:
    """Pages of docs/ that other files name, and that are not there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not name.endswith(_TEXT_FILES) or not path.is_file() or name.startswith("docs/"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for named in _NAMED_PAGE.findall(line):
                page, _, anchor = named.partition("#")
                if not (ROOT / page).is_file():
                    yield f"{name}:{number}: there is no {page}"
                elif anchor and anchor not in anchors(ROOT / page):
                    yield f"{name}:{number}: {page} has no heading for #{anchor}"


def python_faults(page: Path) -> Iterator[str]:
    """Blocks of Python that do not parse."""
    for block in blocks(page.read_text()):
        if block.language == "python":
            try:
                compile(block.text, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as e:
                line = block.line + (e.lineno or 1) - 1
                yield f"{page.relative_to(ROOT)}:{line}: does not parse: {e.msg}"


def word_faults(page: Path) -> Iterator[str]:
    """Retired words of a page."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for word in RETIRED_WORDS.finditer(re.sub(r"`[^`]*`", "", line)):
            yield (
                f"{page.relative_to(ROOT)}:{number}: {word[0]!r} is retired: "
                "write it in plain English"
            )


def shape_faults(page: Path) -> Iterator[str]:
    """A page that is too long, or that does not begin with an example."""
    name, text = str(page.relative_to(ROOT)), page.read_text()
    most = _MOST_WORDS.get(name, _MOST_WORDS_OF_A_PAGE)
    if (count := len(text.split())) > most:
        yield f"{name}: {count} words: at most {most}"
    if name.split("/")[1:2] and name.split("/")[1] in _WITH_EXAMPLE:
        example = re.search(r"^ *```|^!\[", text, re.MULTILINE)
        if example is None or len(text[: example.start()].split()) > _FIRST_SCREEN:
            yield (
                f"{name}: begin with an example: no block of code and no picture in the first "
                f"{_FIRST_SCREEN} words"
            )


def name_faults(page: Path) -> Iterator[str]:
    """Files, classes and methods that docs/architecture.md names, and that the code has not."""
    if page != ROOT / "docs" / "architecture.md":
        return
    text = page.read_text()
    for name in sorted(set(_FILE.findall(text))):
        if not (ROOT / name).exists():
            yield f"docs/architecture.md: there is no {name}"
    called = sorted(set(_METHOD.findall(text)))
    known = methods({owner for owner, _ in called})
    for owner, method in called:
        if method not in known.get(owner, ()):
            yield f"docs/architecture.md: there is no {owner}.{method}"


def methods(classes: Collection[str]) -> dict[str, set[str]]:
    """Those of these classes that the product has, and their methods; of classes with one name
    those of all."""
    found: dict[str, set[str]] = {}
    declared = re.compile(rf"^\s*class ({'|'.join(classes)})\b", re.MULTILINE)
    for path in sources(*PACKAGES):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if declared.search(text) else ():
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(
                    inner.name
                    for inner in node.body
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
                )
    return found


def faults() -> list[str]:
    """What is wrong, a line each."""
    found = list(named_page_faults())
    for page in pages():
        for check in (link_faults, python_faults, word_faults, shape_faults, name_faults):
            found += check(page)
    return found


def main() -> int:
    """Exit status: 1 where something is found."""
    found = faults()
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Rules for files excluded from source archives: built-in ones, and those of `.gitignore` and
`.pilotlightignore`.

Patterns follow gitignore(5). Precedence: files deeper in the tree over higher ones,
`.pilotlightignore` over `.gitignore` in the same directory, the last matching line within a file.
Files between the root and the top of its git work tree apply too."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORE_FILES = (".gitignore", ".pilotlightignore")
_ALWAYS_DIRECTORIES = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "__pycache__",
        "node_modules",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".nox",
    }
    | {".ipynb_checkpoints", ".idea", ".vscode", ".pilotlight"}
)
_ALWAYS_FILES = frozenset({".DS_Store", ".env"})
"""`.env` contains secrets by convention: they are deployed with `Secret.from_dotenv()`."""
_ALWAYS_SUFFIXES = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class _Level:
    directory: Path
    patterns: Any


class IgnoreRules:
    """The ignore files that apply in one directory, from the top down. Immutable: `within` returns
    the rules of a subdirectory."""

    def __init__(self, levels: tuple[_Level, ...] = ()) -> None:
        self._levels = levels

    @classmethod
    def at_root(cls, root: Path) -> IgnoreRules:
        """Return the rules for the root of an archive: its ignore files, and those above it in the
        same git work tree."""
        above: list[Path] = []
        if any((directory / ".git").exists() for directory in (root, *root.parents)):
            for directory in (root, *root.parents):
                if (directory / ".git").exists():
                    break
                above.insert(0, directory.parent)
        found = cls()
        for directory in (*above, root):
            found = found.within(directory)
        return found

    def within(self, directory: Path) -> IgnoreRules:
        """Return the rules with the ignore files of `directory` added."""
        lines = [line for name in IGNORE_FILES for line in _lines(directory / name)]
        if not lines:
            return self
        patterns = importlib.import_module("pathspec").GitIgnoreSpec.from_lines(lines)
        return IgnoreRules((*self._levels, _Level(directory, patterns)))

    def excludes(self, path: Path, *, is_directory: bool) -> bool:
        """Whether `path`, below the directory of these rules, is excluded."""
        if path.name in (
            _ALWAYS_DIRECTORIES if is_directory else _ALWAYS_FILES
        ) or path.name.endswith(_ALWAYS_SUFFIXES):
            return True
        if is_directory and (path / "pyvenv.cfg").exists():
            return True  # a virtual environment under any name
        for level in reversed(self._levels):
            relative = path.relative_to(level.directory).as_posix() + ("/" if is_directory else "")
            verdict = level.patterns.check_file(relative).include
            if verdict is not None:
                return bool(verdict)
        return False


def is_platform_home(directory: Path) -> bool:
    """Whether a directory is the home of a platform on this machine: it has its lock, or its key
    beside data of one of its processes."""
    if (directory / "platform.lock").is_file():
        return True
    return (directory / "platform.key").is_file() and any(
        (directory / process).is_dir() for process in ("activator", "controller", "node", "weights")
    )


def is_in_platform_home(path: Path, root: Path) -> bool:
    """Whether `path`, below `root`, is in the home of a platform below `root`."""
    return any(is_platform_home(p) for p in path.parents if p != root and p.is_relative_to(root))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []

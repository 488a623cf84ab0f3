"""Provenance of a deploy: the git checkout of its source, if any. Failures never prevent a
deploy."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pilotlight.errors import InvalidInput
from pilotlight.packaging.source import find_source_tree
from pilotlight.sdk.declaration import Declaration

TIMEOUT_S = 5.0
"""Timeout of one git command: a checkout on a slow disk must not delay a deploy."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


def read_provenance(declarations: list[Declaration]) -> dict[str, str]:
    """Return the provenance of the first declaration that is in a git checkout, {} if none is."""
    for declaration in declarations:
        try:
            root = find_source_tree(declaration).root
        except InvalidInput:
            continue  # packaging raises a better error
        if found := read_checkout_provenance(root or Path.cwd()):
            return found
    return {}


def read_checkout_provenance(directory: Path) -> dict[str, str]:
    """Return `git.commit`, `git.dirty` (whether tracked files have changes) and `git.remote`
    (without credentials); {} outside a checkout."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None or not _COMMIT.match(commit):
        return {}
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    remote = without_credentials(_git(directory, "config", "--get", "remote.origin.url") or "")
    lineage = {
        "git.commit": commit,
        "git.dirty": "unknown" if changed is None else str(bool(changed)).lower(),
    }
    return {**lineage, **({"git.remote": remote} if remote else {})}


def without_credentials(url: str) -> str:
    """Strip user, password and query, which may contain tokens, from the URL of a remote; "" for an
    invalid URL."""
    if "://" not in url:
        return url.rpartition("@")[2]  # host:path, or a directory
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname or ''}:{parts.port}" if parts.port else parts.hostname or ""
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _git(directory: Path, *words: str) -> str | None:
    """Return the output of a git command; None if git is not installed, fails, or times out."""
    argv = ["git", "-C", str(directory), *words]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=environ,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

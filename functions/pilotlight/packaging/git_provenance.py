"""Where what is deployed comes from: the git checkout around its source, if there is one. Never a
reason not to deploy."""

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
"""Of one question to git: a checkout on a slow disk must not hold up a deploy."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


def read_provenance(declarations: list[Declaration]) -> dict[str, str]:
    """The lineage of the checkout that holds the first of these declarations that lies in one."""
    for declaration in declarations:
        try:
            root = find_source_tree(declaration).root
        except InvalidInput:
            continue  # packaging will say it better
        if found := read_checkout_provenance(root or Path.cwd()):
            return found
    return {}


def read_checkout_provenance(directory: Path) -> dict[str, str]:
    """`git.commit`, `git.dirty` (whether tracked files differ from it) and `git.remote` (without
    credentials); {} outside of a checkout."""
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
    """A remote's address without user, password and query, where tokens are found; "" for one that
    cannot be read."""
    if "://" not in url:
        return url.rpartition("@")[2]  # host:path, or a directory
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname or ''}:{parts.port}" if parts.port else parts.hostname or ""
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _git(directory: Path, *words: str) -> str | None:
    """What git says; None when it is not there, does not know, or takes too long."""
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

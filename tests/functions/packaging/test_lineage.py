"""Where a deploy comes from: the checkout that it lies in, without its secrets, and never a reason
to fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pilotlight.packaging import git_provenance


def git(directory: Path, *words: str) -> str:
    named = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "a"), ("EMAIL", "a@invalid"))
    }
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "GIT_CONFIG_NOSYSTEM": "1",
        **named,
    }
    return subprocess.run(
        ["git", "-C", str(directory), *words],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "app.py").write_text("1")
    git(tmp_path, "add", "app.py")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_checkout_is_told_by_commit_remote_and_whether_it_was_changed(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert git_provenance.read_checkout_provenance(checkout) == {
        "git.commit": commit,
        "git.dirty": "false",
    }
    (checkout / "new.py").write_text("not tracked")
    (checkout / "inside").mkdir()
    git(checkout, "remote", "add", "origin", "https://me:token@example.invalid/team/app.git")
    (checkout / "app.py").write_text("2")
    told = git_provenance.read_checkout_provenance(checkout / "inside")
    assert told == {
        "git.commit": commit,
        "git.dirty": "true",
        "git.remote": "https://example.invalid/team/app.git",
    }


def test_outside_of_a_checkout_nothing_is_told(tmp_path: Path) -> None:
    assert git_provenance.read_checkout_provenance(tmp_path) == {}
    assert git_provenance.read_checkout_provenance(tmp_path / "missing") == {}


def test_a_checkout_without_a_commit_tells_nothing(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_provenance.read_checkout_provenance(tmp_path) == {}


def test_without_git_nothing_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert git_provenance.read_checkout_provenance(checkout) == {}


def test_a_git_that_fails_or_babbles_tells_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = checkout / "git"
    for text in ("#!/bin/sh\nexit 128\n", "#!/bin/sh\nprintf '\\377 hello'\n"):
        script.write_text(text)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{checkout}:/bin:/usr/bin")
        assert git_provenance.read_checkout_provenance(checkout) == {}


@pytest.mark.parametrize(
    "url,shown",
    [
        ("https://me:token@example.invalid/app.git", "https://example.invalid/app.git"),
        (
            "https://token@example.invalid:8443/app.git?private_token=x#y",
            "https://example.invalid:8443/app.git",
        ),
        ("ssh://git@example.invalid/app.git", "ssh://example.invalid/app.git"),
        ("git@example.invalid:team/app.git", "example.invalid:team/app.git"),
        ("/srv/git/app.git", "/srv/git/app.git"),
        ("https://example.invalid:port/app", ""),
        ("", ""),
    ],
)
def test_a_remote_is_told_without_credentials(url: str, shown: str) -> None:
    assert git_provenance.without_credentials(url) == shown

"""Profiles: which platform, whose key, which environment."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pilotlight import profile as profiles
from pilotlight.errors import InvalidInput
from pilotlight.profile import Profile


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert profiles.load({"HOME": str(tmp_path)}) == Profile(
        url="http://127.0.0.1:8700", api_key="", environment="main"
    )


def test_what_was_saved_is_loaded_and_private(tmp_path: Path) -> None:
    file = tmp_path / ".pilotlight.toml"
    saved = Profile(url="https://p.example", api_key='k"\\ey', environment="staging")

    profiles.save(saved, path=file)

    assert profiles.load({"HOME": str(tmp_path)}) == saved
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_environment_variables_override_field_by_field(tmp_path: Path) -> None:
    profiles.save(Profile(url="http://a", api_key="k"), path=tmp_path / ".pilotlight.toml")
    environ = {
        "HOME": str(tmp_path),
        "PILOTLIGHT_ENVIRONMENT": "staging",
        "PILOTLIGHT_URL": "http://b",
    }

    assert profiles.load(environ) == Profile(url="http://b", api_key="k", environment="staging")


def test_a_url_may_be_a_unix_socket() -> None:
    here, there = Profile(url="unix:///run/p/http.sock"), Profile(url="https://p.example")
    assert (here.socket_path, here.base_url) == ("/run/p/http.sock", "http://localhost")
    assert (there.socket_path, there.base_url) == (None, "https://p.example")
    with pytest.raises(InvalidInput, match=r"unix:///"):
        Profile(url="unix://relative.sock")


def test_profiles_live_side_by_side(tmp_path: Path) -> None:
    file, environ = tmp_path / ".pilotlight.toml", {"HOME": str(tmp_path)}
    profiles.save(Profile(url="http://a"), path=file)
    profiles.save(Profile(url="http://b"), name="work", path=file, activate=False)

    assert profiles.names(environ) == ("default", "work")
    assert profiles.load(environ).url == "http://a"
    assert profiles.load(environ, name="work").url == "http://b"
    assert profiles.load({**environ, "PILOTLIGHT_PROFILE": "work"}).url == "http://b"
    with pytest.raises(InvalidInput, match=r"no profile 'other'; it has: default, work"):
        profiles.load(environ, name="other")


def test_the_xdg_file_is_used_where_it_is_the_one_there(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "pilotlight" / "config.toml"
    profiles.save(Profile(url="http://xdg"), path=file)

    assert profiles.load({"HOME": str(tmp_path)}).url == "http://xdg"
    assert (
        profiles.load({"HOME": str(tmp_path), "PILOTLIGHT_CONFIG": str(tmp_path / "none")}).url
        == "http://127.0.0.1:8700"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("active =", "not valid TOML"),
        ("[profiles.default]\ncolour = 'red'", "colour"),
        ("[profiles.default]\nurl = 'ftp://x'", "must start"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / ".pilotlight.toml").write_text(text)

    with pytest.raises(InvalidInput, match=message):
        profiles.load({"HOME": str(tmp_path)})


def test_the_key_does_not_show() -> None:
    assert "secret" not in repr(Profile(api_key="secret"))

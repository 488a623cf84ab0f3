"""`pilotlight login|dashboard` and `pilotlight token show` against the real control plane."""

from __future__ import annotations

import json
import re
import subprocess
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from pilotlight import profile
from pilotlight.cli.main import build
from tests.fakes.served_controller import ServedController


@pytest.fixture(scope="module", name="platform")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    with ServedController(tmp_path_factory.mktemp("controller")) as served:
        yield served


class Shell:
    """Types commands with a profile file of its own, and no variables of the platform."""

    def __init__(self, home: Path) -> None:
        self.file = home / ".pilotlight.toml"

    def run(self, *words: str, typed: str = "") -> Result:
        env = dict.fromkeys(("PILOTLIGHT_URL", "PILOTLIGHT_API_KEY"))
        own = {"PILOTLIGHT_CONFIG": str(self.file), "NO_COLOR": "1", "COLUMNS": "300"}
        return CliRunner().invoke(
            build(), list(words), env={**env, **own}, input=typed, prog_name="pilotlight"
        )

    def ran(self, *words: str, typed: str = "") -> Result:
        done = self.run(*words, typed=typed)
        assert done.exit_code == 0, done.output
        return done

    def failed(self, *words: str, typed: str = "") -> str:
        done = self.run(*words, typed=typed)
        assert done.exit_code == 1, done.output
        return done.stderr

    def profile(self, name: str | None = None) -> profile.Profile:
        return profile.load({"PILOTLIGHT_CONFIG": str(self.file)}, name=name)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_login_tries_the_key_and_keeps_it(shell: Shell, platform: ServedController) -> None:
    done = shell.ran("login", f"{platform.url}/", typed=f"{platform.key}\n")
    assert "admin" in done.stdout
    assert platform.key not in done.output
    assert shell.profile() == profile.Profile(url=platform.url, api_key=platform.key)
    assert shell.file.stat().st_mode & 0o777 == 0o600
    assert "No apps yet" in shell.ran("app", "list").stdout


def test_login_takes_address_and_key_in_one_line(shell: Shell, platform: ServedController) -> None:
    shell.ran("login", typed=f"{platform.url} {platform.key}\n")
    assert shell.profile().url == platform.url


def test_a_key_that_is_refused_is_not_kept(shell: Shell, platform: ServedController) -> None:
    said = shell.failed("login", platform.url, typed="pl_wrong\n")
    assert f"{platform.url} does not accept this key" in said
    assert "token create" in said
    assert "nothing was typed" in shell.failed("login", platform.url)
    assert "must start with http" in shell.failed("login", "example.com", typed="pl_x\n")
    assert not shell.file.exists()


def test_login_loses_no_other_key(shell: Shell, platform: ServedController) -> None:
    elsewhere = profile.Profile(url="http://elsewhere:1", api_key="pl_elsewhere")
    profile.save(elsewhere, path=shell.file)
    assert "profile '127.0.0.1'" in shell.ran("login", platform.url, typed=platform.key).stdout
    assert shell.profile().api_key == platform.key
    assert shell.profile("default") == elsewhere

    with platform.client() as client:
        second = client.create_key(scope="deploy")["secret"]
    done = shell.ran("login", "--profile", "127.0.0.1", platform.url, typed=second)
    assert "kept as profile '127.0.0.1-old-1'" in done.stderr
    assert shell.profile().api_key == second
    assert shell.profile("127.0.0.1-old-1").api_key == platform.key


def test_login_learns_the_environment_of_a_bound_key(
    shell: Shell, platform: ServedController
) -> None:
    with platform.client() as client:
        client.create_environment("staging")
        bound = client.create_key(scope="deploy", environment="staging")["secret"]
    shell.ran("login", platform.url, typed=bound)
    assert shell.profile().environment == "staging"


def test_token_show_says_who_one_is_and_exports_for_a_shell(
    shell: Shell, platform: ServedController
) -> None:
    assert "pilotlight login" in shell.failed("token", "show", "--shell")
    shell.ran("login", platform.url, typed=platform.key)
    shown = json.loads(shell.ran("token", "show", "--json").stdout)
    assert (shown["url"], shown["scope"], shown["profile"]) == (platform.url, "admin", "default")
    assert platform.key not in shell.ran("token", "show").output

    exports = shell.ran("token", "show", "--shell").stdout
    script = f'{exports}\necho "$PILOTLIGHT_URL $PILOTLIGHT_API_KEY"'
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == [platform.url, platform.key]


def test_the_dashboard_is_opened_by_a_code_that_works_once(
    shell: Shell, platform: ServedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.ran("login", platform.url, typed=platform.key)
    opened: list[str] = []

    def open_(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_)
    assert "opened" in shell.ran("dashboard").stderr
    printed = shell.ran("dashboard", "--no-browser").stdout.strip()

    with httpx.Client(base_url=platform.url) as browser:
        for address in (*opened, printed):
            place, _, code = address.partition("#code=")
            assert place == f"{platform.url}/dashboard/login"
            assert platform.key not in address
            form = browser.get(place)
            (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
            sent = {"code": code, "form": token}
            assert browser.post("/dashboard/login", data=sent).headers["location"] == "/dashboard"
            assert browser.get("/dashboard").status_code == 200
            browser.cookies.clear()


def test_without_a_browser_the_dashboards_address_is_printed(
    shell: Shell, platform: ServedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.ran("login", platform.url, typed=platform.key)
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    done = shell.ran("dashboard")
    assert done.stdout.startswith(f"{platform.url}/dashboard/login#code=")
    assert "works once" in done.stderr

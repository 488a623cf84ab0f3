"""`pilotlight login --oidc` against the real control plane and an issuer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pilotlight import profile
from pilotlight.core.oidc.settings import Issuer, SignInRule
from tests.fakes.issuer import CLIENT, SECRET, FakeIssuer
from tests.fakes.served_controller import CLOCK_S, ServedController
from tests.functions.cli.test_login import Shell

RULES = (SignInRule(claims={"groups": "ml"}, tenant="default", scope="deploy"),)


@pytest.fixture(scope="module", name="issuer")
def _issuer() -> Iterator[FakeIssuer]:
    with FakeIssuer(lambda: CLOCK_S).serve() as issuer:
        yield issuer


@pytest.fixture(scope="module", name="platform")
def _platform(
    issuer: FakeIssuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedController]:
    own = Issuer(name="own", issuer=issuer.url, client_id=CLIENT, sign_in=list(RULES))
    with ServedController(
        tmp_path_factory.mktemp("controller"), issuers={"own": own}, secrets={"own": SECRET}
    ) as served:
        yield served


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@contextmanager
def person(issuer: FakeIssuer, decision: str = "approved") -> Iterator[None]:
    """A person who types every code that is shown, and decides, meanwhile."""
    ended = threading.Event()

    def decide() -> None:
        while not ended.wait(0.01):
            for device in list(issuer.devices.values()):
                issuer.decide(device.user_code, decision)

    thread = threading.Thread(target=decide, name="person")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        issuer.devices.clear()


def test_login_shows_a_page_and_a_code_and_keeps_the_key(
    shell: Shell, platform: ServedController, issuer: FakeIssuer
) -> None:
    with person(issuer):
        done = shell.ran("login", platform.url, "--oidc")
    assert f"open {issuer.url}/activate in a browser and type" in done.stderr
    assert "as tenant default, scope deploy" in done.stdout
    key = shell.profile().api_key
    assert key.startswith("pl_")
    assert key not in done.output
    assert shell.file.stat().st_mode & 0o777 == 0o600
    assert "No apps yet" in shell.ran("app", "list").stdout


def test_with_json_the_code_comes_first_and_the_result_last(
    shell: Shell, platform: ServedController, issuer: FakeIssuer
) -> None:
    with person(issuer):
        done = shell.ran("login", platform.url, "--issuer", "own", "--json")
    shown, result = (json.loads(line) for line in done.stdout.strip().split("\n"))
    assert shown["verification_uri"] == f"{issuer.url}/activate"
    assert (result["scope"], result["expires_at"]) == ("deploy", CLOCK_S + 43_200)
    assert "code" not in shown
    assert "pl_" not in done.output


def test_the_key_of_an_earlier_sign_in_is_replaced_and_a_typed_one_is_kept(
    shell: Shell, platform: ServedController, issuer: FakeIssuer
) -> None:
    with person(issuer):
        shell.ran("login", platform.url, "--oidc")
        first = shell.profile().api_key
        shell.ran("login", platform.url, "--oidc")
        assert shell.profile().api_key != first
        assert profile.names({"PILOTLIGHT_CONFIG": str(shell.file)}) == ("default",)
        shell.ran("login", platform.url, typed=platform.key)
        shell.ran("login", platform.url, "--oidc")
    assert platform.key in {
        shell.profile(name).api_key
        for name in profile.names({"PILOTLIGHT_CONFIG": str(shell.file)})
    }


def test_an_ended_sign_in_says_how_to_go_on(
    shell: Shell, platform: ServedController, issuer: FakeIssuer
) -> None:
    with person(issuer):
        shell.ran("login", platform.url, "--oidc")
    platform.now += 43_200
    try:
        assert "pilotlight login --oidc" in shell.failed("app", "list")
    finally:
        platform.now = CLOCK_S


def test_a_person_who_refuses_leaves_nothing(
    shell: Shell, platform: ServedController, issuer: FakeIssuer
) -> None:
    with person(issuer, "access_denied"):
        said = shell.failed("login", platform.url, "--oidc")
    assert "access_denied" in said
    assert "Begin again: `pilotlight login --oidc`" in said
    assert not shell.file.exists()


def test_interrupting_leaves_nothing(
    shell: Shell,
    platform: ServedController,
    issuer: FakeIssuer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", _interrupt)
    done = shell.run("login", platform.url, "--oidc")
    assert done.exit_code == 130
    assert not shell.file.exists()


def _interrupt(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_platform_without_issuers_says_so(shell: Shell, tmp_path: Path) -> None:
    home = tmp_path / "other"
    home.mkdir()
    with ServedController(home) as served:
        said = shell.failed("login", served.url, "--oidc")
    assert "section `issuers` of platform.yaml" in said

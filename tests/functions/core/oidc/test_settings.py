"""Section `issuers` of platform.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotlight.cli.supervisor.changed_settings import changed_settings
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.oidc.settings import (
    CALLBACK_PATH,
    MAX_ISSUERS,
    MAX_RULES,
    claim_of,
    has_claims,
    read_issuers,
)
from pilotlight.core.settings import SettingsInvalid

SIGN_IN = {"claims": {"groups": "ml"}, "tenant": "default", "scope": "deploy"}
CALLERS = {"claims": {"groups": "ml"}, "tenant": "acme", "audience": "calls"}
COMPANY = {"issuer": "https://login.example.com", "client_id": "pilotlight", "sign_in": [SIGN_IN]}


def written(directory: Path, **sections: Any) -> Path:
    file = directory / "platform.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_an_issuer_is_read_with_its_rules(tmp_path: Path) -> None:
    company = {**COMPANY, "callers": [{**CALLERS, "app": "shop", "customer_claim": "org"}]}
    found = read_issuers(written(tmp_path, issuers={"company": company}))["company"]
    assert (found.name, found.session_s, found.leeway_s) == ("company", 43_200, 30)
    assert found.sign_in[0].scope == "deploy"
    assert (found.callers[0].app, found.callers[0].customer_claim) == ("shop", "org")


def test_without_the_section_there_are_none(tmp_path: Path) -> None:
    assert read_issuers(None) == {}
    assert read_issuers(written(tmp_path, issuers={})) == {}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"issuer": "http://login.example.com"}, "issuer = "),
        ({"issuer": "ftp://login.example.com"}, "issuer = "),
        ({"issuer": "https://login.example.com?x=1"}, "issuer = "),
        ({"issuer": "https://user:password@login.example.com"}, "issuer = "),
        ({"issuer": "https://"}, "issuer = "),
        ({"issuer": ""}, "issuer = "),
        ({"client_id": None}, "needs client_id"),
        ({"scopes": ["email"]}, "scopes = "),
        ({"scopes": ["openid", 5]}, "scopes = "),
        ({"session_s": 60}, "session_s = 60"),
        ({"session_s": 10**6}, "session_s = "),
        ({"leeway_s": 301}, "leeway_s = 301"),
        ({"redirect_url": "https://dashboard.example/elsewhere"}, "redirect_url = "),
        ({"redirect_url": f"http://dashboard.example{CALLBACK_PATH}"}, "redirect_url = "),
        ({"sign_in": [{**SIGN_IN, "claims": {}}]}, r"sign_in\[0\].claims"),
        ({"sign_in": [{**SIGN_IN, "claims": {"groups": []}}]}, "no token would fit"),
        ({"sign_in": [{**SIGN_IN, "claims": {"groups": {"a": 1}}}]}, "expected a text"),
        ({"sign_in": [{**SIGN_IN, "tenant": ""}]}, "tenant is missing"),
        ({"sign_in": [{**SIGN_IN, "scope": 5}]}, r"sign_in\[0\].scope"),
        ({"sign_in": [{**SIGN_IN, "group": "x"}]}, "unknown key"),
        ({"sign_in": ["x"]}, "expected keys and values"),
        ({"sign_in": [SIGN_IN] * (MAX_RULES + 1)}, "rules: at most"),
        ({"callers": [{**CALLERS, "audience": ""}]}, "audience is missing"),
        ({"callers": [{**CALLERS, "audience": "pilotlight"}]}, "is client_id"),
        ({"callers": [{**CALLERS, "function": "hello"}]}, "needs app"),
        ({"secret": "s"}, "unknown key"),
    ],
)
def test_a_wrong_issuer_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsInvalid, match=why):
        read_issuers(written(tmp_path, issuers={"company": {**COMPANY, **changes}}))


def test_issuers_are_bounded_and_each_is_there_once(tmp_path: Path) -> None:
    many = {f"i{n}": {"issuer": f"https://login{n}.example.com"} for n in range(MAX_ISSUERS + 1)}
    with pytest.raises(SettingsInvalid, match="at most"):
        read_issuers(written(tmp_path, issuers=many))
    with pytest.raises(SettingsInvalid, match="merge them"):
        read_issuers(written(tmp_path, issuers={"a": COMPANY, "b": COMPANY}))


def test_a_platform_that_is_started_keeps_its_issuers(tmp_path: Path) -> None:
    assert changed_settings(written(tmp_path, issuers={"company": COMPANY})) == {
        "issuers": {"company": COMPANY}
    }
    assert changed_settings(written(tmp_path, issuers={})) == {}
    with pytest.raises(SettingsInvalid):
        changed_settings(written(tmp_path, issuers={"company": {**COMPANY, "leeway_s": -1}}))


def test_an_issuer_of_this_machine_may_be_asked_without_tls(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:8080", "http://localhost:8080/realms/x", "http://[::1]:8080"):
        file = written(tmp_path, issuers={"company": {**COMPANY, "issuer": url}})
        assert read_issuers(file)["company"].is_local


def config_of(directory: Path, **sections: Any) -> ControllerConfig:
    return ControllerConfig.read(written(directory, **sections))


def test_the_controller_knows_where_browsers_come_back_to(tmp_path: Path) -> None:
    issuers = {"company": COMPANY}
    here = config_of(tmp_path, issuers=issuers)
    assert here.redirect_url("company") == f"http://127.0.0.1:8700{CALLBACK_PATH}"
    own = config_of(
        tmp_path, issuers=issuers, controller={"dashboard_url": "https://dashboard.example"}
    )
    assert own.redirect_url("company") == f"https://dashboard.example{CALLBACK_PATH}"
    url = f"https://ml.example{CALLBACK_PATH}"
    named = config_of(
        tmp_path,
        issuers={"company": {**COMPANY, "redirect_url": url}},
        activator={"listen": "0.0.0.0:8700"},
    )
    assert named.redirect_url("company") == url
    with pytest.raises(SettingsInvalid, match="redirect_url is missing"):
        config_of(tmp_path, issuers=issuers, activator={"listen": "0.0.0.0:8700"})


def test_the_clients_secret_is_read_by_the_controller_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    sections = {"issuers": {"company": {**COMPANY, "client_secret_file": str(secret)}}}
    found = config_of(tmp_path, **sections)
    assert found.issuer_secrets == {"company": "s3cret"}
    assert "s3cret" not in repr(found)
    secret.unlink()
    assert read_issuers(written(tmp_path, **sections))  # as an activator does
    with pytest.raises(SettingsInvalid, match=r"issuers.company.client_secret_file"):
        config_of(tmp_path, **sections)


def test_an_unknown_scope_is_refused(tmp_path: Path) -> None:
    company = {**COMPANY, "sign_in": [{**SIGN_IN, "scope": "root"}]}
    with pytest.raises(SettingsInvalid, match=r"sign_in\[0\].scope = 'root'"):
        config_of(tmp_path, issuers={"company": company})


@pytest.mark.parametrize(
    "claims, required, fits",
    [
        ({"groups": ["a", "b"]}, {"groups": "b"}, True),
        ({"groups": ["a", "b"]}, {"groups": ["c", "b"]}, True),
        ({"groups": "b"}, {"groups": ["c", "b"]}, True),
        ({"groups": ["ab"]}, {"groups": "a"}, False),
        ({"groups": "ab"}, {"groups": "a"}, False),
        ({}, {"groups": "a"}, False),
        ({"groups": None}, {"groups": "None"}, False),
        ({"level": 1}, {"level": 1}, True),
        ({"level": True}, {"level": 1}, False),
        ({"level": "1"}, {"level": 1}, False),
        ({"staff": True}, {"staff": True}, True),
        ({"staff": 1}, {"staff": True}, False),
        ({"a": "x", "b": "y"}, {"a": "x", "b": "z"}, False),
        ({"realm_access": {"roles": ["ml"]}}, {"realm_access.roles": "ml"}, True),
        ({"https://example.com/groups": ["ml"]}, {"https://example.com/groups": "ml"}, True),
        ({"email": "a@b", "email_verified": True}, {"email": "a@b"}, True),
        ({"email": "a@b", "email_verified": "true"}, {"email": "a@b"}, False),
        ({"email": "a@b"}, {"email": "a@b"}, False),
    ],
)
def test_claims_fit_by_value_and_kind(
    claims: dict[str, Any], required: dict[str, Any], fits: bool
) -> None:
    assert has_claims(claims, required) is fits


def test_a_path_of_names_ends_where_there_is_no_claim() -> None:
    assert claim_of({"a": {"b": 1}}, "a.b") == 1
    assert claim_of({"a": "b"}, "a.b") is None
    assert claim_of({"a": {"b": 1}}, "a.") is None

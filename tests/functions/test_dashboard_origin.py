"""Setting `controller.dashboard_url`: what is an origin, and what the two processes and the command
line make of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.cli.supervisor import local_platform
from pilotlight.controller.dashboard import api_docs
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.core.dashboard.dashboard_origin import (
    DashboardOrigin,
    parse_host,
    read_dashboard_origin,
)
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import InvalidInput


@pytest.mark.parametrize(
    "url,origin,host",
    [
        ("https://dashboard.example", "https://dashboard.example", "dashboard.example"),
        ("https://Dashboard.Example:443/", "https://dashboard.example", "dashboard.example"),
        ("https://dashboard.example:8443", "https://dashboard.example:8443", "dashboard.example"),
        (
            "http://dashboard.localhost:8700",
            "http://dashboard.localhost:8700",
            "dashboard.localhost",
        ),
        ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443", "2001:db8::1"),
    ],
)
def test_an_origin_is_kept_in_its_serialized_form(url: str, origin: str, host: str) -> None:
    parsed = DashboardOrigin.parse(url)

    assert (parsed.url, parsed.host) == (origin, host)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "dashboard.example",
        "//dashboard.example",
        "ftp://dashboard.example",
        "https://",
        "https://dashboard.example/dashboard",
        "https://dashboard.example?",
        "https://dashboard.example#",
        "https://u:p@dashboard.example",
        "https://@dashboard.example",
        "https://dashboard.example:port",
        "https://dashboard.example:99999",
        "https://dash board",
        "https://*.example",
        "https://dash_board",
        "https://dashboard.example\r\nx: y",
        "https://a..b",
        "https://[::1",
        "https://-a.example",
    ],
)
def test_what_is_not_an_origin_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^dashboard_url = .*https://host"):
        DashboardOrigin.parse(url)


@pytest.mark.parametrize(
    "authority,host",
    [
        ("a.example", "a.example"),
        ("A.Example.:80", "a.example"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("", ""),
        (" a ", "a"),
    ],
)
def test_host_of_a_host_header(authority: str, host: str) -> None:
    assert parse_host(authority) == host


def _file(directory: Path, text: str) -> Path:
    file = directory / "platform.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    ["", "controller:\n", "controller: {standby: true}\n", "controller: {dashboard_url: null}\n"],
)
def test_there_is_none_unless_it_is_set(tmp_path: Path, text: str) -> None:
    assert read_dashboard_origin(_file(tmp_path, text)) is None
    assert read_dashboard_origin(None) is None


@pytest.mark.parametrize(
    "listen,url",
    [
        ("127.0.0.1:8700", "http://127.0.0.1:9000"),
        ("127.0.0.1:8700", "http://localhost:8700"),
        ("127.0.0.1:8700", "http://[::1]:8700"),
        ("[::1]:8700", "http://localhost:8700"),
        ("api.example:443", "https://API.example:8443"),
    ],
)
def test_the_host_of_functions_is_refused(tmp_path: Path, listen: str, url: str) -> None:
    file = _file(
        tmp_path, f"activator: {{listen: '{listen}'}}\ncontroller: {{dashboard_url: '{url}'}}\n"
    )

    with pytest.raises(SettingsInvalid, match="functions are served at this host"):
        read_dashboard_origin(file)
    with pytest.raises(SettingsInvalid, match="functions are served at this host"):
        ControllerConfig.read(file)


def test_both_processes_refuse_what_is_not_an_origin(tmp_path: Path) -> None:
    file = _file(tmp_path, "controller: {dashboard_url: 'https://dashboard.example/pages'}\n")

    for read in (read_dashboard_origin, ControllerConfig.read):
        with pytest.raises(
            SettingsInvalid, match=r"controller\.dashboard_url = 'https://dashboard.example/pages'"
        ):
            read(file)


def test_the_command_line_names_it(tmp_path: Path) -> None:
    def found(text: str) -> local_platform.LocalPlatform:
        return local_platform.find_platform(
            config=_file(tmp_path, text), home=None, environ={"HOME": str(tmp_path)}, cwd=tmp_path
        )

    assert found("").dashboard == "http://127.0.0.1:8700/dashboard"
    assert (
        found("controller: {dashboard_url: 'https://dashboard.example/'}\n").dashboard
        == "https://dashboard.example/dashboard"
    )
    with pytest.raises(InvalidInput, match="dashboard_url"):
        _ = found("controller: {dashboard_url: 'https://dashboard.example/x'}\n").dashboard


@pytest.mark.parametrize(
    "url,home",
    [(None, "/dashboard"), ("https://dashboard.example/", "https://dashboard.example/dashboard")],
)
async def test_the_reference_of_the_api_links_to_it(
    tmp_path: Path, url: str | None, home: str
) -> None:
    config = SimpleNamespace(settings=ControllerSettings(dashboard_url=url))
    app = SimpleNamespace(openapi=lambda: {"info": {"title": "t", "summary": "s"}, "paths": {}})

    page = await api_docs.docs(
        cast(Any, SimpleNamespace(config=config)), cast(Any, SimpleNamespace(app=app))
    )

    assert f'<a class="brand" href="{home}">' in bytes(page.body).decode()

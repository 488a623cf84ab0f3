"""Whether the controller could go on without root: what it would have to reach, tried as its
user."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from pilotlight.controller.server.database_lock import (
    AlreadyRunning,
    ControllerLock,
    acquire_lock_file,
)
from pilotlight.controller.server.process_user import (
    controller_user,
    restore_root_ownership,
    startup_obstacle,
)
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import SettingsInvalid
from tests.fakes.as_user import status_of
from tests.functions.controller.test_faults import START_S, Process

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("installed_modules_only")]
UID = 19902


def read(directory: Path, platform: str = "", more: str = "") -> ControllerConfig:
    file = directory / "platform.yaml"
    file.write_text(f"platform: {{home: {directory}/h, {platform}}}\n{more}")
    config = ControllerConfig.read(file)
    config.paths.make()
    for name in ("controller", "blobs"):
        (config.paths.home / name).mkdir(exist_ok=True)
    return config


def test_what_becomes_its_own_is_the_database_and_blobs_below_the_home(short_tmp: Path) -> None:
    home, run = short_tmp / "h", short_tmp / "h/run"
    plain = controller_user(read(short_tmp))
    assert (plain.uid, plain.owns, plain.enters, plain.writes) == (
        UID,
        (home / "controller", home / "blobs"),
        (run / "controller",),
        (),
    )
    (home / "data/objects").mkdir(parents=True)
    assert controller_user(read(short_tmp, f"blobs: {home}/data/objects")).owns == (
        home / "controller",
        home / "data/objects",
    )
    (short_tmp / "far").mkdir()
    far = controller_user(read(short_tmp, f"blobs: {short_tmp}/far"))
    assert (far.owns, far.writes) == ((home / "controller",), (short_tmp / "far",))
    (home / "node").mkdir()
    assert controller_user(read(short_tmp, f"blobs: {home}/node")).owns == (home / "controller",), (
        "what is the node agent's stays root's"
    )
    bucket = controller_user(read(short_tmp, "blobs: s3://bucket/x"))
    assert bucket.owns == (home / "controller", home / "blobs"), "uploads on their way"


def test_credentials_of_a_bucket_that_only_root_reads_are_an_obstacle(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    credentials = short_tmp / "credentials"
    credentials.touch(mode=0o600)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    config = read(short_tmp, "blobs: s3://bucket/x")
    assert startup_obstacle(config).startswith(
        f"uid {UID} cannot use {credentials}: give group {UID} access to it"
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "in the environment")
    assert startup_obstacle(config) == ""


def test_a_database_that_answers_root_alone_is_an_obstacle(
    short_tmp: Path, postgres_url: str
) -> None:
    url = sa.make_url(postgres_url)
    away = url.update_query_dict({"host": str(short_tmp / "nobody")}).render_as_string(
        hide_password=False
    )
    assert (
        startup_obstacle(read(short_tmp, more=f"controller: {{database_url: '{away}'}}")) == ""
    ), "it is away, and may be back"
    directory = Path(str(url.query["host"]))
    mode = directory.stat().st_mode & 0o7777
    config = read(short_tmp, more=f"controller: {{database_url: '{postgres_url}'}}")
    try:
        directory.chmod(0o700)
        why = startup_obstacle(config)
        assert why.startswith(f"PostgreSQL does not accept uid {UID}: ")
        assert why.endswith("use a password (controller.database_url_file)")
    finally:
        directory.chmod(mode)


@pytest.mark.slow  # starts a controller
def test_with_postgresql_it_serves_without_root(short_tmp: Path, postgres_url: str) -> None:
    directory = Path(str(sa.make_url(postgres_url).query["host"]))
    mode = directory.stat().st_mode & 0o7777
    directory.chmod(mode | 0o011)  # as /run/postgresql
    process = Process(short_tmp, f", database_url: '{postgres_url}'")
    try:
        process.start()
        assert process.http.get("/v1/whoami").status_code == 200
        assert status_of(process.pid)["Uid"].split() == [str(UID)] * 4
        assert process.end(signal.SIGTERM) == 0
        assert not (short_tmp / "controller/controller.db").exists()
    finally:
        process.close()
        directory.chmod(mode)


@pytest.mark.timeout(180)  # on a machine that may be busy
@pytest.mark.slow  # three starts of a controller, one of which waits for another
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_stood_by_in_the_same_home_takes_over_without_root(
    short_tmp: Path, ends: signal.Signals
) -> None:
    process = Process(short_tmp, ", standby: true")
    reading, writing = os.pipe()
    process.start()
    second = process.spawn("--ready-fd", str(writing), pass_fds=(writing,))
    os.close(writing)
    try:
        assert second.stderr is not None
        assert any(b"event=standing_by" in line for line in second.stderr)
        assert status_of(process.pid)["Uid"].split() == [str(UID)] * 4
        process.end(ends)
        assert os.read(reading, 1) == b"\n"
        assert process.http.get("/v1/whoami").status_code == 200
        assert status_of(second.pid)["Uid"].split() == [str(UID)] * 4
    finally:
        second.terminate()
        second.communicate(timeout=START_S)
        os.close(reading)
        process.close()
    assert second.returncode == 0


def test_a_uid_of_a_tenant_is_refused_before_anything_is_opened(short_tmp: Path) -> None:
    with pytest.raises(
        SettingsInvalid,
        match=r"controller_uid = 20000: tenants' uids start at snapshotter\.uid_base = 20000",
    ):
        read(short_tmp, "controller_uid: 20000")


def test_root_takes_back_both_directories(short_tmp: Path) -> None:
    config = read(short_tmp)
    for directory in controller_user(config).owns:
        os.chown(directory, UID, UID)
        (directory / "f").touch()
        os.chown(directory / "f", UID, UID)
    restore_root_ownership(
        dataclasses.replace(config, paths=dataclasses.replace(config.paths, controller_uid=None))
    )
    assert {path.stat().st_uid for path in (short_tmp / "h").rglob("*")} == {0}


def test_a_lock_that_root_took_stays_with_the_process(short_tmp: Path, postgres_url: str) -> None:
    engines = [sa.create_engine(postgres_url) for _ in range(2)]
    first, second = (
        ControllerLock(short_tmp / str(n), engine, descriptor=acquire_lock_file(short_tmp / str(n)))
        for n, engine in enumerate(engines)
    )
    with first:
        with pytest.raises(AlreadyRunning):
            second.acquire()
        with pytest.raises(AlreadyRunning):
            # the file is held through all tries: nobody may open it again
            acquire_lock_file(short_tmp / "1")
    second.acquire()
    assert second.is_held()
    second.release()
    for engine in engines:
        engine.dispose()

"""Directories of the platform, and who may enter them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotlight.core.settings import Paths, PlatformSettings
from tests.fakes.as_user import as_user

ACTIVATOR, CONTROLLER, TENANT = 19901, 19902, 20000


@pytest.mark.root
def test_each_user_enters_what_is_for_it_and_lists_nothing(short_tmp: Path) -> None:
    short_tmp.chmod(0o755)
    run = short_tmp / "r"
    paths = Paths(
        home=short_tmp / "h", run=run, activator_uid=ACTIVATOR, controller_uid=CONTROLLER
    ).make()
    assert paths.socket_for_controller("snapshotter") == run / "controller/snapshotter.sock"
    for path, gid in ((run, ACTIVATOR), (run / "controller", CONTROLLER)):
        assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (
            0,
            gid,
            0o710,
        )
    assert paths.home.stat().st_mode & 0o777 == 0o700
    assert as_user(ACTIVATOR, lambda: str((run / "x").exists())) == "False"
    assert as_user(ACTIVATOR, lambda: str(os.listdir(run))) == "PermissionError"
    for uid in (CONTROLLER, TENANT):
        assert as_user(uid, lambda: str((run / "x").exists())) == "PermissionError"
    assert as_user(ACTIVATOR, lambda: str((run / "controller/x").exists())) == "PermissionError"


@pytest.mark.root
def test_without_uids_of_their_own_all_is_closed(short_tmp: Path) -> None:
    paths = Paths.of(
        PlatformSettings(home=str(short_tmp / "h"), activator_uid=None, controller_uid=None), {}
    ).make()
    assert paths.run.stat().st_mode & 0o777 == 0o700
    assert list(paths.run.iterdir()) == [paths.for_functions], (
        "which slots see, and nobody reaches from here"
    )
    assert as_user(TENANT, lambda: str(paths.for_functions.exists())) == "PermissionError"
    assert paths.socket_for_controller("snapshotter") == paths.socket("snapshotter")


def test_a_cluster_has_no_uids_of_one_machine(short_tmp: Path) -> None:
    paths = Paths.of(PlatformSettings(home=str(short_tmp / "h"), fleet="knative"), {})
    assert (paths.activator_uid, paths.controller_uid) == (None, None)

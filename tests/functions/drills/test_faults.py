"""What a drill makes fail is the platform's, and nothing of tenants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotlight.drills.faults import BadRoutes, FaultFailed


def test_bad_routes_are_those_of_activators_and_no_file_of_a_tenant(tmp_path: Path) -> None:
    home = tmp_path / "home"
    theirs = home / "node/volumes/t-1/routes.ndjson"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("a file that a tenant calls so")
    drill = BadRoutes(run=tmp_path, home=home)
    with pytest.raises(FaultFailed, match="no activator"):
        drill.begin()

    # a directory that an activator was made to give away: neither waited for, nor followed
    (home / "activator/a-0").mkdir(parents=True)
    for make in (os.mkfifo, lambda path: path.symlink_to(theirs)):
        routes = home / "activator/a-0/routes.ndjson"
        make(routes)
        with pytest.raises(FaultFailed, match="cannot write"):
            drill.begin()
        routes.unlink()
    assert theirs.read_text() == "a file that a tenant calls so"

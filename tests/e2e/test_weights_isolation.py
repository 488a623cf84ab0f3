"""Knowing a digest or a path is no right: a tenant's worker reaches nothing of another tenant's
weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pilotlight import profile
from pilotlight.cli.commands.apps import deploy_progress
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.packaging.build import build
from pilotlight.packaging.weights_push import upload_blobs
from pilotlight.spec.function import WeightsSpec
from snapshotter.shim.sandbox import mounts
from tests.e2e.harness import APPS, PlatformUnderTest, wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

NAME = "letters-of-the-holder.bin"
SECRET = "the bytes of one tenant's model"
OWNER = """
import pilotlight

app = pilotlight.App("holder")
weights = pilotlight.Weights("private")

@app.function(weights=weights, memory="256MiB", scaledown_window=600)
def first(path: str) -> str:
    return (weights.path / path).read_text()
"""


@pytest.fixture(scope="module", name="manifest")
def _manifest(
    platform: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The digest of a model that the first tenant's function has mounted right now."""
    folder = tmp_path_factory.mktemp("holder")
    (folder / "private").mkdir()
    (folder / "private" / NAME).write_text(SECRET)
    (folder / "holder_app.py").write_text(OWNER)
    platform.cli("deploy", str(folder / "holder_app.py"), "--no-wait")
    assert platform.result("holder/first", {"path": NAME}) == SECRET
    with platform.client() as client:
        yield client.get_weights("private").manifest
    platform.cli("app", "delete", "holder", "--yes")


@pytest.fixture(scope="module", name="rival")
def _rival(
    platform: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlatformUnderTest]:
    """The same platform, as another tenant sees it, who has deployed the spy."""
    made = httpx.post(
        f"{platform.url}/v1/tenants", json={"name": "spy"}, headers=platform.headers, timeout=30
    )
    assert made.status_code == 201, made.text
    mine = replace(platform.profile, api_key=str(made.json()["key"]["secret"]))
    file = profile.save(mine, path=tmp_path_factory.mktemp("rival") / "profile.toml")
    rival = replace(platform, profile=mine, profile_file=file)
    wait_for(lambda: rival.post("spy/read").status_code != 401, "the new tenant's key to be known")
    rival.deploy("spy.py")
    yield rival
    rival.cli("app", "delete", "spy", "--yes")


def digests(platform: PlatformUnderTest) -> list[Path]:
    """Every file of the store, wherever it lies."""
    return [path for path in (platform.local.paths.home / "weights").rglob("*") if path.is_file()]


def test_worker_reads_no_file_of_the_store_though_it_knows_each_path(
    platform: PlatformUnderTest, rival: PlatformUnderTest, manifest: str
) -> None:
    home = platform.local.paths.home
    known = digests(platform)
    assert any(path.read_bytes() == SECRET.encode() for path in known)
    paths = [home, home / "weights", home / "weights" / "models" / manifest, home / "blobs", *known]
    said = rival.result("spy/read", {"paths": [str(path) for path in paths]})
    assert set(said.values()) <= {"FileNotFoundError", "PermissionError", "NotADirectoryError"}


def test_worker_connects_to_no_socket_of_the_node(
    platform: PlatformUnderTest, rival: PlatformUnderTest, manifest: str
) -> None:
    run = platform.local.paths.run
    sockets = [str(path) for path in run.rglob("*.sock")]
    assert str(run / "weight_cache.sock") in sockets
    said = rival.result("spy/connect", {"paths": sockets})
    assert set(said.values()) <= {"FileNotFoundError", "PermissionError", "ConnectionRefusedError"}


def test_worker_gets_nothing_through_other_processes(
    platform: PlatformUnderTest, rival: PlatformUnderTest, manifest: str
) -> None:
    with platform.client() as client:
        pids = [i["pid"] for i in client.instances(app="holder")]
    pids += [platform.pid("weight_cache"), platform.pid("snapshotter")]
    assert all(pids)
    inside = (
        f"root{mounts.ROOT}/weights/private/{NAME}",
        f"root{platform.local.paths.home}/weights",
        "mem",
        "maps",
        "fd",
        "environ",
    )
    # A number may mean another process in the worker's namespace, or none: in no case is there
    # anything of the other tenant behind it.
    paths = [f"/proc/{pid}/{part}" for pid in pids for part in inside]
    said = rival.result("spy/read", {"paths": paths})
    assert set(said.values()) <= {"FileNotFoundError", "PermissionError", "ProcessLookupError"}
    assert rival.result("spy/look", {"word": "spy.py"})  # it does look: this is its own
    for word in (NAME, manifest[:16]):
        assert rival.result("spy/look", {"word": word}) == []


def test_deploy_that_names_another_tenants_manifest_is_refused(
    rival: PlatformUnderTest, manifest: str
) -> None:
    app = deploy_progress.load_user_app(str(APPS / "spy.py"))
    with rival.client() as client, build(app, name="thief") as built:
        upload_blobs(client, built.blobs)
        stolen = [
            replace(spec, weights=(WeightsSpec(name="w", manifest=manifest),))
            for spec in built.functions
        ]
        with pytest.raises(InvalidInput, match=manifest[:16]):
            client.deploy("thief", stolen)


def test_blob_of_another_tenant_is_not_found(
    platform: PlatformUnderTest, rival: PlatformUnderTest, manifest: str
) -> None:
    assert (
        httpx.get(
            f"{platform.url}/v1/blobs/{manifest}", headers=platform.headers, timeout=30
        ).status_code
        == 200
    )
    assert (
        httpx.get(f"{rival.url}/v1/blobs/{manifest}", headers=rival.headers, timeout=30).status_code
        == 404
    )


def test_starts_say_where_their_weights_were(platform: PlatformUnderTest, manifest: str) -> None:
    with platform.client() as client:
        (instance,) = client.instances(app="holder")
        assert instance["weights"] == {"private": "origin"}

    def started() -> str:
        """Of a call that waited for a start: the autoscaler may bring back what was stopped."""
        with platform.client() as client:
            for instance in client.instances(app="holder"):
                with contextlib.suppress(NotFound):
                    client.stop_instance(str(instance["id"]))
        timing = platform.post("holder/first", {"path": NAME}).headers["server-timing"]
        return timing if "weights" in timing else ""

    assert wait_for(started, "a call that waits for a start").endswith('weights;desc="dram"')
    assert "private dram" in platform.cli("instance", "list").stdout

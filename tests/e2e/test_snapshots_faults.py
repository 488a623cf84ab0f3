"""What goes wrong around snapshots: damaged images, changed libraries, a full disk, kill -9 of the
node agent. Every call is answered."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pilotlight.protocol import HEADER_START
from tests.conftest import RequireOrSkip
from tests.e2e.frozen import (
    ATTEMPTS,
    DEPLOYED_S,
    SNAPSHOT_S,
    Frozen,
    catalogue,
    environ,
    traces,
    why_no_criu,
)
from tests.e2e.harness import APPS, PATIENCE_S, PlatformUnderTest, platform_up, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(DEPLOYED_S)]
APP = str(APPS / "frail.py")
BLOCK = 96 * 1024 * 1024
SMALL_DISK_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    """A file of the host that the app's functions map, as they map their libraries."""
    directory = Path(tempfile.mkdtemp(prefix="pl", dir="/usr/local"))
    directory.chmod(0o755)
    file = directory / "library.so"
    file.write_bytes(b"one" * 4096)
    file.chmod(0o644)
    yield file
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def frail(require_or_skip: RequireOrSkip, library: Path) -> Iterator[Frozen]:
    if (why := why_no_criu()) is not None:
        require_or_skip(why)
    with environ(FRAIL_LIBRARY=str(library)), platform_up() as platform:
        platform.cli("deploy", APP)
        yield Frozen(platform, "frail")


def check_nothing_is_left(frail: Frozen) -> None:
    """Stop the app, look for what is left on the machine, and deploy it again: its next call finds
    nothing in memory."""
    seen: dict[str, list[str]] = {}

    def clean() -> bool:
        nonlocal seen
        seen = traces(frail.platform)
        return not seen

    with frail.platform.client() as client:
        client.stop_app("frail")
    try:
        wait_for(clean, "nothing to be left")
    except AssertionError as e:
        raise AssertionError(f"{seen}\n{frail.platform.log_tails(40)}") from e
    frail.platform.cli("deploy", APP, "--no-wait")


# -- what is on the disk ---------------------------------------------------------------------------
def flip(file: Path) -> None:
    with file.open("r+b") as image:
        image.seek(file.stat().st_size // 2)
        byte = image.read(1)[0]
        image.seek(-1, os.SEEK_CUR)
        image.write(bytes([byte ^ 0x10]))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    "name, damage",
    [
        ("pages-*.img", flip),
        pytest.param("core-*.img", truncate, marks=pytest.mark.soak),
        pytest.param("pagemap-*.img", remove, marks=pytest.mark.soak),
        pytest.param("files.tar", flip, marks=pytest.mark.soak),
    ],
)
def test_a_damaged_snapshot_is_never_used_the_call_is_cold_and_another_one_is_made(
    frail: Frozen, name: str, damage: Callable[[Path], None]
) -> None:
    broken = frail.wait_ready("Small")["id"]
    frail.to_zero("Small")
    damage(next(frail.directory(broken).rglob(name)))

    answer = frail.call_from_zero("Small.number", {"word": "two"})
    assert (answer.json(), answer.headers[HEADER_START]) == (2, "COLD")
    quarantined = frail.snapshots("Small", state="QUARANTINED")
    assert broken in [s["id"] for s in quarantined]
    assert all(s["reason"] for s in quarantined)
    assert frail.wait_ready("Small")["id"] != broken
    assert frail.restored("Small.number", {"word": "one"}) == 1


def test_a_snapshot_whose_library_changed_is_not_used_and_a_metric_says_so(
    frail: Frozen, library: Path
) -> None:
    old = frail.wait_ready("Mapper")["id"]
    assert frail.restored("Mapper.read") == "one"
    before = frail.metric("pilotlight_snapshot_misses_total", field="file")
    frail.to_zero("Mapper")
    library.write_bytes(b"two" * 4096)

    answer = frail.call_from_zero("Mapper.read")
    assert (answer.json(), answer.headers[HEADER_START]) == ("two", "COLD")
    assert frail.metric("pilotlight_snapshot_misses_total", field="file") > before
    assert "library.so" in (frail.platform.local.logs / "snapshotter.log").read_text()
    wait_for(
        lambda: any(s["id"] != old for s in frail.snapshots("Mapper")),
        "a snapshot with the new library",
        timeout_s=SNAPSHOT_S,
    )
    assert frail.restored("Mapper.read") == "two"


# -- kill -9 ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "begun",
    [pytest.param(".tmp-snapshot-*/images/pages-*.img", marks=pytest.mark.soak), "sn-*"],
    ids=["dumping", "proving"],
)
def test_the_agent_killed_while_a_snapshot_is_made_leaves_nothing_and_the_next_one_is_made(
    frail: Frozen, begun: str
) -> None:
    platform, directory = frail.platform, catalogue(frail.platform)
    platform.cli("snapshot", "delete", "frail/Large", "--yes")
    before = set(directory.glob(begun))
    with ThreadPoolExecutor(1) as pool:
        deploying = pool.submit(platform.cli, "deploy", APP, check=False)
        wait_for(
            lambda: set(directory.glob(begun)) - before,
            f"{begun} to appear",
            timeout_s=SNAPSHOT_S,
            poll_s=0.001,
        )
        pid = frail.kill_agent()
        frail.wait_agent(pid)
        deploying.result()
    assert (
        wait_for(lambda: succeeded(platform, "frail/Large.size"), "the function to answer").json()
        == BLOCK
    )
    platform.cli("deploy", APP)
    frail.wait_ready("Large")
    assert frail.restored("Large.size") == BLOCK
    check_nothing_is_left(frail)


@pytest.mark.parametrize("after_s", [0.03, pytest.param(0.08, marks=pytest.mark.soak)])
def test_the_agent_killed_while_a_call_is_restored_leaves_nothing_and_the_next_call_works(
    frail: Frozen, after_s: float
) -> None:
    platform = frail.platform
    frail.wait_ready("Large")
    check_nothing_is_left(frail)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(platform.post, "frail/Large.size")
        time.sleep(after_s)
        pid = frail.kill_agent()
        frail.wait_agent(pid)
        answer = calling.result()
    assert answer.status_code in (200, 503), answer.text
    # FORK: it was back when the agent died, and was adopted
    assert answer.headers.get(HEADER_START) in (None, "RESTORE", "COLD", "FORK")
    assert answer.elapsed.total_seconds() < PATIENCE_S
    assert (
        wait_for(lambda: succeeded(platform, "frail/Large.size"), "the function to answer").json()
        == BLOCK
    )
    assert frail.restored("Large.size") == BLOCK
    check_nothing_is_left(frail)


def test_instances_that_were_restored_go_on_while_the_agent_is_killed_and_later_starts_are_restores_too(
    frail: Frozen,
) -> None:
    frail.restored("Small.number", {"word": "one"})
    ids = {i["id"] for i in frail.platform.instances("frail", "Small")}
    pid = frail.kill_agent()
    assert frail.call("Small.number", {"word": "two"}).headers[HEADER_START] == "WARM"
    frail.wait_agent(pid)
    assert (
        wait_for(
            lambda: {i["id"] for i in frail.platform.instances("frail", "Small")},
            "the agent to know them",
        )
        == ids
    )
    assert frail.call("Small.number", {"word": "two"}).headers[HEADER_START] == "WARM"
    assert frail.restored("Small.number", {"word": "two"}) == 2
    check_nothing_is_left(frail)


def succeeded(platform: PlatformUnderTest, function: str) -> httpx.Response | None:
    answer = platform.post(function)
    return answer if answer.status_code == 200 else None


@pytest.mark.soak
def test_restores_and_stops_over_and_over_leave_nothing(frail: Frozen) -> None:
    for _ in range(5):
        frail.restored("Small.number", {"word": "two"})
    check_nothing_is_left(frail)


# -- a full disk -----------------------------------------------------------------------------------
@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A home whose snapshots have a disk of their own, with room for one of 20 MB and not for one
    of 100."""
    root = Path(tempfile.mkdtemp(prefix="pl"))
    root.chmod(0o755)
    disk = root / "h" / "node" / "snapshots"
    disk.mkdir(parents=True)
    for directory in (root / "h", disk.parent):
        directory.chmod(0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=0700", "snapshots", disk],
        check=True,
    )
    try:
        yield root
    finally:
        subprocess.run(["umount", disk], check=True)
        shutil.rmtree(root, ignore_errors=True)


def stop_instances(platform: PlatformUnderTest, function: str) -> None:
    """Stop those that there are, and wait until they are gone: others may follow at once."""
    with platform.client() as client:
        stopped = {
            str(one["id"])
            for one in client.instances(app="frail")
            if one["labels"]["function"] == function
        }
        for instance in stopped:
            client.stop_instance(instance)
        wait_for(
            lambda: stopped.isdisjoint(str(one["id"]) for one in client.instances(app="frail")),
            "the stopped instances to be gone",
        )


def test_with_no_room_for_its_images_deploy_says_so_and_the_function_works_by_fork(
    frail: Frozen,
) -> None:
    with (
        small_disk() as root,
        platform_up(
            platform={"home": str(root / "h"), "run": str(root / "r")},
            snapshotter={"snapshot_max_bytes": 10 * SMALL_DISK_BYTES},
        ) as platform,
    ):
        said = platform.cli("deploy", APP).stdout
        full = Frozen(platform, "frail")
        assert "the disk is full" in said
        assert full.snapshots("Large", state=None) == []
        # a full disk is tried again, in the background
        wait_for(lambda: "staged" not in traces(platform), "nothing is left of the attempts")
        assert len(full.snapshots("Small")) == 1
        assert full.restored("Small.number", {"word": "one"}) == 1
        assert full.call_from_zero("Large.size").headers[HEADER_START] == "COLD"
        for _ in range(ATTEMPTS):  # the autoscaler may bring back what was stopped
            stop_instances(platform, "Large")
            answer = full.call("Large.size")
            if answer.headers[HEADER_START] != "WARM":
                break
        assert (answer.json(), answer.headers[HEADER_START]) == (BLOCK, "FORK")

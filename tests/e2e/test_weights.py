"""Weights through a real platform: pushed, used by name, looked at, checked, pulled, kept, and let
go of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for
from weight_cache.manifest import CHUNK_BYTES

pytestmark = pytest.mark.timeout(240)

APP = """
import hashlib
import pilotlight

app = pilotlight.App("reader")
weights = pilotlight.Weights.named("letters")

@app.function(weights=weights, scaledown_window=1)
def digest(path: str) -> str:
    return hashlib.sha256((weights.path / path).read_bytes()).hexdigest()
"""


def as_json(platform: PlatformUnderTest, *words: str, check: bool = True) -> Any:
    return json.loads(platform.cli("weights", *words, "--json", check=check).stdout)


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, one of more than a chunk."""
    directory = tmp_path_factory.mktemp("models") / "letters"
    (directory / "deep").mkdir(parents=True)
    (directory / "big.bin").write_bytes(os.urandom(1 << 20) * 20)
    (directory / "deep" / "small.txt").write_text("small")
    assert (directory / "big.bin").stat().st_size > CHUNK_BYTES
    return directory


@pytest.fixture(scope="module", name="pushed")
def _pushed(platform: PlatformUnderTest, model: Path) -> PlatformUnderTest:
    """The platform, which has the model under its name."""
    platform.cli("weights", "push", str(model))
    return platform


@pytest.fixture(scope="module", name="reader")
def _reader(
    pushed: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlatformUnderTest]:
    """An app that declares them by name, deployed from a place where the files are not."""
    file = tmp_path_factory.mktemp("elsewhere") / "reader_app.py"
    file.write_text(APP)
    pushed.cli("deploy", str(file), "--no-wait")
    yield pushed
    pushed.cli("app", "delete", "reader", "--yes")


def test_what_was_pushed_is_listed_and_pushing_again_sends_nothing(
    pushed: PlatformUnderTest, model: Path
) -> None:
    (row,) = [row for row in as_json(pushed, "list") if row["name"] == "letters"]
    assert (row["files"], row["size_bytes"], row["source"], row["app"]) == (
        2,
        20 * (1 << 20) + 5,
        str(model),
        None,
    )
    assert as_json(pushed, "push", str(model))["uploaded_bytes"] == 0
    assert "letters" in pushed.cli("weights", "list").stdout
    assert [f["path"] for f in as_json(pushed, "show", "letters")["listing"]] == [
        "big.bin",
        "deep/small.txt",
    ]


def test_a_function_reads_them_by_name_and_the_list_says_that_they_are_on_the_node(
    reader: PlatformUnderTest, model: Path
) -> None:
    import hashlib

    for path in ("big.bin", "deep/small.txt"):
        assert (
            reader.result("reader/digest", {"path": path})
            == hashlib.sha256((model / path).read_bytes()).hexdigest()
        )
    # it was idle for longer than its window, on a busy machine
    while not (info := as_json(reader, "show", "letters"))["instances"]:
        reader.result("reader/digest", {"path": "big.bin"})
    assert info["tier"] in ("nvme", "dram")
    refused = reader.cli("weights", "delete", "letters", "--yes", check=False)
    assert (refused.returncode, "reader/digest" in refused.stderr) == (1, True)


def test_pull_brings_every_byte_back_and_the_second_time_none(
    pushed: PlatformUnderTest, model: Path, tmp_path: Path
) -> None:
    first = as_json(pushed, "pull", "letters", str(tmp_path / "copy"))
    assert first["fetched_bytes"] == first["size_bytes"]
    assert (tmp_path / "copy" / "big.bin").read_bytes() == (model / "big.bin").read_bytes()
    assert as_json(pushed, "pull", "letters", str(tmp_path / "copy"), "--yes")["fetched_bytes"] == 0
    assert as_json(pushed, "pull", first["manifest"], str(tmp_path / "again"))["files"] == 2


def test_prefetch_brings_them_and_verify_finds_what_the_disk_has_damaged(
    pushed: PlatformUnderTest, model: Path
) -> None:
    assert as_json(pushed, "prefetch", "letters")["tier"] in ("nvme", "dram")
    assert as_json(pushed, "verify", "letters") == {
        "name": "letters",
        "is_here": True,
        "corrupt": [],
    }

    manifest = as_json(pushed, "show", "letters")["manifest"]
    stored = next((pushed.local.paths.home / "weights" / "models" / manifest).rglob("small.txt"))
    stored.chmod(0o644)
    stored.write_text("spoil")
    broken = pushed.cli("weights", "verify", "letters", "--json", check=False)
    assert (broken.returncode, json.loads(broken.stdout)["corrupt"]) == (1, ["deep/small.txt"])
    assert as_json(pushed, "prefetch", "letters")["tier"] in ("nvme", "dram")
    assert as_json(pushed, "verify", "letters")["corrupt"] == []


def test_pin_survives_a_restart_of_the_cache_and_unpin_ends_it(pushed: PlatformUnderTest) -> None:
    assert as_json(pushed, "pin", "letters")["is_pinned"] is True
    pid = pushed.kill("weight_cache")
    pushed.wait_restarted("weight_cache", pid)
    wait_for(
        lambda: as_json(pushed, "show", "letters")["tier"] in ("nvme", "dram"),
        "the cache to know it again",
    )
    assert "yes" in pushed.cli("weights", "list").stdout
    assert as_json(pushed, "unpin", "letters")["is_pinned"] is False


def test_a_deploy_enters_what_it_declares_and_a_name_that_is_not_used_can_go(
    pushed: PlatformUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "w.txt").write_text("own weights")
    source = APP.replace('Weights.named("letters")', 'Weights("own")').replace(
        'App("reader")', 'App("owner")'
    )
    (tmp_path / "owner_app.py").write_text(source)
    pushed.cli("deploy", str(tmp_path / "owner_app.py"), "--no-wait")
    (row,) = [row for row in as_json(pushed, "list") if row["name"] == "own"]
    assert (row["app"], row["source"], row["size_bytes"]) == ("owner", "deploy of owner", 11)

    pushed.cli("app", "delete", "owner", "--yes")
    assert as_json(pushed, "delete", "own", "--yes") == {"name": "own", "deleted": True}
    assert "own" not in {row["name"] for row in as_json(pushed, "list")}


def test_an_unknown_name_fails_the_deploy_before_anything_changes(
    pushed: PlatformUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "lost_app.py").write_text(
        APP.replace('"letters"', '"no-such"').replace('App("reader")', 'App("lost")')
    )
    done = pushed.cli("deploy", str(tmp_path / "lost_app.py"), "--no-wait", check=False)
    assert (done.returncode, "no-such" in done.stderr, "Traceback" in done.stderr) == (
        1,
        True,
        False,
    )


def test_another_tenant_sees_none_of_it(pushed: PlatformUnderTest) -> None:
    made = httpx.post(
        f"{pushed.url}/v1/tenants", headers=pushed.headers, json={"name": "stranger"}, timeout=30
    )
    if made.status_code == 403:
        pytest.skip("without root one tenant runs here")
    headers = {"authorization": f"Bearer {made.json()['key']['secret']}"}
    manifest = as_json(pushed, "show", "letters")["manifest"]

    assert httpx.get(f"{pushed.url}/v1/weights", headers=headers, timeout=30).json() == {
        "weights": []
    }
    assert (
        httpx.get(f"{pushed.url}/v1/blobs/{manifest}", headers=headers, timeout=30).status_code
        == 404
    )
    body = {"manifest": manifest}
    assert (
        httpx.put(
            f"{pushed.url}/v1/weights/mine", headers=headers, json=body, timeout=30
        ).status_code
        == 400
    )

"""A real platform whose blobs lie in a bucket: deploys, starts, weights and downloads, with nothing
in its own directory."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up
from tests.fakes import s3_server
from weight_cache.manifest import CHUNK_BYTES

pytestmark = pytest.mark.timeout(240)

APP = """
import hashlib
import os
from pathlib import Path

import pilotlight

app = pilotlight.App("far")
letters = pilotlight.Weights("./letters")

@app.function(weights=letters, scaledown_window=1)
def digests() -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(letters.path.iterdir())}

@app.function(weights=letters)
def told() -> list[str]:
    said = {key for key in os.environ if key.startswith("AWS")}
    for environ in Path("/proc").glob("*/environ"):
        try:
            said |= {text.decode() for text in environ.read_bytes().split(b"\\0") if text.startswith(b"AWS")}
        except OSError:
            pass
    return sorted(said)
"""


@pytest.fixture(scope="module", name="bucket")
def _bucket(s3_address: str) -> Iterator[str]:
    """Found by the platform's processes as it would be by any other: in the environment that they
    are started with."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment(s3_address).items():
            patch.setenv(name, value)
        for name in s3_server.OTHER_VARIABLES:
            patch.delenv(name, raising=False)
        yield s3_server.fresh_bucket(s3_address)


@pytest.fixture(scope="module", name="files")
def _files() -> dict[str, bytes]:
    """One is longer than a chunk."""
    pieces = random.Random(4)
    return {"big.bin": pieces.randbytes(1 << 20) * 17, "small.txt": b"small"}


@pytest.fixture(scope="module", name="platform")
def _platform(
    bucket: str, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlatformUnderTest]:
    """The platform, with the app deployed."""
    folder = tmp_path_factory.mktemp("far")
    (folder / "letters").mkdir()
    for name, content in files.items():
        (folder / "letters" / name).write_bytes(content)
    (folder / "far_app.py").write_text(APP)
    with platform_up(platform={"blobs": f"s3://{bucket}/the/blobs"}) as platform:
        platform.cli("deploy", str(folder / "far_app.py"), "--no-wait")
        yield platform


def test_a_function_runs_with_weights_that_came_from_the_bucket(
    platform: PlatformUnderTest, files: dict[str, bytes]
) -> None:
    assert max(map(len, files.values())) > CHUNK_BYTES
    assert platform.result("far/digests") == {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items()
    }


def test_nothing_lies_in_the_platforms_own_directory(platform: PlatformUnderTest) -> None:
    assert not [path for path in (platform.local.paths.home / "blobs").rglob("*") if path.is_file()]


def test_a_file_of_weights_is_downloaded_in_parts(
    platform: PlatformUnderTest, bucket: str, files: dict[str, bytes]
) -> None:
    import boto3

    client = boto3.client("s3", region_name="us-east-1")
    found = client.list_objects_v2(Bucket=bucket)["Contents"]
    client.close()
    big = files["big.bin"]
    (digest,) = [str(o["Key"]).rpartition("/")[2] for o in found if o["Size"] == len(big)]
    url = f"{platform.url}/v1/blobs/{digest}"
    tail = {**platform.headers, "range": f"bytes={CHUNK_BYTES - 5}-"}
    answer = httpx.get(url, headers=tail, timeout=60)
    assert (answer.status_code, answer.content) == (206, big[CHUNK_BYTES - 5 :])
    assert httpx.get(url, headers=platform.headers, timeout=60).content == big


def test_the_platforms_credentials_do_not_reach_functions(platform: PlatformUnderTest) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root, workers are processes of the same user")
    assert platform.result("far/told") == []


def test_a_backup_says_where_the_blobs_are(
    platform: PlatformUnderTest, bucket: str, tmp_path: Path
) -> None:
    body = json.loads(platform.cli("state", "backup", str(tmp_path / "b.tar"), "--json").stdout)
    assert body["blobs_at"] == f"s3://{bucket}/the/blobs"


def test_the_doctor_finds_the_bucket_in_order(platform: PlatformUnderTest, bucket: str) -> None:
    config = str(platform.local.config)
    findings = {
        f["what"]: f
        for f in json.loads(
            platform.cli("doctor", "--json", "--config", config, check=False).stdout
        )
    }
    assert (findings["blobs"]["state"], bucket in findings["blobs"]["detail"]) == ("ok", True)

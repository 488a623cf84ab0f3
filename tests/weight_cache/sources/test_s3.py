"""Objects below a prefix are listed and read in ranges of the version that was listed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.fakes.s3_server import environment, fresh_bucket, s3_server
from weight_cache.errors import SourceInvalid
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.sources import open_source
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.sources.s3 import S3Source


@pytest.fixture(name="address", scope="module")
def _address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(name="bucket")
def _bucket(address: str) -> str:
    return fresh_bucket(address)


@pytest.fixture(name="client")
def _client(address: str) -> Iterator[Any]:
    client = boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    yield client
    client.close()


def test_a_prefix_is_a_directory(address: str, bucket: str, client: Any, tmp_path: Path) -> None:
    files = {"a.bin": os.urandom(CHUNK_BYTES + 7), "sub/b": b"b", "empty": b""}
    (tmp_path / "sub").mkdir()
    for path, content in files.items():
        client.put_object(Bucket=bucket, Key=f"models/m/{path}", Body=content)
        (tmp_path / path).write_bytes(content)
    for key in ("models/m/sub/", "models/m2/other"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    source = open_source(f"s3://{bucket}/models/m", environ=environment(address))

    listed = source.files()

    assert [(f.path, f.size_bytes) for f in listed] == [
        ("a.bin", CHUNK_BYTES + 7),
        ("empty", 0),
        ("sub/b", 1),
    ]
    assert build_manifest(source, files=listed) == build_manifest(tmp_path)
    assert source.name == f"s3://{bucket}/models/m"
    source.close()


def test_one_object_and_a_whole_bucket_are_sources_too(
    address: str, bucket: str, client: Any
) -> None:
    client.put_object(Bucket=bucket, Key="deep/model.gguf", Body=b"0123456789")
    one = open_source(f"s3://{bucket}/deep/model.gguf", environ=environment(address))
    whole = open_source(f"s3://{bucket}", environ=environment(address))

    (file,), (same,) = one.files(), whole.files()

    assert (file.path, same.path) == ("model.gguf", "deep/model.gguf")
    assert (one.read(file, 2, 3), whole.read(same, 5, 5), one.read(file, 0, 0)) == (
        b"234",
        b"56789",
        b"",
    )
    one.close()
    whole.close()


def test_a_replaced_object_is_refused(address: str, bucket: str, client: Any) -> None:
    client.put_object(Bucket=bucket, Key="m/a", Body=b"old")
    source = open_source(f"s3://{bucket}/m", environ=environment(address))
    (file,) = source.files()
    client.put_object(Bucket=bucket, Key="m/a", Body=b"new!")

    with pytest.raises(SourceInvalid, match="changed while it was read"):
        source.read(file, 0, 3)
    source.close()


def test_what_is_not_there_is_told(address: str, bucket: str) -> None:
    for where, said in (
        (f"s3://{bucket}/nothing", "no object with that name"),
        ("s3://no-such-bucket/x", "bucket does not exist"),
    ):
        source = open_source(where, environ=environment(address))
        with pytest.raises(SourceInvalid, match=said):
            source.files()
        source.close()
    empty = open_source(f"s3://{bucket}", environ=environment(address))
    with pytest.raises(SourceInvalid, match="contains no files"):
        empty.files()
    empty.close()
    with pytest.raises(SourceInvalid, match="has no bucket"):
        open_source("s3:///x")


def test_a_store_that_is_away_is_asked_again_and_told() -> None:
    pauses: list[float] = []
    source = S3Source(
        bucket="b",
        prefix="p",
        given={**environment("http://127.0.0.1:1"), "AWS_REGION": "eu-central-1"},
        pause=pauses.append,
    )
    with pytest.raises(SourceInvalid, match="no valid response"):
        source.files()
    assert len(pauses) == 4
    source.close()

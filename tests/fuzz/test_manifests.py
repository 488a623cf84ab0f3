"""What names files and memory: manifests of weights and of snapshots, headers of safetensors files.
Inputs are JSON, or almost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import PurePosixPath

from hypothesis import strategies as st

from snapshotter.snapshots.manifest import (
    SnapshotInvalid,
    canonical,
    checked_manifest,
    parse,
    sealed,
)
from tests.fuzz.fuzzing import Fuzzer, json_mutated, mutated, seeds
from tests.snapshotter.snapshots.shapes import KEY
from weight_cache import manifest
from weight_cache.errors import ManifestInvalid, TensorsInvalid
from weight_cache.tensors.header import Header

BOUND_S = 5.0
_JSON = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\ud800",
    b"\xff",
    b"1e999",
    b"-0",
    b"NaN",
    b"9" * 5000,
    b"[" * 990,
    b" ",
    b"null",
    b'"a":1,',
)
DATA_BYTES = 64
"""Of a safetensors file, behind its header."""


def check_weights(data: bytes) -> None:
    """A manifest is read and written back as it was, all its paths below its directory; or it is
    refused by its own error."""
    began = time.monotonic()
    try:
        read = manifest.parse(data)
    except ManifestInvalid as e:
        str(e).encode()
    else:
        assert read.to_bytes() == data
        for file in read.files:
            path = PurePosixPath(file.path)
            assert not path.is_absolute()
            assert ".." not in path.parts
            assert sum(chunk.length_bytes for chunk in file.chunks()) == file.size_bytes
            assert all(t.offset_bytes + t.length_bytes <= file.size_bytes for t in file.tensors)
    assert time.monotonic() - began < BOUND_S


def check_snapshot(data: bytes) -> None:
    """What was signed and what was not: a manifest, or SnapshotInvalid."""
    attempts: list[Callable[[], object]] = [lambda: parse(data, KEY)]
    try:
        body = json.loads(data)
        signed = sealed(body, KEY) if isinstance(body, dict) else canonical({})
    except (ValueError, RecursionError):
        pass
    else:
        attempts.append(lambda: parse(signed, KEY))
        if isinstance(body, dict):
            attempts.append(lambda: checked_manifest(body))
            body["id"] = _own_id(body)
            attempts.append(lambda: checked_manifest(body))
    for attempt in attempts:
        try:
            attempt()
        except SnapshotInvalid as e:
            str(e).encode("utf-8", "surrogatepass")


def _own_id(body: dict[str, object]) -> object:
    """The id that its content has, so that more than the id is looked at."""
    try:
        checked_manifest(body)
    except SnapshotInvalid as e:
        return str(e).rpartition(" ")[2]
    return body["id"]


def check_tensors(data: bytes) -> None:
    """Tensors lie side by side in the file; or TensorsInvalid, or no such tensor."""
    file = len(data).to_bytes(8, "little") + data + bytes(DATA_BYTES)
    began = time.monotonic()
    try:
        header = Header(file, file_bytes=len(file))
        for name in ("a", "__metadata__", "é", "\ud800", 'x":{'):
            if name in header:
                assert header[name].offset_bytes >= header.begin_bytes
        tensors = header.tensors()
    except (TensorsInvalid, KeyError) as e:
        str(e).encode("utf-8", "surrogatepass")
    else:
        assert sum(t.length_bytes for t in tensors) == DATA_BYTES
        assert all(header[t.name] == t for t in tensors)
    assert time.monotonic() - began < BOUND_S


def test_corpus_of_weights(seed_of_weights_manifest: bytes) -> None:
    check_weights(seed_of_weights_manifest)


def test_corpus_of_snapshots(seed_of_snapshot_manifest: bytes) -> None:
    check_snapshot(seed_of_snapshot_manifest)


def test_corpus_of_tensors(seed_of_safetensors: bytes) -> None:
    check_tensors(seed_of_safetensors)


def _inputs(target: str) -> st.SearchStrategy[bytes]:
    return json_mutated(_documents(target)) | mutated(seeds(target), _JSON)


def _documents(target: str) -> list[bytes]:
    """Those seeds that are JSON."""
    found = []
    for seed in seeds(target):
        try:
            json.loads(seed)
        except (ValueError, RecursionError):
            continue
        found.append(seed)
    return found


def test_manifests_of_weights(fuzzer: Fuzzer) -> None:
    fuzzer.run("weights_manifest", _inputs("weights_manifest"), check_weights)


def test_manifests_of_snapshots(fuzzer: Fuzzer) -> None:
    fuzzer.run("snapshot_manifest", _inputs("snapshot_manifest"), check_snapshot)


def test_headers_of_safetensors(fuzzer: Fuzzer) -> None:
    fuzzer.run("safetensors", _inputs("safetensors"), check_tensors)

"""Signed with the platform's key, canonical, and nothing else is read."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.durability import write_durably
from snapshotter.snapshots import memory_report
from snapshotter.snapshots.manifest import (
    MAX_MANIFEST_BYTES,
    SnapshotInvalid,
    SnapshotManifest,
    SnapshotsOff,
    canonical,
    parse,
    sealed,
    signing_key,
)
from tests.snapshotter.snapshots.shapes import KEY, draft, mark, proof

FILES = {"images/pages-1.img": mark("a"), "images/core-1.img": mark("b"), "files.tar": mark("c")}


def full(**changes: Any) -> SnapshotManifest:
    return draft(
        stdio={"stdout": "pipe:[1]", "stderr": "pipe:[2]"},
        mapped={"/usr/lib/libc.so": mark("d")},
        **changes,
    ).completed(FILES)


def test_read_back_as_it_was_written() -> None:
    manifest = replace(full(), proof=proof(), pages="lazy", phases_ms={"dump": 80.0})
    assert parse(sealed(manifest.to_json(), KEY), KEY) == manifest
    assert manifest.image_bytes == 15


def test_the_id_follows_from_the_content_and_not_from_the_proof() -> None:
    one = full()
    assert (
        replace(one, proof=proof(), pages="lazy", phases_ms={"prove": 1.0}).content_id() == one.id
    )
    assert replace(one, created_at=2.0).content_id() != one.id
    assert full(cold_ms=1.0).id != one.id


def test_every_flipped_byte_is_found() -> None:
    data = sealed(full().to_json(), KEY)
    for position in range(0, len(data), 7):
        for bit in (1, 0x20):
            altered = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            with pytest.raises(SnapshotInvalid):
                parse(altered, KEY)


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a":NaN}', "not canonical"),
        (b"{}", "signature"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "more than"),
    ],
)
def test_nonsense_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(SnapshotInvalid, match=reason):
        parse(data, KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../up": mark().to_json()}},
        {"files": {"images/../../up": mark().to_json()}},
        {"files": {"/etc/passwd": mark().to_json()}},
        {"files": {"images/.hidden": mark().to_json()}},
        {"files": {"files.tar": {"bytes": -1, "sha256": "a" * 64}}},
        {"files": {"files.tar": {"bytes": True, "sha256": "a" * 64}}},
        {"files": {"files.tar": {"bytes": 1, "sha256": "A" * 64}}},
        {"files": {"files.tar": {"bytes": 1}}},
        {"files": []},
        {"pages": "eventually"},
        {"identity": {}},
        {"unknown": 1},
        {"id": "sn-0000000000000000"},
    ],
)
def test_even_signed_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SnapshotInvalid):
        parse(sealed({**full().to_json(), **change}, KEY), KEY)


def test_the_same_value_is_always_written_the_same() -> None:
    assert canonical({"b": 1, "a": {"d": 0.1, "c": "ü"}}) == b'{"a":{"c":"\\u00fc","d":0.1},"b":1}'


def test_the_key_follows_from_the_platforms(tmp_path: Path) -> None:
    path = tmp_path / "platform.key"
    path.write_bytes(base64.urlsafe_b64encode(b"\xfb" * 32) + b"\n")
    key = signing_key(tmp_path)
    assert len(key) == 32
    assert key != b"\xfb" * 32
    path.write_bytes(base64.urlsafe_b64encode(b"2" * 32))
    assert signing_key(tmp_path) != key


@pytest.mark.parametrize(
    "content", [None, b"", b"short", b"!" * 44, base64.urlsafe_b64encode(b"1" * 31)]
)
def test_without_a_key_snapshots_are_off_with_the_reason(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "platform.key").write_bytes(content)
    with pytest.raises(SnapshotsOff, match=r"platform\.key .*sign snapshots"):
        signing_key(tmp_path)
    assert len(list(tmp_path.iterdir())) == (content is not None)


def test_a_durable_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"one")
    write_durably(tmp_path / "a", b"two")
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "nowhere" / "a", b"")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"two")]
    assert json.loads(sealed({}, KEY)).keys() == {"signature"}


SMAPS = """\
55d0c0000000-55d0c1000000 rw-p 00000000 00:00 0                          [heap]
Anonymous:          20000 kB
Private_Dirty:      20000 kB
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
Anonymous:         262144 kB
Swap:                1024 kB
7f0020000000-7f0020001000 rw-p 00000000 00:00 0
Anonymous:              4 kB
7f0030000000-7f0030100000 r-xp 00001000 08:01 77                         /usr/lib/libc.so.6
Anonymous:           2048 kB
7f0040000000-7f0041000000 rw-s 00000000 00:19 5                          /dev/shm/psm_1
Shared_Dirty:        4096 kB
7f0050000000-7f0060000000 r--s 00000000 08:01 78                         /run/pilotlight/slot/weights/m/model.safetensors
Anonymous:              0 kB
Shared_Clean:      262144 kB
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
Anonymous:             40 kB
"""


def test_memory_is_counted_by_cause() -> None:
    assert memory_report.causes(SMAPS) == {
        memory_report.ALLOCATOR: 20000 * 1024,
        memory_report.LARGE: 263168 * 1024,
        memory_report.STACKS: 44 * 1024,
        memory_report.LIBRARIES: 2048 * 1024,
        memory_report.SHARED: 4096 * 1024,
    }


WEIGHTS = """\
7f0000000000-7f0010000000 r--p 00000000 00:2c 17 /run/pilotlight/slot/weights/layers/model.safetensors
Size:             262144 kB
Anonymous:             0 kB
7f0020000000-7f0020100000 r--p 10000000 00:2c 17 /run/pilotlight/slot/weights/layers/model.safetensors
Size:               1024 kB
7f0030000000-7f0030100000 r--p 00000000 00:2c 18 /usr/lib/libc.so.6
Size:               1024 kB
"""


def test_weights_that_are_mapped_are_counted_once_however_many_processes_map_them() -> None:
    prefix = "/run/pilotlight/slot/weights/"
    assert (
        memory_report.mapped_bytes(WEIGHTS + SMAPS, prefix)
        == memory_report.mapped_bytes(WEIGHTS + WEIGHTS, prefix)
        == 263168 * 1024
    )
    assert memory_report.mapped_bytes(SMAPS, prefix) == 0


def test_weights_of_which_nothing_is_mapped_were_copied_and_are_named() -> None:
    manifest = draft(heap_bytes=memory_report.causes(SMAPS))
    first, second = memory_report.describe(manifest, has_weights=True)
    assert first.startswith(
        "the image carries 296 MB of memory: 269 MB large regions, 20 MB malloc heap"
    )
    assert second.startswith("no weights are mapped from their files")
    assert memory_report.describe(manifest, has_weights=True, is_engine=True)[1].startswith(
        "the engine copied its weights"
    )


def test_weights_by_reference_are_named_and_nothing_is_said_of_little() -> None:
    manifest = draft(heap_bytes=memory_report.causes(SMAPS), weights_bytes=4_000_000_000)
    assert (
        memory_report.describe(manifest, has_weights=True)[1]
        == "4,000 MB of weights are not in it: they are mapped from their files"
    )
    assert (
        len(
            memory_report.describe(draft(heap_bytes=memory_report.causes(SMAPS)), has_weights=False)
        )
        == 1
    )
    assert memory_report.describe(draft(), has_weights=True) == []


def test_a_proof_with_invalid_parts_of_files_is_refused() -> None:
    body = replace(full(), proof=proof()).to_json()
    body["proof"] |= {"file_parts": base64.b64encode(b"nonsense").decode()}
    with pytest.raises(SnapshotInvalid, match="parts of files"):
        parse(sealed(body, KEY), KEY)

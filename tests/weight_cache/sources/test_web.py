"""Files on the web are read in ranges of one version; what a server cannot do is done without, or
said."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.faulty_objects import Fault, Kind, faulty_objects
from tests.fakes.web_files import RESET, SHORT, Served, WebFiles
from weight_cache.errors import ManifestInvalid, SourceInvalid
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.sources import open_source
from weight_cache.sources.http_client import RangeClient
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.sources.source import SourceFile
from weight_cache.sources.web import WebSource

TAG = '"v1"'
PATIENCE_S = 30.0


@pytest.fixture(name="server")
def _server() -> Iterator[WebFiles]:
    with WebFiles() as server:
        yield server


class Pauses:
    """A pause that does not last; `taken` has the seconds asked for."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


@pytest.fixture(name="pauses")
def _pauses() -> Pauses:
    return Pauses()


@pytest.fixture(name="web")
def _web(pauses: Pauses) -> RangeClient:
    return RangeClient(pause=pauses, timeout_s=PATIENCE_S)


def opened(server: WebFiles, web: RangeClient, *paths: str) -> tuple[WebSource, list[SourceFile]]:
    source = WebSource([server.url + path for path in paths], web=web)
    try:
        return source, source.files()
    except SourceInvalid:
        source.close()
        raise


def test_ranges_are_asked_for_of_the_version_that_was_seen(
    server: WebFiles, web: RangeClient
) -> None:
    server.files["/m/model.bin"] = Served(content=b"0123456789", etag=TAG)
    source, (file,) = opened(server, web, "/m/model.bin")

    assert (file.path, file.size_bytes, file.version, file.is_lasting, file.is_ranged) == (
        "model.bin",
        10,
        TAG,
        True,
        True,
    )
    assert source.read(file, 2, 3) == b"234"
    assert server.seen[-1].headers["range"] == "bytes=2-4"
    assert server.seen[-1].headers["if-match"] == TAG
    source.close()


@pytest.mark.parametrize("knows_conditions", [True, False])
@pytest.mark.parametrize("is_ranged", [True, False])
@pytest.mark.parametrize(
    "tags", [({"etag": TAG}, {"etag": '"v2"'}), ({"modified": "Mon"}, {"modified": "Tue"})]
)
def test_a_replaced_file_is_refused(
    server: WebFiles,
    web: RangeClient,
    tags: tuple[dict[str, str], dict[str, str]],
    *,
    is_ranged: bool,
    knows_conditions: bool,
) -> None:
    server.files["/a"] = Served(content=b"old", is_ranged=is_ranged, **tags[0])  # type: ignore[arg-type]
    source, (file,) = opened(server, web, "/a")
    server.files["/a"] = Served(
        content=b"new",
        is_ranged=is_ranged,
        knows_conditions=knows_conditions,
        **tags[1],  # type: ignore[arg-type]
    )

    with pytest.raises(SourceInvalid, match="changed while it was read"):
        source.read(file, 0, 3)
    source.close()


def test_weak_tags_and_signed_addresses_do_not_last(server: WebFiles, web: RangeClient) -> None:
    server.files["/weak"] = Served(content=b"x", etag='W/"v1"')
    server.files["/signed"] = Served(content=b"x", etag=TAG)
    source, files = opened(server, web, "/weak", "/signed?key=secret")

    assert [(f.path, f.version, f.is_lasting) for f in files] == [
        ("signed", TAG, False),
        ("weak", "", False),
    ]
    assert "secret" not in source.name
    assert source.read(files[1], 0, 1) == b"x"
    source.close()


def test_a_server_without_ranges_is_read_from_begin_to_end(
    server: WebFiles, web: RangeClient, tmp_path: Path
) -> None:
    content = os.urandom(CHUNK_BYTES + 10)
    (tmp_path / "big").write_bytes(content)
    (tmp_path / "empty").touch()
    server.files |= {
        "/big": Served(content=content, is_ranged=False),
        "/empty": Served(content=b"", is_ranged=False),
    }
    source, files = opened(server, web, "/big", "/empty")

    manifest = build_manifest(source, files=files)

    assert manifest == build_manifest(tmp_path)
    assert len(server.seen) == 3
    assert source.read(files[0], 5, 5) == content[5:10]
    assert source.read(files[0], 10, 2) == content[10:12]
    assert len(server.seen) == 4
    source.close()


def test_what_passes_is_asked_for_again(server: WebFiles, web: RangeClient, pauses: Pauses) -> None:
    server.files["/a"] = Served(content=b"0123456789", etag=TAG)
    source, (file,) = opened(server, web, "/a")
    server.faults.extend([500, RESET, SHORT, 503])

    assert source.read(file, 0, 10) == b"0123456789"
    assert len(pauses.taken) == 4
    assert all(taken <= 0.5 * 2**i for i, taken in enumerate(pauses.taken))
    server.faults.append(429)
    source.read(file, 0, 1)
    assert pauses.taken[-1] == 7.0
    source.close()


@pytest.mark.parametrize("kind", ["silent", "stalled", "slow", "cut", "short"])
def test_a_server_that_is_silent_slow_or_stops_is_asked_again(pauses: Pauses, kind: Kind) -> None:
    content = os.urandom(100_000)
    with faulty_objects() as server:

        def pause(seconds: float) -> None:
            pauses(seconds)
            while server.count("GET") < 2:  # until the request that was given up has met the fault
                time.sleep(0.001)
            web._http.timeout = PATIENCE_S

        server.objects["a"] = content
        web = RangeClient(pause=pause, timeout_s=PATIENCE_S)
        source = WebSource([server.url("a")], web=web)
        (file,) = source.files()
        server.fail(Fault(kind=kind))
        if kind in ("silent", "stalled"):
            web._http.timeout = 0.1
        assert source.read(file, 10, 90_000) == content[10:90_010]
        source.close()
    assert len(pauses.taken) == (0 if kind == "slow" else 1)


def test_a_stream_that_breaks_off_is_begun_again(server: WebFiles, web: RangeClient) -> None:
    server.files["/a"] = Served(content=b"0123456789", is_ranged=False)
    source, (file,) = opened(server, web, "/a")
    assert source.read(file, 0, 2) == b"01"
    server.faults.append(SHORT)
    assert source.read(file, 4, 6) == b"456789"
    source.close()


def test_a_storm_that_does_not_pass_is_told(server: WebFiles, web: RangeClient) -> None:
    server.files["/a"] = Served(content=b"x")
    server.faults.extend([503] * 5)
    with pytest.raises(SourceInvalid, match="temporarily unavailable"):
        opened(server, web, "/a")
    assert len(server.seen) == 5


@pytest.mark.parametrize(
    "status, said",
    [
        (401, "secret="),
        (403, "secret="),
        (404, "not found"),
        (410, "not found"),
        (400, "refused"),
    ],
)
def test_a_refusal_is_told_at_once(
    server: WebFiles, web: RangeClient, status: int, said: str
) -> None:
    server.faults.append(status)
    with pytest.raises(SourceInvalid, match=said):
        opened(server, web, "/a")
    assert len(server.seen) == 1


def test_what_cannot_be_read_by_length_is_refused(server: WebFiles, web: RangeClient) -> None:
    server.files["/long"] = Served(content=b"x", is_ranged=False, has_length=False)
    server.files["/packed"] = Served(content=b"x", encoding="gzip")
    with pytest.raises(SourceInvalid, match="does not send the file's length"):
        opened(server, RangeClient(), "/long")
    with pytest.raises(SourceInvalid, match="encodes"):
        opened(server, web, "/packed")


def test_addresses_that_name_no_file_or_the_same_are_refused() -> None:
    with pytest.raises(SourceInvalid, match="names no file"):
        open_source("https://host/folder/")
    with pytest.raises(SourceInvalid, match="same last part"):
        open_source(["https://host/a/x", "https://host/b/x?key=1"])
    with pytest.raises(SourceInvalid, match="one per file"):
        open_source(["s3://bucket/a"])
    with pytest.raises(SourceInvalid, match="one per file"):
        open_source([])


def test_a_token_is_sent_but_not_to_another_host(server: WebFiles) -> None:
    server.token = "t0ken"
    with WebFiles() as other:
        other.files["/real"] = Served(content=b"x", etag=TAG)
        server.redirects["/a"] = f"{other.url}/real".replace("127.0.0.1", "localhost")
        source = open_source(f"{server.url}/a", token="t0ken")
        (file,) = source.files()
        assert (file.path, source.read(file, 0, 1)) == ("a", b"x")
        assert all("authorization" not in seen.headers for seen in other.seen)
        source.close()


def test_nobody_at_home_is_told(web: RangeClient, pauses: Pauses) -> None:
    source = WebSource(["http://127.0.0.1:1/a"], web=web)
    with pytest.raises(SourceInvalid, match="no valid response"):
        source.files()
    assert len(pauses.taken) == 4
    source.close()


@pytest.mark.parametrize("token", ["sekret\nvalue", "sekret value", "sekr\u00e9t"])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(SourceInvalid, match="invalid characters") as refused:
        open_source("https://example.org/model.bin", token=token)
    assert "sek" not in str(refused.value)


def test_a_token_from_a_file_may_end_with_a_line(server: WebFiles) -> None:
    server.files["/a"] = Served(content=b"x", etag=TAG)
    server.token = "t0ken"
    source = open_source(server.url + "/a", token="t0ken\n")
    (file,) = source.files()
    assert source.read(file, 0, 1) == b"x"
    source.close()


@pytest.mark.parametrize("address", ["http://user:sekret@[::1/a", "https://user:sekret@/"])
def test_what_is_no_address_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(SourceInvalid) as refused:
        open_source(address)
    assert "sekret" not in str(refused.value)


@dataclass(frozen=True)
class Boundless:
    """A source that tells of a file longer than any, and must not be read."""

    name: str = "http://example.org"
    reads_at_once: int = 1

    def files(self) -> list[SourceFile]:
        return [SourceFile(path="a", size_bytes=10**18, version="1")]

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        raise AssertionError("read")

    def close(self) -> None:
        pass


def test_no_work_is_planned_for_lengths_that_a_server_makes_up() -> None:
    with pytest.raises(ManifestInvalid, match="more than a manifest can describe"):
        build_manifest(Boundless())

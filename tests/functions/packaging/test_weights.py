"""Models go from their source to the platform: hashed once, sent once, and only what is missing."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.client.client import Client
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from pilotlight.packaging.deploy import deploy
from pilotlight.packaging.progress import ProgressEvent
from pilotlight.packaging.weights_push import prepare_weights, push_weights, upload_blobs
from tests.fakes.fake_platform import FakePlatform
from tests.fakes.web_files import Served, WebFiles
from weight_cache.errors import SourceInvalid
from weight_cache.manifest import CHUNK_BYTES, FileHash, parse
from weight_cache.sources import SourceFile


@pytest.fixture(name="server")
def _server() -> Iterator[WebFiles]:
    with WebFiles() as server:
        yield server


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/big").write_bytes(os.urandom(2 * CHUNK_BYTES + 3))
    (tmp_path / "model/small").write_bytes(b"small")
    (tmp_path / "model/same").write_bytes(b"small")
    (tmp_path / "model/empty").touch()
    return tmp_path / "model"


class Memory:
    """A source in memory whose first read waits for nobody; `broken` makes reads of that path
    fail."""

    name = "memory"
    reads_at_once = 4

    def __init__(self, content: dict[str, bytes], *, broken: str = "") -> None:
        self.content = content
        self.broken = broken
        self.reads = 0
        self.is_closed = False
        self._lock = threading.Lock()

    def files(self) -> list[SourceFile]:
        return [
            SourceFile(path=path, size_bytes=len(c), version="1")
            for path, c in sorted(self.content.items())
        ]

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        with self._lock:
            self.reads += 1
        if file.path == self.broken:
            raise SourceInvalid(f"{file.path} is gone")
        return self.content[file.path][offset_bytes : offset_bytes + length_bytes]

    def close(self) -> None:
        self.is_closed = True


def uploads(platform: FakePlatform) -> list[str]:
    return [line.rpartition("/")[2] for line in platform.asked if line.startswith("PUT /v1/blobs")]


def test_a_pushed_model_is_whole_and_sent_once(
    platform: FakePlatform, client: Client, model: Path
) -> None:
    events: list[ProgressEvent] = []

    first = push_weights(client, model, name="m", progress=events.append)
    sent = uploads(platform)
    second = push_weights(client, str(model), name="m")

    manifest = parse(platform.blobs[first.manifest])
    assert {f.path: platform.blobs[f.digest] for f in manifest.files} == {
        p.name: p.read_bytes() for p in model.iterdir()
    }
    assert (first.size_bytes, first.files) == (2 * CHUNK_BYTES + 13, 4)
    assert first.uploaded_bytes == 2 * CHUNK_BYTES + 8 + len(platform.blobs[first.manifest])
    assert len(sent) == 4
    assert sent[-1] == first.manifest
    assert uploads(platform) == sent
    assert second == replace(first, uploaded_bytes=0)
    for stage, total in (("package", first.size_bytes), ("upload", first.uploaded_bytes)):
        told = [e for e in events if e.stage == stage]
        assert {e.total_bytes for e in told} == {total}
        assert [e.done_bytes for e in told] == sorted(e.done_bytes for e in told)
        assert told[-1].done_bytes == total


def test_an_upload_that_is_tried_again_begins_at_the_begin(
    platform: FakePlatform, client: Client
) -> None:
    source = Memory({"a": os.urandom(CHUNK_BYTES + 5)})
    model = prepare_weights(source, name="m")
    digest = next(iter(model.blobs))
    events: list[ProgressEvent] = []
    assert client.has_blob(digest) is False
    platform.refuse(None)

    client.put_blob(digest, model.blobs[digest], chunked=True)

    assert platform.blobs[digest] == source.content["a"]
    assert upload_blobs(client, {digest: model.blobs[digest]}, report=events.append) == 0
    assert events == []


def test_one_failed_upload_ends_the_push(platform: FakePlatform, client: Client) -> None:
    source = Memory({name: os.urandom(CHUNK_BYTES + 1) for name in "abcd"})
    model = prepare_weights(source, name="m")
    source.broken = "b"

    with pytest.raises(InvalidInput, match="b is gone"):
        upload_blobs(client, model.blobs)

    assert model.digest not in platform.blobs


def test_a_file_that_is_not_what_was_hashed_is_refused_and_hashed_anew(
    platform: FakePlatform, client: Client
) -> None:
    source = Memory({"a": b"x" * (CHUNK_BYTES + 1)})
    stale = prepare_weights(source, name="m")
    source.content["a"] = b"y" * (CHUNK_BYTES + 1)
    # kept: the source says that nothing changed
    assert prepare_weights(source, name="m").digest == stale.digest

    with pytest.raises(InvalidInput, match="deploy or push again"):
        upload_blobs(client, stale.blobs)

    fresh = prepare_weights(source, name="m")
    assert fresh.digest != stale.digest
    assert upload_blobs(client, fresh.blobs) == sum(
        f.size_bytes for f in fresh.manifest.files
    ) + len(fresh.manifest.to_bytes())


def test_an_unchanged_source_is_not_read_again(client: Client) -> None:
    source = Memory({"a": os.urandom(CHUNK_BYTES + 1)})
    first = prepare_weights(source, name="m")
    reads = source.reads
    assert prepare_weights(source, name="m").digest == first.digest
    assert source.reads == reads


def test_files_on_the_web_are_pushed_without_a_copy_here(
    platform: FakePlatform, client: Client, server: WebFiles, tmp_path: Path
) -> None:
    server.token = "t0ken"
    server.files = {
        "/m/a": Served(content=b"aaa", etag='"1"'),
        "/m/b": Served(content=b"bb", is_ranged=False),
    }

    pushed = push_weights(
        client, [f"{server.url}/m/a", f"{server.url}/m/b"], name="m", token="t0ken"
    )

    assert {
        f.path: platform.blobs[f.digest] for f in parse(platform.blobs[pushed.manifest]).files
    } == {"a": b"aaa", "b": b"bb"}


@pytest.mark.parametrize(
    "source, said",
    [
        ("/nowhere/at/all", "not a directory"),
        ("s3://", "has no bucket"),
        ("https://host/", "names no file"),
    ],
)
def test_a_source_that_cannot_be_read_says_why(client: Client, source: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=f"weights 'm': .*{said}"):
        push_weights(client, source, name="m")


def app_with(tmp_path: Path, weights: str) -> Path:
    file = tmp_path / f"app_{hashlib.sha256(weights.encode()).hexdigest()[:8]}.py"
    body = "@app.function(weights=model)\ndef price(n: int) -> int: ...\n"
    file.write_text(f"import pilotlight\napp = pilotlight.App('shop')\nmodel = {weights}\n\n{body}")
    return file


@pytest.fixture(autouse=True)
def _forget_modules(tmp_path: Path) -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_an_app_with_weights_on_the_web_is_deployed(
    platform: FakePlatform, client: Client, server: WebFiles, tmp_path: Path
) -> None:
    server.token = "t0ken"
    server.files["/minilm.gguf"] = Served(content=b"weights", etag='"1"')
    secret = "pilotlight.Secret.from_dict({'TOKEN': 't0ken'})"
    file = app_with(
        tmp_path, f"pilotlight.Weights('{server.url}/minilm.gguf', name='minilm', secret={secret})"
    )

    deploy(load_app(str(file)), client=client)
    reads = len(server.seen)
    deploy(load_app(str(file)), client=client)

    (spec,) = platform.function("shop", "price").weights
    (stored,) = parse(platform.blobs[spec.manifest]).files
    assert (spec.name, stored.path, platform.blobs[stored.digest]) == (
        "minilm",
        "minilm.gguf",
        b"weights",
    )
    assert len(server.seen) == reads + 1  # to see that nothing changed


def test_an_app_may_want_some_files_of_a_directory_and_all_of_it(
    tmp_path: Path, model: Path
) -> None:
    some = app_with(
        tmp_path,
        f"[pilotlight.Weights({str(model)!r}, name='s', include='small'), "
        f"pilotlight.Weights({str(model)!r}, name='a')]",
    )

    with build(load_app(str(some))) as built:
        manifests = [built.blobs[w.manifest] for w in built.functions[0].weights]

    assert [[f.path for f in parse(m).files] for m in manifests if isinstance(m, bytes)] == [
        ["small"],
        ["big", "empty", "same", "small"],
    ]


def test_weights_by_name_are_looked_up_on_the_platform(tmp_path: Path) -> None:
    app = load_app(str(app_with(tmp_path, "pilotlight.Weights.named('minilm', mount='model')")))

    with build(app, named={"minilm": "1" * 64}.__getitem__) as built:
        (weights,) = built.functions[0].weights

    assert (weights.name, weights.manifest) == ("model", "1" * 64)
    with pytest.raises(InvalidInput, match="on the platform"):
        build(app)


def test_a_build_that_fails_closes_what_it_opened(tmp_path: Path, server: WebFiles) -> None:
    file = app_with(tmp_path, f"pilotlight.Weights('{server.url}/none')")
    with pytest.raises(InvalidInput, match="not found"):
        build(load_app(str(file)))


def test_a_secret_of_the_platform_cannot_be_read_here(tmp_path: Path) -> None:
    file = app_with(
        tmp_path, "pilotlight.Weights('hf://org/name', secret=pilotlight.Secret.from_name('hub'))"
    )
    with pytest.raises(InvalidInput, match="weights are read on this machine"):
        build(load_app(str(file)))


def test_a_missing_directory_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no directory at"):
        build(load_app(str(app_with(tmp_path, "pilotlight.Weights('./gone')"))))


def test_a_digest_of_the_body_is_that_of_its_chunks(model: Path) -> None:
    from weight_cache.sources import open_source

    source = open_source(model)
    for digest, blob in prepare_weights(source, name="m").blobs.items():
        whole = hashlib.sha256() if isinstance(blob, bytes) else FileHash()
        for piece in [blob] if isinstance(blob, bytes) else blob:
            whole.update(piece)
        assert whole.hexdigest() == digest

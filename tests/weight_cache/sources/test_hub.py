"""A repository of the hub is pinned to a commit, listed by the hub's own library, and read in
ranges from where it points."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fakes.ports import free_port
from tests.fakes.web_files import Served, WebFiles
from weight_cache.errors import SourceInvalid
from weight_cache.sources import open_source
from weight_cache.sources.http_client import RangeClient
from weight_cache.sources.hub import HubSource
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.sources.retries import TransientSourceError
from weight_cache.sources.source import Source

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "onnx/model.onnx": b"0123456789", ".gitattributes": b"*"}


@pytest.fixture(name="servers")
def _servers() -> Iterator[tuple[WebFiles, WebFiles]]:
    """The hub, and the host that has the large files."""
    with WebFiles() as hub, WebFiles() as files:
        tree = [{"type": "directory", "oid": "d" * 40, "size": 0, "path": "onnx"}]
        for path, content in FILES.items():
            entry = {"type": "file", "oid": "b" * 40, "size": len(content), "path": path}
            if path.endswith(".onnx"):
                entry["lfs"] = {"oid": "a" * 64, "size": len(content), "pointerSize": 100}
            tree.append(entry)
            files.files[f"/large/{path}"] = Served(
                content=content, is_ranged=path.endswith(".onnx")
            )
            hub.redirects[f"/org/name/resolve/{COMMIT}/{path}"] = (
                f"{files.url}/large/{path}".replace("127.0.0.1", "localhost")
            )
        hub.files["/api/models/org/name/revision/v1"] = said(
            {"id": "org/name", "sha": COMMIT, "siblings": []}
        )
        hub.files["/api/models/org/name"] = said({"id": "org/name", "sha": COMMIT, "siblings": []})
        hub.files[f"/api/models/org/name/tree/{COMMIT}"] = said(tree)
        yield hub, files


def said(body: object) -> Served:
    return Served(content=json.dumps(body).encode(), is_ranged=False)


def at(hub: WebFiles, address: str) -> Source:
    return open_source(address, token="t0ken", environ={"HF_ENDPOINT": hub.url})


@pytest.mark.parametrize("address", ["hf://org/name@v1", "hf://org/name"])
def test_a_revision_is_pinned_and_its_files_are_read(
    servers: tuple[WebFiles, WebFiles], address: str
) -> None:
    hub, files = servers
    hub.token = "t0ken"
    source = at(hub, address)

    listed = source.files()
    manifest = build_manifest(source, files=listed)

    assert [(f.path, f.size_bytes, f.version) for f in listed] == [
        ("config.json", 2, "b" * 40),
        ("onnx/model.onnx", 10, "a" * 64),
    ]
    assert [f.path for f in manifest.files] == ["config.json", "onnx/model.onnx"]
    assert source.name == f"hf://org/name@{COMMIT}"
    assert source.read(listed[1], 3, 4) == b"3456"
    assert all("authorization" not in seen.headers for seen in files.seen)
    source.close()


def test_what_the_hub_does_not_have_is_told(servers: tuple[WebFiles, WebFiles]) -> None:
    hub, _ = servers
    for address, wrong in (
        ("hf://org/other", "no such repository|answers 404"),
        ("hf://org/name@v9", "no such|answers 404"),
    ):
        source = at(hub, address)
        with pytest.raises(SourceInvalid, match=wrong):
            source.files()
        source.close()


def test_addresses_of_no_repository_are_refused() -> None:
    for address in ("hf://name", "hf://org/name/folder", "hf://org/name@", "hf://../name@x y"):
        with pytest.raises(SourceInvalid, match="hf://org/name"):
            open_source(address)


def test_a_hub_that_cannot_be_reached_is_named() -> None:
    source = HubSource(
        "org/name",
        revision=None,
        token=None,
        endpoint=f"http://127.0.0.1:{free_port()}",
        web=RangeClient(attempts=1),
    )
    with pytest.raises(TransientSourceError, match="hf://org/name: the hub does not answer: "):
        source.files()
    source.close()

"""`pilotlight storage|image|app prune` against the real control plane."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from pilotlight.client.client import Client
from pilotlight.controller.registry import images
from pilotlight.errors import StorageQuotaExceeded
from pilotlight.spec.function import FunctionSpec, ImageSpec
from pilotlight.spec.record_json import from_json
from tests.functions.cli.test_tenancy import Shell, _client, _shell
from tests.functions.controller.parts import spec

__all__ = ["_client", "_shell"]

STRAY = b"uploaded, and never deployed"
IMAGE = "ab" * 32


def put(client: Client, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    client.put_blob(digest, data)
    return digest


def deploy(client: Client, data: bytes, **changes: Any) -> None:
    client.deploy("search", [from_json(FunctionSpec, spec(bundle=put(client, data), **changes))])


def register_image(shell: Shell) -> None:
    with shell.platform.store.write() as write:
        tenant = write.sql.exec_driver_sql("SELECT id FROM tenants").scalar_one()
        images.register(
            write, tenant=tenant, spec=ImageSpec(python="3.11"), digest=IMAGE, size_bytes=5_000_000
        )


def test_what_is_kept_is_shown_beside_its_bound(shell: Shell, client: Client) -> None:
    shell.run("quota", "set", "--tenant", "default", "stored_bytes=1000000")
    put(client, STRAY)
    rows = {row["what"]: (row["used"], row["limit"]) for row in shell.json("storage", "show")}
    assert rows["stored_bytes"] == (len(STRAY), 1_000_000)
    assert "stored_bytes" in shell.run("storage", "show").stdout
    assert "stored_bytes" in shell.run("tenant", "plans", "free").stdout
    assert shell.json("quota", "show")["tenant"]["stored_bytes"] == 1_000_000


def test_error_at_the_bound_names_the_way_to_delete(shell: Shell, client: Client) -> None:
    shell.run("quota", "set", "--tenant", "default", "stored_bytes=10")
    with pytest.raises(StorageQuotaExceeded, match="stored_bytes = 10") as refused:
        put(client, STRAY)
    assert "weights delete" in refused.value.detail["hint"]


def test_strays_are_collected_and_named_before(shell: Shell, client: Client) -> None:
    digest = put(client, STRAY)
    assert shell.json("storage", "collect")["count"] == 0
    assert shell.json("storage", "collect", "--now", "--dry-run")["blobs"] == [digest]
    assert client.has_blob(digest)
    assert "Pass --yes" in shell.failed("storage", "collect", "--now")
    assert shell.json("storage", "collect", "--now", "--yes")["deleted_bytes"] == len(STRAY)
    assert not client.has_blob(digest)


def test_images_are_listed_and_deleted_by_their_first_digits(shell: Shell) -> None:
    register_image(shell)
    assert [row["size_bytes"] for row in shell.json("image", "list")] == [5_000_000]
    assert IMAGE[:12] in shell.run("image", "list").stdout
    assert "there is no image" in shell.failed("image", "delete", "ffff", "--yes")
    assert "Pass --yes" in shell.failed("image", "delete", "abab")
    assert shell.json("image", "delete", "abab", "--yes") == {"digest": IMAGE, "deleted": True}
    assert shell.json("image", "list") == []


def test_image_in_use_is_not_deleted_and_its_functions_are_named(
    shell: Shell, client: Client
) -> None:
    register_image(shell)
    deploy(client, b"code", image=IMAGE)
    assert "main/search/hello" in shell.failed("image", "delete", IMAGE, "--yes")


def test_old_revisions_are_pruned(shell: Shell, client: Client) -> None:
    for number in range(4):
        deploy(client, b"code %d" % number)
    assert shell.json("app", "prune", "search", "--keep", "1", "--dry-run")["revisions"] == 3
    assert "Pass --yes" in shell.failed("app", "prune", "search", "--keep", "1")
    done = shell.json("app", "prune", "search", "--keep", "1", "--yes")
    assert (done["revisions"], done["freed_bytes"]) == (3, 3 * len(b"code 0"))

"""What reaches the wire: arguments are checked by name, strangers are not served."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.rpc import (
    RpcClient,
    RpcGuest,
    RpcRemoteError,
    SendPart,
    serve_rpc,
)
from tests.fakes.as_user import as_user
from tests.fakes.noting import no_part, noting
from tests.weight_cache.models import put_model
from tests.weight_cache.served import Node
from weight_cache.client import WeightCacheClient
from weight_cache.errors import ManifestInvalid, StoreFailed
from weight_cache.server import controller_operations


@pytest.mark.parametrize(
    "op, args, said",
    [
        ("open", {"manifest": 7, "holder": "s"}, "manifest = 7: expected a non-empty string"),
        ("open", {"manifest": "0" * 64}, "holder = None"),
        (
            "open",
            {"manifest": "0" * 64, "holder": "s", "pid": -1},
            "pid = -1: expected a process id",
        ),
        ("open", {"manifest": "0" * 64, "holder": "s", "pid": True}, "pid = True"),
        ("wait", {}, "lease_id = None"),
        ("close", {"lease_id": ""}, "lease_id = ''"),
        ("predict", {"manifest": []}, r"manifest = \[\]"),
        ("pin", {}, "manifest = None"),
        (
            "lease",
            {"manifest": "0" * 64},
            "no operation 'lease'; there are: close, drop, list, open",
        ),
    ],
)
async def test_wrong_arguments_are_named(
    node: Node, op: str, args: dict[str, Any], said: str
) -> None:
    rpc = await RpcClient.open(node.socket)
    with pytest.raises(RpcRemoteError, match=said):
        await rpc.call(op, args)
    await rpc.aclose()


async def test_socket_is_for_its_owner(node: Node) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o600
    assert node.socket.stat().st_uid == os.geteuid()


async def test_what_the_disk_refuses_is_answered(short_tmp: Path) -> None:
    async def refuse(_args: Mapping[str, Any], _part: SendPart) -> Mapping[str, Any]:
        raise OSError(errno.ENOSPC, "No space left on device")

    defects: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context))
    server = await serve_rpc(short_tmp / "s", {"refuse": refuse}, lambda _: None)
    rpc = await RpcClient.open(short_tmp / "s")
    async with asyncio.timeout(30):
        with pytest.raises(RpcRemoteError, match="No space left"):
            await rpc.call("refuse", {})
    await rpc.aclose()
    server.close()


async def test_a_disk_that_refuses_notes_is_named(node: Node, client: WeightCacheClient) -> None:
    name = put_model(node.origin, {"a": b"abc"})
    for folder in ("leases", "pins"):
        (node.home / "w" / folder).rmdir()
    opened = await client.open(name, holder="s")
    with pytest.raises(StoreFailed, match=r"the disk below .* failed for lease"):
        await client.wait(opened.lease_id)
    with pytest.raises(StoreFailed, match=r"the disk below .* failed for pin"):
        await client.pin(name)


@pytest.mark.root
async def test_a_guest_has_operations_of_its_own_and_others_have_none(short_tmp: Path) -> None:
    async def answer(_args: Mapping[str, Any], _part: SendPart) -> Mapping[str, Any]:
        return {"done": True}

    guest, other = 19901, 20001
    short_tmp.chmod(0o710)
    os.chown(short_tmp, 0, guest)
    allowed = RpcGuest(uid=guest, operations={"look": answer})
    server = await serve_rpc(
        short_tmp / "s", {"look": answer, "exec": answer}, lambda _: None, guest=allowed
    )

    def asked(op: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(short_tmp / "s"))
            connection.sendall(json.dumps({"id": 1, "op": op}).encode() + b"\n")
            return connection.makefile().readline()

    async def asked_by(uid: int, op: str) -> str:
        return await asyncio.to_thread(as_user, uid, lambda: asked(op))

    assert '"done"' in await asked_by(0, "exec")
    assert '"done"' in await asked_by(guest, "look")
    assert "unknown_operation" in await asked_by(guest, "exec")
    assert await asked_by(other, "look") == "PermissionError"
    short_tmp.chmod(0o755)
    (short_tmp / "s").chmod(0o666)
    assert await asked_by(other, "look") in ("", "ConnectionResetError", "BrokenPipeError"), (
        "the kernel's word counts, whatever the modes are"
    )
    server.close()


async def test_a_controller_asks_where_models_are_and_holds_none() -> None:
    names = (
        "open",
        "wait",
        "close",
        "predict",
        "prefetch",
        "verify",
        "pin",
        "unpin",
        "drop",
        "stat",
        "list",
    )
    everything, reached = noting(names)
    found = controller_operations(everything)
    assert set(found) == set(names) - {"open", "wait", "close"}
    for manifest in ("../../platform.key", "A" * 64, "a" * 64 + "\n", "a" * 63):
        with pytest.raises(ManifestInvalid):
            await found["pin"]({"manifest": manifest}, no_part)
    assert not reached
    await found["pin"]({"manifest": "a" * 64}, no_part)
    await found["stat"]({}, no_part)
    assert reached == ["pin", "stat"]

"""What reaches the wire: arguments are checked by name, strangers are not served."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.weight_cache.served import Node, node_with_client
from weight_cache.protocol import RemoteFailure, RpcClient


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with node_with_client() as (node, _, _):
        yield node


@pytest.mark.parametrize(
    "op, args, said",
    [
        ("open", {"manifest": 7, "holder": "s"}, "manifest = 7: expected a text"),
        ("open", {"manifest": "0" * 64}, "holder = None"),
        ("open", {"manifest": "0" * 64, "holder": "s", "pid": -1}, "pid = -1: expected the id of a process"),
        ("open", {"manifest": "0" * 64, "holder": "s", "pid": True}, "pid = True"),
        ("wait", {}, "lease_id = None"),
        ("close", {"lease_id": ""}, "lease_id = ''"),
        ("predict", {"manifest": []}, r"manifest = \[\]"),
        ("pin", {}, "manifest = None"),
        ("lease", {"manifest": "0" * 64}, "no operation 'lease'; there are: close, drop, list, open"),
    ],
)
async def test_wrong_arguments_are_named(node: Node, op: str, args: dict[str, Any], said: str) -> None:
    rpc = await RpcClient.open(node.socket)
    with pytest.raises(RemoteFailure, match=said):
        await rpc.call(op, args)
    await rpc.aclose()


async def test_socket_is_for_its_owner(node: Node) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o600
    assert node.socket.stat().st_uid == os.geteuid()

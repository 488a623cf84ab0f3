"""Tokens of registries, from a token server that answers what it likes."""

from __future__ import annotations

import itertools
import threading

import httpx
import pytest

from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.oci.repository_access import AccessRefused, RepositoryAccess
from tests.fakes.loopback import LoopbackServer, handler_for
from tests.fakes.user_code import Answer


def test_a_token_without_end_is_not_read_to_its_end() -> None:
    endless = Answer(stream=(bytes(1024) for _ in itertools.count()))
    with LoopbackServer(("127.0.0.1", 0), handler_for(lambda _: endless)) as server:
        threading.Thread(target=server.serve_forever).start()
        host = f"127.0.0.1:{server.server_port}"
        access = RepositoryAccess(
            Repository(host, "a/b"), None, actions="pull", timeout=httpx.Timeout(5)
        )
        asks = httpx.Response(401, headers={"www-authenticate": f'Bearer realm="http://{host}/t"'})
        with pytest.raises(AccessRefused, match="more than 65536 bytes"):
            access.authorize(asks)
        access.http.close()
        server.shutdown()

"""What one call makes of answers that are none."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pilotlight.kubernetes.api_errors import ApiResponse
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.client import ApiCalls
from pilotlight.kubernetes.errors import ClusterUnreachable
from pilotlight.kubernetes.kinds import LEASE
from pilotlight.kubernetes.transport import Transport
from tests.functions.cluster.conftest import IMPATIENT


class Proxy:
    """Something that answers in the API server's place, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked = 0

    async def call(self, *_deed: object, **_how: object) -> ApiResponse:
        """See Transport."""
        self.asked += 1
        return ApiResponse(
            status=200,
            body=b"<html>sign in</html>" if self.asked <= self.times else b'{"kind": "Lease"}',
        )


def calls(proxy: Proxy) -> ApiCalls:
    return ApiCalls(cast(Transport, cast(Any, proxy)), patience=IMPATIENT)


async def test_a_proxys_page_is_no_success_of_a_write() -> None:
    proxy = Proxy(times=1000)
    with pytest.raises(ClusterUnreachable, match="not from an API server"):
        await calls(proxy).call(
            ApiRequest(verb="update", kind=LEASE, namespace="pilotlight", name="a"), "PUT", body={}
        )
    assert proxy.asked == IMPATIENT.pauses.attempts


async def test_it_is_asked_again_like_one_that_does_not_answer() -> None:
    answer = await calls(Proxy(times=1)).call(
        ApiRequest(verb="get", kind=LEASE, namespace="pilotlight", name="a"), "GET"
    )
    assert answer.document() == {"kind": "Lease"}

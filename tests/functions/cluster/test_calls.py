"""What one call makes of answers that are none."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from pilotlight.kubernetes.api_errors import ApiResponse
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.client import ApiCalls
from pilotlight.kubernetes.errors import ClusterUnreachable, Forbidden
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


class Starting:
    """An API server that is away, and then does not know its roles for a moment."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    async def call(self, deed: ApiRequest, *_what: object, **_how: object) -> ApiResponse:
        """See Transport."""
        status = self.answers.pop(0) if self.answers else 200
        if not status:
            raise ClusterUnreachable("refused", sent=False, deed=deed)
        body = {"kind": "Status" if status != 200 else "Lease", "code": status, "message": "no"}
        return ApiResponse(status=status, body=json.dumps(body).encode())


async def test_a_refusal_just_after_an_absence_is_no_answer() -> None:
    deed = ApiRequest(verb="create", kind=LEASE, namespace="pilotlight")
    server = Starting(0, 403, 403)
    asked = ApiCalls(cast(Transport, cast(Any, server)), patience=IMPATIENT)
    assert (await asked.call(deed, "POST", body={})).status == 200
    with pytest.raises(Forbidden):
        await ApiCalls(cast(Transport, cast(Any, Starting(403))), patience=IMPATIENT).call(
            deed, "POST", body={}
        )
    # those who only watch saw it, too
    server.answers = [403]
    asked = ApiCalls(cast(Transport, cast(Any, server)), patience=IMPATIENT)
    asked.note(ClusterUnreachable("cut"))
    assert (await asked.call(deed, "POST", body={})).status == 200

"""Tokens of issuers as callers, through the whole gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from activator.settings import ActivatorSettings
from activator.tokens import token_callers
from pilotlight import errors
from pilotlight.core.oidc.issuer_client import KEEP_S, REFRESH_S, RETRY_S, IssuerClient
from pilotlight.core.oidc.settings import CallerRule, Issuer
from pilotlight.core.oidc.tokens import MAX_TOKEN_BYTES
from pilotlight.protocol import CONTENT_PICKLE
from tests.activator.conftest import KEY, Edge, served
from tests.activator.gateway.test_http_proxy import chatting
from tests.activator.test_gateway import problem_of, until
from tests.fakes.fake_worker import Behaviour
from tests.fakes.issuer import FakeIssuer, encoded, new_key, sign
from tests.fakes.routes import TENANT, route_of, spec_of

OTHER = "t-000000000002"
RULES = (
    CallerRule(audience="calls", claims={"role": "shop"}, tenant="acme", app="shop"),
    CallerRule(
        audience="calls", claims={"groups": "customers"}, tenant="acme", customer_claim="org.id"
    ),
    CallerRule(
        audience="calls",
        claims={"role": "one"},
        tenant="acme",
        environment="main",
        app="shop",
        function="hello",
    ),
    CallerRule(audience="calls", claims={"groups": "ml"}, tenant="acme"),
    CallerRule(audience="calls", claims={"groups": "beta"}, tenant="beta"),
    CallerRule(audience="calls", claims={"groups": "lost"}, tenant="nobody"),
)


@pytest.fixture(name="issuer")
def _issuer() -> Iterator[FakeIssuer]:
    with FakeIssuer().serve() as issuer:
        yield issuer


class Clock:
    """Monotonic seconds that the test can move."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@pytest.fixture(name="client")
def _client(issuer: FakeIssuer, clock: Clock) -> IssuerClient:
    return IssuerClient(Issuer(name="own", issuer=issuer.url, callers=list(RULES)), clock=clock)


@pytest.fixture(name="edge")
async def _edge(
    short_tmp: Path, settings: ActivatorSettings, behaviour: Behaviour, client: IssuerClient
) -> AsyncIterator[Edge]:
    edge = Edge(short_tmp, settings, behaviour, issuers=[client])
    edge.add_tenant("acme")
    edge.add_tenant("beta", tenant=OTHER)
    for app in ("shop", "search"):
        edge.add(route_of(spec_of(), app=app))
    edge.stop_the_clock_of_strangers()
    async with served(edge) as edge:
        yield edge


async def call(
    edge: Edge, token: str, path: str = "shop/hello:invoke", **headers: str
) -> httpx.Response:
    return await edge.call(path, key=token, json={"x": 1}, headers=headers)


async def test_a_token_calls_functions(edge: Edge, issuer: FakeIssuer) -> None:
    token = issuer.token()
    for _ in range(3):
        assert (await call(edge, token)).status_code == 200
    assert issuer.asked("/keys") == 1
    await until(lambda: edge.books.journal.statistics().open_calls == 0)
    keys = {record.key for record in (await edge.settle()).values()}
    assert len(keys) == 1
    assert keys.pop().startswith("token:own:")


@pytest.mark.parametrize(
    "changes, path, status",
    [
        ({"role": "shop"}, "shop/hello:invoke", 200),
        ({"role": "shop"}, "search/hello:invoke", 403),
        ({"role": "one"}, "shop/hello:invoke", 200),
        ({"role": "one"}, "shop/other:invoke", 403),
        ({"role": "one"}, "search/hello:invoke", 403),
        ({"groups": ["ml"]}, "search/hello:invoke", 200),
        ({"groups": "ml"}, "search/hello:invoke", 200),
        ({"groups": ["mlx"]}, "search/hello:invoke", 401),
        ({"groups": ["lost"]}, "search/hello:invoke", 401),
    ],
)
async def test_the_first_rule_that_fits_says_what_a_token_calls(
    edge: Edge, issuer: FakeIssuer, changes: dict[str, Any], path: str, status: int
) -> None:
    assert (await call(edge, issuer.token(**changes), path)).status_code == status


async def test_a_token_of_another_tenants_users_reaches_nothing_here(
    edge: Edge, issuer: FakeIssuer
) -> None:
    theirs = issuer.token(groups=["beta"])
    assert (await call(edge, theirs)).status_code == 404
    answer = await edge.client.post(
        f"{edge.url}/t/acme/v1/functions/shop/hello:invoke",
        json={"x": 1},
        headers={"authorization": f"Bearer {theirs}"},
    )
    assert answer.status_code == 404
    edge.add(route_of(spec_of("shared", access=("beta",))))
    answer = await edge.client.post(
        f"{edge.url}/t/acme/v1/functions/shop/shared:invoke",
        json={"x": 1},
        headers={"authorization": f"Bearer {theirs}"},
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"aud": "pilotlight"}, "aud"),
        ({"iss": "https://login.example.com"}, "issuer"),
        ({"exp": 1}, "expired"),
        ({"nbf": 4_000_000_000}, "nbf"),
        ({"groups": []}, "no rule"),
    ],
)
async def test_other_tokens_are_refused_with_the_reason(
    edge: Edge, issuer: FakeIssuer, changes: dict[str, Any], why: str
) -> None:
    answer = await call(edge, issuer.token(**changes))
    assert answer.status_code == 401
    assert why in answer.json()["detail"]


async def test_unsigned_tokens_and_those_of_other_keys_are_refused(
    edge: Edge, issuer: FakeIssuer
) -> None:
    claims = issuer.claims()
    unsigned = f"{encoded({'alg': 'none', 'kid': 'k1'})}.{encoded(claims)}."
    for token in (unsigned, sign(new_key("k1"), claims), sign(new_key("k9"), claims)):
        assert (await call(edge, token)).status_code == 401


async def test_an_expired_token_ends_though_it_was_used(edge: Edge, issuer: FakeIssuer) -> None:
    token = issuer.token()  # for 600 s, and the leeway of 30 s
    assert (await call(edge, token)).status_code == 200
    edge.later_s = 625
    assert (await call(edge, token)).status_code == 200
    edge.later_s = 632
    assert (await call(edge, token)).status_code == 401


async def test_a_rotated_key_is_found_and_a_withdrawn_one_ends(
    edge: Edge, issuer: FakeIssuer, clock: Clock, client: IssuerClient
) -> None:
    old = issuer.token()
    assert (await call(edge, old)).status_code == 200
    issuer.rotate("k2", "RS256")
    clock.ahead += RETRY_S
    assert (await call(edge, issuer.token())).status_code == 200
    assert (await call(edge, old)).status_code == 200
    issuer.withdraw("k1")
    clock.ahead += REFRESH_S
    await client.refresh_if_due()
    assert (await call(edge, old)).status_code == 401


async def test_a_flood_of_invented_key_ids_is_refused_and_costs_one_request(
    edge: Edge, issuer: FakeIssuer, clock: Clock
) -> None:
    assert (await call(edge, issuer.token())).status_code == 200
    clock.ahead += RETRY_S
    key = new_key("k1")
    flood = [sign(key, issuer.claims(), kid=f"x{number}") for number in range(60)]
    answers = await asyncio.gather(*(call(edge, token) for token in flood))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {401, 429}
    assert issuer.asked("/keys") == 2


async def test_a_strangers_flood_keeps_no_verified_token_and_no_key_out(
    edge: Edge, issuer: FakeIssuer
) -> None:
    good = issuer.token()
    assert (await call(edge, good)).status_code == 200
    statuses = [
        (await call(edge, issuer.token(aud="x", jti=str(number)))).status_code
        for number in range(15)
    ]
    assert statuses == [401] * 10 + [429] * 5  # its attempts are used up
    assert (await call(edge, issuer.token(jti="new"))).status_code == 429
    assert (await call(edge, good)).status_code == 200
    assert (await call(edge, KEY)).status_code == 200


async def test_verifications_that_wait_are_bounded(
    edge: Edge, issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_callers, "MAX_OF_NETWORK", 0)
    answer = await call(edge, issuer.token())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_one_token_is_verified_once_for_many_calls(edge: Edge, issuer: FakeIssuer) -> None:
    token = issuer.token()
    answers = await asyncio.gather(*(call(edge, token) for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert issuer.asked("/keys") == 1


async def test_a_dead_issuers_keys_are_used_for_a_day(
    edge: Edge, issuer: FakeIssuer, clock: Clock
) -> None:
    assert (await call(edge, issuer.token())).status_code == 200
    issuer.is_dead = True
    clock.ahead += KEEP_S - 60
    token = issuer.token(jti="late")
    assert (await call(edge, token)).status_code == 200
    clock.ahead += 60
    answer = await call(edge, token)
    assert answer.status_code == 503
    assert "cannot be asked" in answer.json()["detail"]
    assert (await call(edge, KEY)).status_code == 200


async def test_a_removed_or_suspended_tenants_tokens_end(edge: Edge, issuer: FakeIssuer) -> None:
    token = issuer.token()
    assert (await call(edge, token)).status_code == 200
    edge.add_tenant("acme", suspended=True)
    assert (await call(edge, token)).status_code == 403
    edge.tell("tenant", TENANT, None)
    assert (await call(edge, token)).status_code == 401


async def test_a_claim_names_the_customer_of_all_calls(edge: Edge, issuer: FakeIssuer) -> None:
    ana = issuer.token(groups=["customers"], org={"id": "ana"})
    for customer in (None, "ana"):
        headers = {"pilotlight-customer": customer} if customer else {}
        assert (await call(edge, ana, **headers)).status_code == 200
    answer = await call(edge, ana, **{"pilotlight-customer": "ben"})
    assert "for customer 'ana' only" in str(problem_of(answer)["detail"])
    for org in ({}, {"id": ""}, {"id": "no id\n"}, {"id": 5}, "ana"):
        assert (await call(edge, issuer.token(groups=["customers"], org=org))).status_code == 401
    await until(lambda: edge.books.journal.statistics().open_calls == 0)
    records = (await edge.settle()).values()
    assert [record.customer for record in records] == ["ana", "ana"]


async def test_customers_quotas_hold_for_tokens_that_name_one(
    edge: Edge, issuer: FakeIssuer
) -> None:
    edge.tell("quota", f"{TENANT}/ana", {"requests_per_s": 0.001, "burst": 1})
    ana, ben = (issuer.token(groups=["customers"], org={"id": name}) for name in ("ana", "ben"))
    statuses = [(await call(edge, token)).status_code for token in (ana, ana, ben)]
    assert statuses == [200, 429, 200]


async def test_a_token_without_a_customer_names_none(edge: Edge, issuer: FakeIssuer) -> None:
    answer = await call(edge, issuer.token(), **{"pilotlight-customer": "ana"})
    assert answer.status_code == 403


async def test_a_token_sends_no_pickles(edge: Edge, issuer: FakeIssuer) -> None:
    answer = await edge.call(
        key=issuer.token(), content=b"x", headers={"content-type": CONTENT_PICKLE}
    )
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "verb, path",
    [
        ("POST", "/v1/functions/shop/hello:submit"),
        ("PUT", "/v1/calls/own-1?function=shop/hello"),
        ("GET", "/v1/calls/req-1"),
        ("POST", "/v1/functions/shop/hello:warmup"),
        ("POST", "/v1/functions/shop/hello:bind"),
        ("GET", "/v1/apps"),
        ("POST", "/v1/keys"),
        ("POST", "/v1/dicts/seen"),
        ("GET", "/v1/sandboxes/sb-1"),
        ("GET", "/dashboard"),
    ],
)
async def test_a_token_calls_functions_and_does_nothing_else(
    edge: Edge, issuer: FakeIssuer, verb: str, path: str
) -> None:
    answer = await edge.client.request(
        verb,
        edge.url + path,
        json={"x": 1},
        headers={"authorization": f"Bearer {issuer.token()}"},
    )
    assert answer.status_code == 403


async def test_the_reach_of_a_tokens_caller_is_known_to_fallbacks(
    edge: Edge, issuer: FakeIssuer
) -> None:
    await call(edge, token := issuer.token(role="shop"))
    caller = edge.tokens.cached_caller(f"Bearer {token}".encode())
    assert caller is not None
    assert edge.table.caller_of(caller.key_id) is caller
    assert edge.table.caller_of("token:own:made-up") is None


async def test_a_token_opens_a_websocket(edge: Edge, issuer: FakeIssuer) -> None:
    async with chatting(edge) as (url, _):
        good = {"authorization": f"Bearer {issuer.token()}"}
        async with connect(url, additional_headers=good, proxy=None) as socket:
            await socket.send("hello")
            assert await socket.recv() == "hello"
        bad = {"authorization": f"Bearer {issuer.token(aud='x')}"}
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, additional_headers=bad, proxy=None):
                pass
        assert caught.value.response.status_code == 401


async def test_a_long_token_is_refused(edge: Edge, issuer: FakeIssuer) -> None:
    assert ActivatorSettings().max_header_bytes > MAX_TOKEN_BYTES
    with pytest.raises(errors.Unauthenticated, match="longer"):
        await edge.tokens.verify(b"Bearer " + b"ey" * 5000 + b".a.b", "10.0.0.1")

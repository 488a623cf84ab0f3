"""The client of an issuer: keys that rotate, floods of invented ones, and issuers that do not
answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from pilotlight.core.oidc import issuer_client
from pilotlight.core.oidc.errors import GrantRefused, IssuerUnreachable, TokenRefused
from pilotlight.core.oidc.issuer_client import (
    KEEP_S,
    MAX_ANSWER_BYTES,
    REFRESH_S,
    RETRY_S,
    IssuerClient,
)
from pilotlight.core.oidc.settings import Issuer, SignInRule
from pilotlight.core.oidc.tokens import read_token
from tests.fakes.issuer import CLIENT, SECRET, FakeIssuer, new_key, sign
from tests.fakes.user_code import Answer

KEYS = "/keys"
ML = SignInRule(claims={"groups": "ml"}, tenant="default", scope="deploy")


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="issuer")
def _issuer() -> Iterator[FakeIssuer]:
    with FakeIssuer().serve() as issuer:
        yield issuer


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


@asynccontextmanager
async def opened(issuer: FakeIssuer, clock: Clock, url: str = "") -> AsyncIterator[IssuerClient]:
    settings = Issuer(name="own", issuer=url or issuer.url, client_id=CLIENT, sign_in=[ML])
    client = IssuerClient(settings, secret=SECRET, clock=clock)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture(name="client")
async def _client(issuer: FakeIssuer, clock: Clock) -> AsyncIterator[IssuerClient]:
    async with opened(issuer, clock) as client:
        yield client


async def kid_of(client: IssuerClient, token: str) -> str:
    return (await client.key_of(read_token(token.encode()))).kid


async def test_keys_are_read_once(issuer: FakeIssuer, client: IssuerClient) -> None:
    token = issuer.token()
    assert await asyncio.gather(*(kid_of(client, token) for _ in range(20))) == ["k1"] * 20
    assert issuer.asked(KEYS) == 1


async def test_a_new_key_is_found_as_soon_as_a_token_names_it(
    issuer: FakeIssuer, client: IssuerClient, clock: Clock
) -> None:
    await kid_of(client, issuer.token())
    issuer.rotate("k2")
    clock.now += RETRY_S
    assert await kid_of(client, issuer.token()) == "k2"


async def test_a_withdrawn_keys_tokens_end(
    issuer: FakeIssuer, client: IssuerClient, clock: Clock
) -> None:
    old = issuer.token()
    thumbprint = (await client.key_of(read_token(old.encode()))).thumbprint
    issuer.rotate("k2")
    issuer.withdraw("k1")
    assert client.trusts(thumbprint)
    clock.now += REFRESH_S
    await client.refresh_if_due()
    assert not client.trusts(thumbprint)
    with pytest.raises(TokenRefused):
        await client.key_of(read_token(old.encode()))


async def test_a_flood_of_invented_key_ids_costs_one_request(
    issuer: FakeIssuer, client: IssuerClient, clock: Clock
) -> None:
    await kid_of(client, issuer.token())
    clock.now += RETRY_S
    key = new_key("k1")
    for number in range(50):
        invented = read_token(sign(key, issuer.claims(), kid=f"x{number}").encode())
        with pytest.raises(TokenRefused):
            await client.key_of(invented)
    assert issuer.asked(KEYS) == 2


async def test_keys_outlive_a_dead_issuer_for_a_day(
    issuer: FakeIssuer, client: IssuerClient, clock: Clock
) -> None:
    token = issuer.token()
    await kid_of(client, token)
    issuer.is_dead = True
    clock.now += KEEP_S - 1
    assert await kid_of(client, token) == "k1"
    clock.now += 1
    with pytest.raises(IssuerUnreachable, match="cannot be asked"):
        await kid_of(client, token)
    issuer.is_dead = False
    clock.now += RETRY_S
    assert await kid_of(client, token) == "k1"


async def test_an_issuer_that_never_answered_is_asked_once_in_a_while(
    issuer: FakeIssuer, client: IssuerClient, clock: Clock
) -> None:
    issuer.is_dead = True
    for _ in range(20):
        with pytest.raises(IssuerUnreachable):
            await client.provider()
    assert len(issuer.requests) == 1
    clock.now += RETRY_S
    with pytest.raises(IssuerUnreachable):
        await client.provider()
    assert len(issuer.requests) == 2


@pytest.mark.parametrize(
    "document, why",
    [
        ({"issuer": "https://other.example.com"}, "another issuer"),
        ({"issuer": None}, "another issuer"),
        ({"jwks_uri": "http://169.254.169.254/keys"}, "no https URL in jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "no https URL in jwks_uri"),
        ({"jwks_uri": "https://user:password@example.com/"}, "no https URL in jwks_uri"),
        ({"token_endpoint": None}, "no https URL in token_endpoint"),
        ({"authorization_endpoint": ["https://a"]}, "no https URL in authorization_endpoint"),
    ],
)
async def test_other_discovery_documents_are_refused(
    issuer: FakeIssuer, client: IssuerClient, document: dict[str, object], why: str
) -> None:
    issuer.document = document
    with pytest.raises(IssuerUnreachable, match=why):
        await client.provider()
    assert issuer.asked(KEYS) == 0


@pytest.mark.parametrize(
    "answer, why",
    [
        (Answer(status=302, headers={"location": "/elsewhere"}), "answered 302"),
        (Answer(status=500), "answered 500"),
        (Answer(body=b" " * (MAX_ANSWER_BYTES + 1)), "more than"),
        (Answer(body=b"x", headers={"content-encoding": "gzip"}), "coding"),
        (Answer(body=b"<html>"), "JWK Set"),
    ],
)
async def test_other_answers_are_refused(
    issuer: FakeIssuer, client: IssuerClient, answer: Answer, why: str
) -> None:
    issuer.answers[KEYS] = answer
    with pytest.raises(IssuerUnreachable, match=why):
        await kid_of(client, issuer.token())
    assert issuer.asked("/elsewhere") == 0


async def test_a_slow_issuer_is_given_up(
    issuer: FakeIssuer, client: IssuerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_client, "ANSWER_S", 0.1)
    server = await asyncio.start_server(_silent, "127.0.0.1", 0)
    issuer.document = {"jwks_uri": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"}
    with pytest.raises(IssuerUnreachable, match="TimeoutError"):
        await kid_of(client, issuer.token())
    server.close()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_a_refused_grant_says_why(issuer: FakeIssuer, client: IssuerClient) -> None:
    with pytest.raises(GrantRefused) as caught:
        await client.request_token({"grant_type": "authorization_code", "code": "invented"})
    assert caught.value.code == "invalid_grant"


async def test_a_client_may_send_its_secret_in_the_form(
    issuer: FakeIssuer, client: IssuerClient
) -> None:
    issuer.document = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    with pytest.raises(GrantRefused) as caught:  # this issuer knows only the other way
        await client.request_token({"grant_type": "authorization_code", "code": "invented"})
    assert caught.value.code == "invalid_client"

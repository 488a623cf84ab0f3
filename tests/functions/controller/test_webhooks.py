"""Signatures, and where webhooks may lead."""

from __future__ import annotations

import json
import ssl

import pytest

from pilotlight.controller.billing.budget_alerts import new_signing_secret
from pilotlight.controller.webhooks import webhook_sender
from pilotlight.controller.webhooks.webhook_sender import (
    AttemptResult,
    WebhookMessage,
    WebhookSender,
    check_url,
    is_public,
    sign,
)
from pilotlight.errors import InvalidInput
from tests.fakes.hooks import OK, Receiver

MESSAGE = WebhookMessage(
    id="al-1",
    type="budget.reached",
    at=1_800_000_000.25,
    data={"percent": 80, "tenant": "Käse & Söhne"},
)
SECRET = new_signing_secret()


class Names:
    """A name server with one answer to everything. `asked` are the names."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self.addresses


async def post(url: str, *, policy: str = "any", names: Names | None = None) -> AttemptResult:
    resolve = names or webhook_sender.resolve
    async with WebhookSender(
        policy=policy, resolve=resolve, verify=ssl.create_default_context()
    ) as sender:
        return await sender.post(MESSAGE, url=url, secret=SECRET, now=1_800_000_123.9)


# -- what is sent ----------------------------------------------------------------------------------
def test_the_example_of_the_specification_has_its_signature() -> None:
    signature = sign(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_a_message_is_json_and_its_signature_holds(receiver: Receiver) -> None:
    assert await post(receiver.url) == AttemptResult(status=204)
    got = receiver.received[0]
    assert got.line == "POST /hook HTTP/1.1"
    assert got.is_signed_with(SECRET)
    assert not got.is_signed_with(new_signing_secret())
    assert (got.headers["webhook-id"], got.headers["webhook-timestamp"]) == ("al-1", "1800000123")
    assert json.loads(got.body) == {
        "type": "budget.reached",
        "timestamp": "2027-01-15T08:00:00.250000Z",
        "data": dict(MESSAGE.data),
    }


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_no base64!", "x whsec_aaaa"]
)
def test_what_is_no_secret_signs_nothing(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_"):
        sign(secret, id="1", timestamp=1, body=b"")


# -- what comes back -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "answer, outcome",
    [
        (OK, AttemptResult(status=204)),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\nendless",
            AttemptResult(status=200),
        ),
        (
            b"HTTP/1.1 500 Oh\r\n\r\n",
            AttemptResult(status=500, error="500: expected a status of 200 to 299"),
        ),
        (
            b"HTTP/1.1 429 Slow\r\nretry-after: 120\r\n\r\n",
            AttemptResult(
                status=429, error="429: expected a status of 200 to 299", retry_after_s=120
            ),
        ),
        (
            b"HTTP/1.1 503 No\r\nretry-after: Wed, 21 Oct 2026 07:28:00 GMT\r\n\r\n",
            AttemptResult(status=503, error="503: expected a status of 200 to 299"),
        ),
        (
            b"HTTP/1.1 410 Gone\r\n\r\n",
            AttemptResult(
                status=410, error="410: the receiver accepts no further messages", is_gone=True
            ),
        ),
        (
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/admin\r\n\r\n",
            AttemptResult(status=302, error="302: redirects are not followed: use the final URL"),
        ),
    ],
)
async def test_an_answer_is_judged_by_its_head(
    receiver: Receiver, answer: bytes, outcome: AttemptResult
) -> None:
    receiver.reply = lambda _: answer
    assert await post(receiver.url) == outcome
    assert len(receiver.received) == 1


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 2", b"\x00" * 100])
async def test_a_receiver_that_is_broken_is_an_error_with_a_reason(
    receiver: Receiver, answer: bytes
) -> None:
    receiver.reply = lambda _: answer
    outcome = await post(receiver.url)
    assert outcome.status is None
    assert outcome.error


async def test_nobody_listens_there(receiver: Receiver) -> None:
    async with Receiver().serve() as gone:
        url = gone.url
    outcome = await post(url)
    assert (outcome.status, "ConnectError" in str(outcome.error)) == (None, True)


async def test_a_receiver_that_never_answers_is_left(receiver: Receiver) -> None:
    receiver.reply = lambda _: None
    async with WebhookSender(policy="any", attempt_s=0.05) as sender:
        assert await sender.post(
            MESSAGE, url=receiver.url, secret=SECRET, now=1.0
        ) == AttemptResult(error="no response within 0.05 s")


async def test_the_second_address_of_a_name_is_tried_when_the_first_does_not_take_the_connection(
    receiver: Receiver,
) -> None:
    names = Names("127.0.0.2", "127.0.0.1")  # the receiver listens on the second only
    assert await post(f"http://hooks.example:{receiver.port}/x", names=names) == AttemptResult(
        status=204
    )
    assert receiver.received[0].headers["host"] == f"hooks.example:{receiver.port}"
    assert names.asked == ["hooks.example"]


async def test_a_name_that_does_not_exist_is_an_error() -> None:
    outcome = await post("http://nobody.invalid/")
    assert "nobody.invalid cannot be resolved" in str(outcome.error)


# -- where it may lead -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "93.184.215.14",
        "2606:4700::1111",
        "::ffff:1.1.1.1",
        "64:ff9b::101:101",
        "2002:101:101::1",
    ],
)
def test_addresses_of_the_public_internet(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
            "192.0.2.1",
        ),
        *("198.18.0.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *(
            "::",
            "::1",
            "fe80::1",
            "fe80::1%eth0",
            "fc00::1",
            "fd00:ec2::254",
            "fec0::1",
            "ff02::1",
            "2001:db8::1",
            "100::1",
            "5f00::1",
        ),
        *(
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2001::1",
        ),
    ],
)
def test_addresses_that_are_not(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.0.0.7"],
        ["169.254.169.254"],
        ["::1"],
        ["1.1.1.1", "10.0.0.7"],
        ["::ffff:127.0.0.1"],
    ],
)
async def test_a_name_that_resolves_into_the_platforms_network_is_not_sent_to(
    receiver: Receiver, addresses: list[str]
) -> None:
    outcome = await post(
        f"https://hooks.example:{receiver.port}/", policy="public", names=Names(*addresses)
    )
    assert "an address that is not public" in str(outcome.error)
    assert receiver.received == []


async def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver) -> None:
    class Rebinding(Names):
        async def __call__(self, host: str, port: int) -> list[str]:
            await super().__call__(host, port)
            return self.addresses if len(self.asked) == 1 else ["10.0.0.1"]

    names = Rebinding("127.0.0.1")
    assert await post(f"http://hooks.example:{receiver.port}/", names=names) == AttemptResult(
        status=204
    )
    assert names.asked == ["hooks.example"]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://hooks.example/x",
            "ftp://hooks.example/",
            "file:///etc/passwd",
            "https://",
            "https:///x",
            "hooks.example/x",
            "",
        ),
        *(
            "https://127.0.0.1/",
            "https://[::1]/",
            "https://169.254.169.254/latest",
            "https://localhost/",
            "https://a.localhost/",
        ),
        *(
            "https://user:secret@hooks.example/",
            "https://hooks.example:99999/",
            "https://hooks.example/" + "x" * 2000,
            "javascript:alert(1)",
        ),
        *("https://0x7f000001/", "https://2130706433/", "https://127.1/"),
    ],
)
async def test_a_url_that_leads_nowhere_public_is_refused(url: str) -> None:
    # numbers that only the system's resolver takes for addresses
    with_look_up = "0x7f" in url or "2130706433" in url or "127.1/" in url
    if with_look_up:
        outcome = await post(url, policy="public")
        assert "not public" in str(outcome.error) or "cannot be resolved" in str(outcome.error)
    else:
        with pytest.raises(InvalidInput, match=r"^webhook: ") as caught:
            check_url(url, policy="public")
        assert caught.value.detail["parameter"] == "webhook"
        assert (await post(url, policy="public")).error


def test_an_operator_may_allow_any_address() -> None:
    for url in ("http://127.0.0.1:9/x", "http://alerts.internal/", "https://[::1]/"):
        assert check_url(url, policy="any") == url
    with pytest.raises(InvalidInput):
        check_url("ftp://alerts.internal/", policy="any")


def test_only_the_host_is_shown_of_what_opens_a_receiver() -> None:
    assert (
        webhook_sender.host_of("https://hooks.example:8443/services/T0/B0/secret?x=1")
        == "https://hooks.example:8443/…"
    )

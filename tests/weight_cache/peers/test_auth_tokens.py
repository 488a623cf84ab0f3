"""Only who has the platform's key is served, once per ticket, at the node that it is for, and not
an hour later."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from weight_cache.peers.auth_tokens import (
    ANY_NODE,
    TOKEN_LIFETIME_S,
    PeerKeyMissing,
    TokenRejected,
    TokenSigner,
    TokenVerifier,
)

KEY = TokenSigner(b"k" * 32)
ALICE, BOB = "a" * 32, "b" * 32
NOON = 1_000_000.0


@pytest.fixture
def gate() -> TokenVerifier:
    return TokenVerifier(KEY, own_id=BOB)


def ticket(
    *, key: TokenSigner = KEY, target: str = "/v1/x", to: str = BOB, now: float = NOON
) -> str:
    return key.write("GET", target, sender=ALICE, receiver=to, now=now)


def reason_of(
    gate: TokenVerifier,
    header: str | None,
    *,
    method: str = "GET",
    target: str = "/v1/x",
    now: float = NOON,
    anybody: bool = False,
) -> str:
    with pytest.raises(TokenRejected) as refused:
        gate.admit(header, method, target, now=now, anybody=anybody)
    return refused.value.reason


def test_a_good_ticket_says_who_asks(gate: TokenVerifier) -> None:
    assert gate.admit(ticket(), "GET", "/v1/x", now=NOON + 1) == ALICE


@pytest.mark.parametrize(
    "header", [None, "", "Bearer x", "Pilotlight-Peer from=1", "Pilotlight-Peer " + "a" * 500]
)
def test_what_is_no_ticket_is_refused(gate: TokenVerifier, header: str | None) -> None:
    assert reason_of(gate, header) == "absent"


def test_a_ticket_of_another_platform_is_refused(gate: TokenVerifier) -> None:
    assert reason_of(gate, ticket(key=TokenSigner(b"x" * 32))) == "forged"


@pytest.mark.parametrize(
    "method, target", [("POST", "/v1/x"), ("GET", "/v1/y"), ("GET", "/v1/x?owner=1")]
)
def test_a_ticket_is_good_for_its_own_request_only(
    gate: TokenVerifier, method: str, target: str
) -> None:
    assert reason_of(gate, ticket(), method=method, target=target) == "forged"


@pytest.mark.parametrize(
    "field, other",
    [("from=a", "from=c"), ("to=b", "to=a"), ("at=1", "at=2"), ("nonce=", "nonce=0")],
)
def test_no_field_can_be_changed(gate: TokenVerifier, field: str, other: str) -> None:
    header = ticket()
    changed = header.replace(field, other, 1)
    assert reason_of(gate, changed[: len(header)]) in ("forged", "absent")


def test_a_ticket_for_another_node_is_refused(gate: TokenVerifier) -> None:
    assert reason_of(gate, ticket(to=ALICE)) == "misaddressed"
    assert reason_of(gate, ticket(to=ANY_NODE)) == "misaddressed"
    assert gate.admit(ticket(to=ANY_NODE), "GET", "/v1/x", now=NOON, anybody=True) == ALICE


def test_a_ticket_is_good_once(gate: TokenVerifier) -> None:
    header = ticket()
    gate.admit(header, "GET", "/v1/x", now=NOON)
    assert reason_of(gate, header, now=NOON + 30) == "replayed"


@pytest.mark.parametrize("late_s", [TOKEN_LIFETIME_S + 1, -TOKEN_LIFETIME_S - 1, 3600.0])
def test_a_ticket_out_of_its_time_is_refused(gate: TokenVerifier, late_s: float) -> None:
    assert reason_of(gate, ticket(), now=NOON + late_s) == "stale"


def test_nonces_are_forgotten_when_their_tickets_are_stale_anyway(gate: TokenVerifier) -> None:
    gate.admit(ticket(), "GET", "/v1/x", now=NOON)
    assert repr(gate) == "<TokenVerifier nonces=1>"
    gate.admit(
        ticket(now=NOON + 3 * TOKEN_LIFETIME_S), "GET", "/v1/x", now=NOON + 3 * TOKEN_LIFETIME_S
    )
    assert repr(gate) == "<TokenVerifier nonces=1>"


@pytest.mark.parametrize("content", [b"", b"short", base64.urlsafe_b64encode(b"x" * 31)])
def test_a_file_that_is_no_key_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "platform.key"
    file.write_bytes(content)
    with pytest.raises(PeerKeyMissing, match=r"platform\.key is not a valid platform key"):
        TokenSigner.load(file)
    with pytest.raises(PeerKeyMissing, match="absent"):
        TokenSigner.load(tmp_path / "absent")


def test_two_nodes_with_one_key_file_know_each_other(tmp_path: Path) -> None:
    file = tmp_path / "platform.key"
    file.write_bytes(base64.urlsafe_b64encode(b"x" * 32) + b"\n")
    header = ticket(key=TokenSigner.load(file))
    assert (
        TokenVerifier(TokenSigner.load(file), own_id=BOB).admit(header, "GET", "/v1/x", now=NOON)
        == ALICE
    )

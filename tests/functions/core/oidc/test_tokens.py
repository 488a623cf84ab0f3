"""Tokens as anybody may send them, against keys of an issuer."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import pytest
from joserfc.jwk import Key, OctKey, RSAKey

from pilotlight.core.oidc.errors import IssuerUnreachable, TokenRefused
from pilotlight.core.oidc.tokens import (
    MAX_TOKEN_BYTES,
    IssuerKey,
    find_key,
    read_keys,
    read_token,
    verify_token,
)
from tests.fakes.issuer import encoded, new_key, sign

NOW = 1_800_000_000
ISSUER = "https://login.example.com"
CLAIMS = {"iss": ISSUER, "aud": "calls", "sub": "u-1", "iat": NOW - 10, "exp": NOW + 60}


@pytest.fixture(scope="module", name="key")
def _key() -> Key:
    return new_key("k1")


def published(*keys: Key) -> tuple[IssuerKey, ...]:
    return read_keys(json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode())


def accepted(token: str, *keys: Key, now: float = NOW, leeway_s: float = 30) -> Mapping[str, Any]:
    """The claims of a token that is accepted."""
    read = read_token(token.encode())
    key = find_key(published(*keys), read)
    if key is None:
        raise TokenRefused("no key")
    return verify_token(
        read, key, issuer=ISSUER, audiences=["other", "calls"], now=now, leeway_s=leeway_s
    )


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
def test_a_token_that_the_issuer_signed_is_accepted(algorithm: str) -> None:
    key = new_key("k1", algorithm)
    assert accepted(sign(key, CLAIMS), key) == CLAIMS


def test_an_audience_may_be_one_of_several(key: Key) -> None:
    assert accepted(sign(key, {**CLAIMS, "aud": ["a", "calls"]}), key)["sub"] == "u-1"


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"iss": "https://other.example.com"}, "claim iss"),
        ({"aud": "another"}, "claim aud"),
        ({"aud": ["another", "more"]}, "claim aud"),
        ({"aud": {"calls": 1}}, "claim aud"),
        ({"aud": None}, "no claim aud"),
        ({"exp": None}, "no claim exp"),
        ({"exp": NOW - 30}, "expired"),
        ({"exp": str(NOW + 60)}, "claim exp"),
        ({"exp": True}, "claim exp"),
        ({"nbf": NOW + 31}, "claim nbf"),
        ({"iat": NOW + 31}, "claim iat"),
        ({"sub": None}, "no claim sub"),
        ({"sub": 7}, "claim sub"),
        ({"sub": "u" * 256}, "claim sub"),
    ],
)
def test_a_token_with_other_claims_is_refused(key: Key, changes: dict[str, Any], why: str) -> None:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    with pytest.raises(TokenRefused, match=why):
        accepted(sign(key, claims), key)


def test_clocks_may_differ_by_the_leeway(key: Key) -> None:
    for changes in ({"exp": NOW - 29}, {"nbf": NOW + 30}, {"iat": NOW + 30}):
        assert accepted(sign(key, {**CLAIMS, **changes}), key)


def test_an_unsigned_token_is_refused(key: Key) -> None:
    for name in ("none", "None", "NONE", ""):
        token = f"{encoded({'alg': name, 'kid': 'k1'})}.{encoded(CLAIMS)}."
        with pytest.raises(TokenRefused, match="algorithm"):
            accepted(token, key)


@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
def test_a_token_that_is_signed_with_the_text_of_the_public_key_is_refused(form: str) -> None:
    key = new_key("k1", "RS256")
    assert isinstance(key, RSAKey)
    texts = {
        "pem": key.as_pem(private=False),
        "der": key.as_der(private=False),
        "jwk": json.dumps(key.as_dict(private=False)).encode(),
    }
    signed = f"{encoded({'alg': 'HS256', 'kid': 'k1'})}.{encoded(CLAIMS)}"
    digest = hmac.new(texts[form], signed.encode(), hashlib.sha256).digest()
    token = f"{signed}.{OctKey.import_key(digest).as_dict(private=True)['k']}"
    with pytest.raises(TokenRefused, match="algorithm"):
        accepted(token, key)


@pytest.mark.parametrize(
    "header",
    [
        {"jku": "https://evil.example.com/keys"},
        {"x5u": "https://evil.example.com/chain"},
        {"jwk": new_key("k1").as_dict(private=False)},
        {"x5c": ["MIIB"]},
        {"crit": ["exp"]},
        {"b64": True},
    ],
)
def test_a_token_that_names_keys_of_its_own_is_refused(key: Key, header: dict[str, Any]) -> None:
    head = {"alg": "ES256", "kid": "k1", **header}
    good = sign(key, CLAIMS).split(".")
    with pytest.raises(TokenRefused, match="header"):
        read_token(f"{encoded(head)}.{good[1]}.{good[2]}".encode())


def test_another_key_with_the_same_id_does_not_verify(key: Key) -> None:
    with pytest.raises(TokenRefused, match="signature"):
        accepted(sign(new_key("k1"), CLAIMS), key)


def test_changed_claims_do_not_verify(key: Key) -> None:
    head, _, signature = sign(key, CLAIMS).split(".")
    with pytest.raises(TokenRefused, match="signature"):
        accepted(f"{head}.{encoded({**CLAIMS, 'sub': 'u-2'})}.{signature}", key)


def test_a_key_verifies_its_own_algorithm_only() -> None:
    key = new_key("k1", "RS256")
    head, claims, signature = sign(key, CLAIMS).split(".")
    head = encoded({"alg": "PS256", "kid": "k1"})
    with pytest.raises(TokenRefused, match="no key"):
        accepted(f"{head}.{claims}.{signature}", key)


def test_a_token_without_a_key_id_has_the_only_key() -> None:
    one, other = new_key("k1"), new_key("k2")
    token = sign(one, CLAIMS, kid="")
    assert accepted(token, one)
    assert accepted(token, one, new_key("r1", "RS256"))
    with pytest.raises(TokenRefused):
        accepted(token, one, other)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"pl_key",
        b"a.b",
        b"a.b.c.d",
        b"..",
        b"eyJ.eyJ.eyJ",
        b"\xff.\xff.\xff",
        f"{encoded([])}.{encoded({})}.AA".encode(),
        f"{encoded('alg')}.{encoded({})}.AA".encode(),
        f"{encoded({'alg': 'ES256'})}.{encoded([])}.AA".encode(),
        f"{encoded({'alg': ['ES256']})}.{encoded({'iss': ISSUER})}.AA".encode(),
        f"{encoded({'alg': 'ES256', 'kid': 5})}.{encoded({'iss': ISSUER})}.AA".encode(),
        f"{encoded({'alg': 'ES256'})}.{encoded({'iss': {}})}.AA".encode(),
        b"W1tbW1tb" * 200 + b".e30.AA",
        b"e30." + b"W1tb" * 1900 + b".AA",
        b"e" * (MAX_TOKEN_BYTES + 1),
    ],
)
def test_what_is_no_token_is_refused(token: bytes) -> None:
    with pytest.raises(TokenRefused):
        read_token(token)


def test_deep_claims_are_refused(key: Key) -> None:
    head = encoded({"alg": "ES256", "kid": "k1"})
    deep = encoded({"iss": ISSUER}).replace("=", "")
    token = f"{head}.{'W1tb' * 1500}.{deep[:20]}"
    with pytest.raises(TokenRefused):
        read_token(token.encode())


def test_keys_that_are_not_for_signatures_are_left_out(key: Key) -> None:
    public = key.as_dict(private=False)
    entries = [
        {**public, "use": "enc"},
        {**public, "key_ops": ["encrypt"]},
        {**public, "alg": "HS256"},
        {**public, "alg": ["ES256"]},
        {**public, "kid": 5},
        {**public, "x": "AA"},
        key.as_dict(private=True),
        OctKey.import_key(b"0" * 32).as_dict(private=True),
        {"kty": "RSA", "n": "AAAA", "e": "AQAB"},
        {"kty": "AKP", "alg": "ML-DSA-44"},
        {},
        "text",
        None,
        public,
    ]
    found = read_keys(json.dumps({"keys": entries}).encode())
    assert [one.kid for one in found] == ["k1"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"keys": 1}', b"[" * 100_000])
def test_what_is_no_key_set_is_refused(body: bytes) -> None:
    with pytest.raises(IssuerUnreachable):
        read_keys(body)

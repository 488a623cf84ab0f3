"""Signed JSON Web Tokens (RFC 7515, 7519): reading them, and verifying them with an issuer's key.

Pure functions, with bounds on what is read of a token whose signature is not verified yet. The
advice of RFC 8725 applies: algorithms are those of ALGORITHMS, all of them with public keys, so
that neither an unsigned token nor one that is signed with the text of a public key (HMAC) is valid;
and a token that names keys or addresses of keys is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joserfc import jws
from joserfc.errors import (
    BadSignatureError,
    ExpiredTokenError,
    InvalidClaimError,
    JoseError,
    MissingClaimError,
    UnsupportedAlgorithmError,
)
from joserfc.jwk import ECKey, JWKRegistry, Key, OKPKey, RSAKey
from joserfc.jws import CompactSignature, JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from pilotlight.core.oidc.errors import IssuerUnreachable, TokenRefused

ALGORITHMS = frozenset(
    {
        *("RS256", "RS384", "RS512"),
        *("PS256", "PS384", "PS512"),
        *("ES256", "ES384", "ES512"),
        *("EdDSA", "Ed25519"),
    }
)
_EDWARDS = frozenset({"EdDSA", "Ed25519"})
"""Two names of one algorithm (RFC 9864)."""
MAX_TOKEN_BYTES = 8192
"""Longest token: with the names of some two hundred groups."""
MAX_SUBJECT = 255
"""Longest `sub`, in characters (OpenID Connect Core, section 2)."""
MAX_KEYS = 100
"""Most keys of an issuer; the others are ignored."""
_RSA_TEXT = (341, 1366)
"""Characters of the modulus of an RSA key: 2048 to 8192 bits in base64url."""
_NAMES_KEYS = ("jku", "jwk", "x5u", "x5c", "crit", "b64")
"""Header parameters that name keys, or change how a token is read."""


class _Algorithms(JWSRegistry):
    """The permitted algorithms. The library warns at each use of `EdDSA`, which is still the common
    name of Ed25519."""

    max_header_length = 2048
    max_payload_length = MAX_TOKEN_BYTES
    max_signature_length = 2048

    def get_alg(self, name: str) -> Any:
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


_REGISTRY = _Algorithms(strict_check_header=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerKey:
    """A public key of an issuer.

    Attributes:
        kid: its id, "" if it has none.
        algorithm: the only algorithm that it is for; None = any of its kind.
        thumbprint: identifies the key itself (RFC 7638).
    """

    kid: str
    algorithm: str | None
    thumbprint: str
    key: Key

    def is_for(self, algorithm: str) -> bool:
        """Whether tokens with this algorithm may be signed with it."""
        if self.algorithm is None or self.algorithm == algorithm:
            return True
        return self.algorithm in _EDWARDS and algorithm in _EDWARDS


@dataclass(frozen=True, slots=True, kw_only=True)
class UnverifiedToken:
    """A token whose signature is not verified: its claims are those of anybody.

    Attributes:
        algorithm: one of ALGORITHMS.
        kid: the id of its key, "" if it names none.
        issuer: its `iss`.
    """

    algorithm: str
    kid: str
    issuer: str
    claims: Mapping[str, Any]
    signed: CompactSignature


def read_token(token: bytes) -> UnverifiedToken:
    """Read a token, which may be anybody's. Raises TokenRefused."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenRefused(f"the token is longer than {MAX_TOKEN_BYTES} bytes")
    try:
        signed = jws.extract_compact(token, registry=_REGISTRY)
        claims = json.loads(signed.payload)
    except (JoseError, ValueError, TypeError, RecursionError) as e:
        raise TokenRefused("the token is not a signed JSON Web Token") from e
    header = signed.protected
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise TokenRefused("the token is not a signed JSON Web Token")
    algorithm, kid, issuer = header.get("alg"), header.get("kid", ""), claims.get("iss")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenRefused("the token's algorithm is not accepted: it must have a public key")
    if any(name in header for name in _NAMES_KEYS):
        raise TokenRefused("the token's header names a key or an extension, which is not accepted")
    if not isinstance(kid, str) or not isinstance(issuer, str):
        raise TokenRefused("the token names no issuer")
    return UnverifiedToken(
        algorithm=algorithm, kid=kid, issuer=issuer, claims=claims, signed=signed
    )


def find_key(keys: Sequence[IssuerKey], token: UnverifiedToken) -> IssuerKey | None:
    """Return the key that a token names; None if the issuer has no such key. A token that names
    none has the issuer's only key for its algorithm."""
    fitting = [one for one in keys if one.is_for(token.algorithm)]
    if not token.kid:
        return fitting[0] if len(fitting) == 1 else None
    return next((one for one in fitting if one.kid == token.kid), None)


def verify_token(
    token: UnverifiedToken,
    key: IssuerKey,
    *,
    issuer: str,
    audiences: Sequence[str],
    now: float,
    leeway_s: float,
) -> Mapping[str, Any]:
    """Verify a token: its signature, and the claims `iss`, `aud` (it must contain one of
    `audiences`), `exp`, `nbf`, `iat` and `sub`. Returns its claims. Raises TokenRefused.

    `now`: seconds since the epoch."""
    try:
        if not jws.validate_compact(token.signed, key.key, registry=_REGISTRY):
            raise BadSignatureError
    except (JoseError, ValueError, TypeError) as e:
        raise TokenRefused("the token's signature is not valid") from e
    expected = JWTClaimsRegistry(
        now=int(now),
        leeway=int(leeway_s),
        iss={"essential": True, "value": issuer},
        aud={"essential": True, "values": list(audiences)},
        exp={"essential": True},
        sub={"essential": True},
    )
    try:
        expected.validate(dict(token.claims))
    except ExpiredTokenError as e:
        raise TokenRefused("the token has expired") from e
    except MissingClaimError as e:
        raise TokenRefused(f"the token has no claim {e.claim}") from e
    except InvalidClaimError as e:
        raise TokenRefused(f"the token's claim {e.claim} is not accepted") from e
    if len(token.claims["sub"]) > MAX_SUBJECT:
        raise TokenRefused(f"the token's claim sub is longer than {MAX_SUBJECT} characters")
    return token.claims


def read_keys(body: bytes) -> tuple[IssuerKey, ...]:
    """Return the keys of a JWK Set (RFC 7517) that may verify tokens, without those of other kinds
    and uses. Raises IssuerUnreachable for what is none."""
    try:
        entries = json.loads(body)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise IssuerUnreachable("its keys are not a JWK Set") from e
    if not isinstance(entries, list):
        raise IssuerUnreachable("its keys are not a JWK Set")
    found = (_read_key(entry) for entry in entries[:MAX_KEYS])
    return tuple(key for key in found if key is not None)


def _read_key(entry: Any) -> IssuerKey | None:
    try:
        if not isinstance(entry, dict) or not _may_verify(entry):
            return None
        key = JWKRegistry.import_key(entry)
        assert isinstance(key, RSAKey | ECKey | OKPKey)
        thumbprint = key.thumbprint()
    except (JoseError, ValueError, TypeError, KeyError, AssertionError):
        return None
    algorithm = entry.get("alg")
    return IssuerKey(
        kid=str(entry.get("kid", "")), algorithm=algorithm, thumbprint=thumbprint, key=key
    )


def _may_verify(entry: Mapping[str, Any]) -> bool:
    """Whether a JWK is a public key for signatures of ALGORITHMS. A published private key is
    anybody's."""
    if entry.get("kty") not in ("RSA", "EC", "OKP") or "d" in entry:
        return False
    if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ["verify"]):
        return False
    if not isinstance(entry.get("kid", ""), str) or entry.get("alg", "RS256") not in ALGORITHMS:
        return False
    modulus = entry.get("n")
    if entry["kty"] != "RSA":
        return True
    return isinstance(modulus, str) and _RSA_TEXT[0] <= len(modulus) <= _RSA_TEXT[1]

"""Sign-in of a browser: the authorization code flow with PKCE (RFC 6749, 7636; OpenID Connect Core
1.0, section 3.1).

What the callback must know of the beginning is in a sealed cookie of the browser that began, so
that no other browser can end it, and strangers who begin cost no memory. The issuer accepts a code
once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass
from urllib.parse import urlencode

from pilotlight.controller.sign_in.issuers import Identity, SignInIssuers, refusals_of
from pilotlight.core.crypto import DecryptionFailed, Sealer
from pilotlight.errors import Forbidden, Unauthenticated

COOKIE = "pilotlight_sign_in"
LASTS_S = 600.0
"""How long a person may take at the issuer."""
MAX_CODE = 4096
"""Longest authorization code."""
AGAIN = "begin again on the sign-in page, in one browser"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSignIn:
    """A sign-in that a browser has begun.

    Attributes:
        issuer: its name.
        state: what the issuer must send back with the browser.
        nonce: what the ID token must contain.
        verifier: what proves to the issuer that its code came back to who began (PKCE).
        redirect_url: where the issuer sends the browser back to.
        until: seconds since the epoch.
    """

    issuer: str
    state: str
    nonce: str
    verifier: str
    redirect_url: str
    until: float

    def seal(self, sealer: Sealer) -> str:
        """Return the value of the cookie."""
        return sealer.seal(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """What an issuer sends back with the browser; "" = nothing. `issuer`: its URL (RFC 9207)."""

    state: str = ""
    code: str = ""
    issuer: str = ""
    error: str = ""
    description: str = ""


def open_cookie(cookie: str, sealer: Sealer, *, now: float) -> BrowserSignIn:
    """Return the sign-in that a browser has begun. Raises Unauthenticated."""
    try:
        begun = BrowserSignIn(**json.loads(sealer.open(cookie)))
    except (DecryptionFailed, TypeError, ValueError) as e:
        raise Unauthenticated(f"this browser has begun no sign-in: {AGAIN}") from e
    if now >= begun.until:
        raise Unauthenticated(f"this sign-in took longer than {LASTS_S / 60:g} minutes: {AGAIN}")
    return begun


async def begin(
    issuers: SignInIssuers, name: str, *, redirect_url: str, now: float
) -> tuple[BrowserSignIn, str]:
    """Begin a sign-in; return it, and the issuer's page. Raises NotFound, Unavailable."""
    client = issuers.client(name)
    with refusals_of(name):
        provider = await client.provider()
    begun = BrowserSignIn(
        issuer=name,
        state=secrets.token_urlsafe(32),
        nonce=secrets.token_urlsafe(32),
        verifier=secrets.token_urlsafe(48),
        redirect_url=redirect_url,
        until=now + LASTS_S,
    )
    digest = hashlib.sha256(begun.verifier.encode()).digest()
    query = {
        "response_type": "code",
        "client_id": client.issuer.client_id or "",
        "redirect_uri": redirect_url,
        "scope": " ".join(client.issuer.scopes),
        "state": begun.state,
        "nonce": begun.nonce,
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    page = provider.authorization_endpoint
    return begun, f"{page}{'&' if '?' in page else '?'}{urlencode(query)}"


async def end(
    issuers: SignInIssuers, begun: BrowserSignIn, callback: Callback, *, address: str, now: float
) -> Identity:
    """Return who signed in, at this address. Raises Forbidden, Unauthenticated, TooManyRequests,
    Unavailable."""
    if not hmac.compare_digest(callback.state.encode(), begun.state.encode()):
        raise Forbidden(f"another sign-in was begun in this browser, or elsewhere: {AGAIN}")
    client = issuers.client(begun.issuer)
    with refusals_of(begun.issuer):
        provider = await client.provider()
        is_named = callback.issuer == client.issuer.issuer
        if not is_named and (callback.issuer or provider.names_itself):
            raise Forbidden(f"another issuer than {begun.issuer!r} sent the browser back: {AGAIN}")
        if callback.error or not callback.code:
            why = f"{callback.error} {callback.description}".strip() or "it sent no code"
            raise Unauthenticated(f"issuer {begun.issuer!r} did not sign you in: {why[:300]}")
        form = {
            "grant_type": "authorization_code",
            "code": callback.code,
            "redirect_uri": begun.redirect_url,
            "code_verifier": begun.verifier,
        }
        with issuers.attempts.attempt(address, now):
            answer = await client.request_token(form)
    return await issuers.identify(client, answer, nonce=begun.nonce)

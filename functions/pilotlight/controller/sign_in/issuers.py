"""The issuers by which people sign in, and what a person may do here, by its ID token (OpenID
Connect Core 1.0, section 3.1.3.7).

ID tokens are accepted only from the token endpoint of their issuer, to which this process connects:
from no browser and no command line."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pilotlight.controller.sign_in.attempts import AttemptLimit
from pilotlight.core.oidc.errors import GrantRefused, IssuerUnreachable, OidcError, TokenRefused
from pilotlight.core.oidc.settings import Issuer, has_claims
from pilotlight.errors import (
    Forbidden,
    InvalidInput,
    NotFound,
    PilotlightError,
    Unauthenticated,
    Unavailable,
)
from pilotlight.spec.identifiers import Scope

if TYPE_CHECKING:
    from pilotlight.core.oidc.issuer_client import IssuerClient

MAX_NAME = 100
"""Characters of a person's name in the name of its key."""
AGAIN = "Begin again: `pilotlight login --oidc`, or the dashboard's sign-in page."
_NAMES = ("email", "preferred_username", "name")
"""Claims that name a person, for people; the first that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person that an issuer has identified, and what it may do here.

    Attributes:
        issuer: the issuer's name here.
        subject: the person's id at the issuer (`sub`).
        name: for people.
        tenant: name of its tenant.
        environment: the only environment that it may access; None = all.
        lasts_s: how long it is signed in.
    """

    issuer: str
    subject: str
    name: str
    tenant: str
    scope: Scope
    environment: str | None
    lasts_s: float


class SignInIssuers:
    """The issuers with rules for people. Owner: the event loop.

    Attributes:
        attempts: of networks to sign in, that issuers refused."""

    def __init__(
        self,
        issuers: Mapping[str, Issuer] | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secrets`: of the clients at the issuers, by the issuer's name. `clock`: seconds since
        the epoch."""
        self._issuers = {name: one for name, one in (issuers or {}).items() if one.sign_in}
        self._secrets = secrets or {}
        self._clock = clock
        self._clients: dict[str, IssuerClient] = {}
        self.attempts = AttemptLimit()

    def __repr__(self) -> str:
        return f"<SignInIssuers {', '.join(self._issuers) or 'none'}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The issuers' names, in the order of platform.yaml."""
        return tuple(self._issuers)

    def client(self, name: str | None) -> IssuerClient:
        """Return the client of an issuer; of the only one where `name` is None. Raises NotFound,
        InvalidInput."""
        known = ", ".join(self._issuers)
        if not self._issuers:
            raise NotFound(
                "people cannot sign in by an issuer here: the operator names none in section "
                "`issuers` of platform.yaml"
            )
        if name is None and len(self._issuers) > 1:
            raise InvalidInput(f"several issuers are configured: name one of {known}")
        name = name or next(iter(self._issuers))
        if name not in self._issuers:
            raise NotFound(f"there is no issuer {name[:40]!r}; known: {known}")
        if name not in self._clients:
            # most platforms have no issuer, and start without the library
            from pilotlight.core.oidc.issuer_client import IssuerClient

            self._clients[name] = IssuerClient(self._issuers[name], secret=self._secrets.get(name))
        return self._clients[name]

    async def aclose(self) -> None:
        """Close the connections to issuers."""
        for client in self._clients.values():
            await client.aclose()

    async def identify(
        self, client: IssuerClient, answer: Mapping[str, Any], *, nonce: str | None
    ) -> Identity:
        """Return who signed in, by the answer of the token endpoint. `nonce`: what the browser's
        request had; None = a device's, which has none. Raises Unauthenticated, Forbidden,
        Unavailable."""
        with refusals_of(client.issuer.name):
            claims = await self._verify(client, answer)
            _check_client(claims, client.issuer)
            if nonce is not None and not _is_equal(claims.get("nonce"), nonce):
                raise TokenRefused("the token's claim nonce is not that of this sign-in")
        return identity_of(client.issuer, claims)

    async def _verify(self, client: IssuerClient, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        from pilotlight.core.oidc.tokens import read_token, verify_token

        text, issuer = answer.get("id_token"), client.issuer
        if not isinstance(text, str):
            raise IssuerUnreachable("the issuer's answer has no ID token: is `openid` requested?")
        read = await asyncio.to_thread(read_token, text.encode())
        if read.issuer != issuer.issuer:
            raise TokenRefused("the token's claim iss is not accepted")
        key = await client.key_of(read)
        return await asyncio.to_thread(
            partial(
                verify_token,
                read,
                key,
                issuer=issuer.issuer,
                audiences=[issuer.client_id or ""],
                now=self._clock(),
                leeway_s=issuer.leeway_s,
            )
        )


def identity_of(issuer: Issuer, claims: Mapping[str, Any]) -> Identity:
    """Return what a person may do, by the first rule that fits its claims. Raises Forbidden,
    Unauthenticated."""
    subject = str(claims["sub"])
    if not subject.isprintable():
        raise Unauthenticated(f"issuer {issuer.name!r}: the token's claim sub is not printable")
    for rule in issuer.sign_in:
        if has_claims(claims, rule.claims):
            return Identity(
                issuer=issuer.name,
                subject=subject,
                name=_name_of(claims),
                tenant=rule.tenant,
                scope=Scope(rule.scope),
                environment=rule.environment,
                lasts_s=issuer.session_s,
            )
    raise Forbidden(
        f"issuer {issuer.name!r} knows you, but no rule of issuers.{issuer.name}.sign_in fits your "
        f"account: ask the platform's operator"
    )


@contextmanager
def refusals_of(issuer: str) -> Iterator[None]:
    """Raise the errors of an issuer as those of a sign-in by it."""
    try:
        yield
    except OidcError as e:
        raise _refusal(issuer, e) from e


def _refusal(issuer: str, error: OidcError) -> PilotlightError:
    if isinstance(error, IssuerUnreachable):
        return Unavailable(f"sign-in is not possible now: {error}", retry_after_s=30)
    if isinstance(error, GrantRefused):
        return Unauthenticated(f"issuer {issuer!r} refuses this sign-in: {error}", hint=AGAIN)
    return Unauthenticated(f"issuer {issuer!r}: {error}", hint=AGAIN)


def _check_client(claims: Mapping[str, Any], issuer: Issuer) -> None:
    """Raise TokenRefused for a token that was issued to another client."""
    party, audience = claims.get("azp"), claims["aud"]
    is_shared = isinstance(audience, list) and len(audience) > 1
    if (party is not None or is_shared) and party != issuer.client_id:
        raise TokenRefused("the token's claim azp is not accepted")


def _is_equal(found: Any, wanted: str) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), wanted.encode())


def _name_of(claims: Mapping[str, Any]) -> str:
    names = (claims.get(claim) for claim in _NAMES)
    found = next((one for one in names if isinstance(one, str) and one), str(claims["sub"]))
    return "".join(c for c in found if c.isprintable())[:MAX_NAME]

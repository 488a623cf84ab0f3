"""One-time codes that sign a browser in to the dashboard (`pilotlight dashboard`).

A caller with an API key gets a code, and the sign-in form exchanges it once, within LIFETIME_S, for
a session of that key: the key itself reaches neither the browser nor an address. Codes are kept in
memory, as hashes; a restart of the controller ends them all."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass

from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import TooManyRequests, Unauthenticated

LIFETIME_S = 60.0
MAX_OF_TENANT = 32
"""Unused codes of one tenant: enough for a team, and a limit on memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    tenant: str
    key: str
    until: float


class SignInCodes:
    """The unused codes. Owner: the event loop; every method is synchronous, so no lock is
    needed."""

    def __init__(self) -> None:
        self._issued: dict[bytes, _Issued] = {}  # in the order of their ends
        self._of_tenants: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SignInCodes {len(self._issued)} unused>"

    def issue(self, caller: Principal, *, now: float) -> str:
        """Return a new code for the caller's key. Raises TooManyRequests."""
        self._evict_expired(now)
        if self._of_tenants[caller.tenant] >= MAX_OF_TENANT:
            raise TooManyRequests(
                f"{MAX_OF_TENANT} sign-in codes of this tenant are unused, the limit: use one, or "
                f"try again when they have expired",
                retry_after_s=LIFETIME_S,
            )
        code = secrets.token_urlsafe(32)
        self._issued[_digest(code)] = _Issued(
            tenant=caller.tenant, key=caller.key, until=now + LIFETIME_S
        )
        self._of_tenants[caller.tenant] += 1
        return code

    def redeem(self, code: str, *, now: float) -> str:
        """Use up a code, and return the id of its API key. Raises Unauthenticated."""
        self._evict_expired(now)
        digest = _digest(code)
        issued = self._issued.get(digest)
        if issued is None or now >= issued.until:  # the clock may have been set back in between
            raise Unauthenticated(
                "this sign-in code was used or has expired: run `pilotlight dashboard` again"
            )
        return self._remove(digest).key

    def _evict_expired(self, now: float) -> None:
        while self._issued:
            digest, oldest = next(iter(self._issued.items()))
            if now < oldest.until:
                return
            self._remove(digest)

    def _remove(self, digest: bytes) -> _Issued:
        issued = self._issued.pop(digest)
        self._of_tenants[issued.tenant] -= 1
        if not self._of_tenants[issued.tenant]:
            del self._of_tenants[issued.tenant]
        return issued


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()

"""Sign-in of the command line: the device flow (RFC 8628), by which a person agrees in a browser of
any machine.

The controller asks the issuer, so that the client's secret and ID tokens stay here; the command
line gets a code of ours and polls with it. Pending sign-ins are kept in memory, by the hash of that
code; a restart of the controller ends them. Anybody may begin one: they are bounded in all and by
address, and the issuer is asked no more often than it permits."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.sign_in.attempts import network_of
from pilotlight.controller.sign_in.issuers import AGAIN, Identity, SignInIssuers, refusals_of
from pilotlight.core.oidc.errors import GrantRefused, IssuerUnreachable
from pilotlight.core.oidc.settings import is_endpoint
from pilotlight.errors import TooManyRequests, Unauthenticated

MAX_PENDING = 1024
MAX_OF_ADDRESS = 8
"""Pending sign-ins of one address (IPv6: of a /64)."""
MAX_LASTS_S = 900.0
"""How long a sign-in may be pending, also where the issuer permits more."""
INTERVAL_S = 5.0
"""Pause between polls where the issuer names none, and what `slow_down` adds (RFC 8628, 3.5)."""
MAX_INTERVAL_S = 60.0
RETRY_AFTER_S = 30.0
_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_LIMITS = (64, 1000, 1000, 4096)
"""Characters of the code for people, of its two pages, and of the code for the issuer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSignIn:
    """A sign-in that has begun. `code`: ours, for polling. `page`: where the person types
    `user_code`; `whole_page`: the same with the code in it, None if the issuer has none."""

    code: str
    issuer: str
    user_code: str
    page: str
    whole_page: str | None
    until: float
    interval_s: float


@dataclass(slots=True, kw_only=True)
class _Pending:
    issuer: str
    network: str
    until: float
    device_code: str = ""
    interval_s: float = INTERVAL_S
    next_at: float = math.inf


class DeviceSignIns:
    """The pending sign-ins. Owner: the event loop; what changes does so between awaits."""

    def __init__(self, issuers: SignInIssuers) -> None:
        self._issuers = issuers
        self._pending: dict[bytes, _Pending] = {}
        self._of_networks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<DeviceSignIns {len(self._pending)} pending>"

    async def begin(self, issuer: str | None, *, address: str, now: float) -> DeviceSignIn:
        """Ask an issuer for a code. Raises NotFound, InvalidInput, TooManyRequests, Unavailable,
        Unauthenticated."""
        client = self._issuers.client(issuer)
        code = secrets.token_urlsafe(32)
        name, digest = client.issuer.name, _digest(code)
        pending = self._reserve(digest, name, network_of(address), now)
        try:
            with refusals_of(name), self._issuers.attempts.attempt(address, now):
                answer = await client.request_device_code({"scope": " ".join(client.issuer.scopes)})
                shown = _shown(answer)
                if not is_endpoint(shown[1], of=client.issuer):
                    raise IssuerUnreachable("its page for devices is no https URL")
        except BaseException:
            self._remove(digest)
            raise
        pending.until = now + _seconds(answer.get("expires_in"), MAX_LASTS_S)
        pending.device_code = str(answer["device_code"])
        pending.interval_s = min(_seconds(answer.get("interval"), INTERVAL_S), MAX_INTERVAL_S)
        pending.next_at = now
        return DeviceSignIn(
            code=code,
            issuer=name,
            user_code=shown[0],
            page=shown[1],
            whole_page=shown[2] if is_endpoint(shown[2], of=client.issuer) else None,
            until=pending.until,
            interval_s=pending.interval_s,
        )

    async def poll(self, code: str, *, now: float) -> Identity | float:
        """Return who has signed in, or the seconds until it is worth asking again. Raises
        Unauthenticated, Forbidden, Unavailable."""
        self._evict_expired(now)
        digest = _digest(code)
        pending = self._pending.get(digest)
        if pending is None:
            raise Unauthenticated("this sign-in was used, refused, or has expired", hint=AGAIN)
        if now < pending.next_at:
            return min(pending.next_at - now, MAX_INTERVAL_S)
        pending.next_at = now + pending.interval_s  # also for polls that come meanwhile
        client = self._issuers.client(pending.issuer)
        form = {"grant_type": _GRANT, "device_code": pending.device_code}
        with refusals_of(pending.issuer):
            try:
                answer = await client.request_token(form)
            except GrantRefused as e:
                if e.code == "slow_down":
                    pending.interval_s = min(pending.interval_s + INTERVAL_S, MAX_INTERVAL_S)
                    pending.next_at = now + pending.interval_s
                if e.code in ("authorization_pending", "slow_down"):
                    return pending.interval_s
                self._remove(digest)
                raise
        self._remove(digest)
        return await self._issuers.identify(client, answer, nonce=None)

    def _reserve(self, digest: bytes, issuer: str, network: str, now: float) -> _Pending:
        self._evict_expired(now)
        if len(self._pending) >= MAX_PENDING or self._of_networks[network] >= MAX_OF_ADDRESS:
            whose = "" if len(self._pending) >= MAX_PENDING else " of this address"
            raise TooManyRequests(
                f"too many sign-ins{whose} are pending: end them, or try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        pending = _Pending(issuer=issuer, network=network, until=now + MAX_LASTS_S)
        self._pending[digest] = pending
        self._of_networks[network] += 1
        return pending

    def _evict_expired(self, now: float) -> None:
        for digest in [one for one, held in self._pending.items() if now >= held.until]:
            self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        pending = self._pending.pop(digest, None)
        if pending is None:
            return
        self._of_networks[pending.network] -= 1
        if not self._of_networks[pending.network]:
            del self._of_networks[pending.network]


def _shown(answer: Any) -> tuple[str, str, str]:
    """Return the code and the pages that people see. Raises IssuerUnreachable for what must not be
    printed at a terminal."""
    found = [
        answer.get(name) or ""
        for name in ("user_code", "verification_uri", "verification_uri_complete")
    ]
    texts = [*found, answer.get("device_code")]
    are_fine = all(
        isinstance(text, str) and text.isprintable() and len(text) <= limit
        for text, limit in zip(texts, _LIMITS, strict=True)
    )
    if not are_fine or not found[0] or not texts[3]:
        raise IssuerUnreachable("its answer for devices is not one of RFC 8628")
    return found[0], found[1], found[2]


def _seconds(value: Any, otherwise: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MAX_LASTS_S else otherwise


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()

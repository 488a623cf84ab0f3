"""Verifies the tokens of callers, and keeps the callers of verified ones.

A token is verified once, in a thread, and its caller is kept by the token's hash until it expires,
its key leaves the issuer's keys, or its tenant is gone. What strangers cost is bounded: tokens have
a maximum size; failures count as wrong API keys do, by address, and an address that used up its
attempts is refused before anything is verified; verifications that wait are bounded in all and by
address."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from activator.http.trusted_proxies import network_of
from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from activator.routing.api_keys import TOKEN_KEY, TokenPrincipal, token_in
from activator.routing.route_table import RouteTable
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.oidc.errors import IssuerUnreachable, OidcError, TokenRefused
from pilotlight.core.oidc.issuer_client import RETRY_S, IssuerClient
from pilotlight.core.oidc.settings import CallerRule, Issuer, claim_of, has_claims
from pilotlight.core.oidc.tokens import MAX_TOKEN_BYTES, read_token, verify_token
from pilotlight.protocol import KeyRecord
from pilotlight.spec.identifiers import Scope, require_customer

log = logging.getLogger(__name__)

MAX_CALLERS: Final = 8192
"""Callers that are kept; the one that was verified first is dropped first, and verified again."""
MAX_KEPT_S: Final = 3600.0
"""How long a caller is kept before its token is verified again."""
MAX_WAITING: Final = 256
"""Verifications that wait or run: each takes some tenths of a millisecond."""
MAX_OF_NETWORK: Final = 32
"""The same of one address (IPv6: of a /64)."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The caller of a token, until `until` (seconds since the epoch), while its issuer has the key
    with this thumbprint."""

    caller: TokenPrincipal
    client: IssuerClient
    thumbprint: str
    until: float


class TokenCallers:
    """The callers of verified tokens. Owner: the event loop; the thread runs pure functions."""

    def __init__(
        self,
        clients: Sequence[IssuerClient],
        *,
        table: RouteTable,
        unauthenticated: UnauthenticatedRateLimiter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clients`: of issuers with rules for callers. `clock`: seconds since the epoch."""
        self._clients = {client.issuer.issuer: client for client in clients}
        self._table = table
        self._unauthenticated = unauthenticated
        self._clock = clock
        self._verified: OrderedDict[bytes, VerifiedToken] = OrderedDict()
        self._of_keys: dict[str, TokenPrincipal] = {}
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._of_networks: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens")

    def __repr__(self) -> str:
        return (
            f"<TokenCallers of {len(self._clients)} issuers: {len(self._verified)} verified, "
            f"{len(self._running)} running>"
        )

    async def run(self) -> None:
        """Keep the issuers' keys fresh, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients.values():
                tasks.create_task(client.keep_fresh(), name=f"keys of {client.issuer.name}")

    async def aclose(self) -> None:
        """Cancel verifications, and close the connections to issuers."""
        await cancel_all(self._running.values())
        for client in self._clients.values():
            await client.aclose()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def cached_caller(self, authorization: bytes) -> TokenPrincipal | None:
        """Return the caller of a header whose token was verified before, and is still valid."""
        token = token_in(authorization)
        if not token or len(token) > MAX_TOKEN_BYTES:
            return None
        digest = hashlib.sha256(token).digest()
        found = self._verified.get(digest)
        if found is None:
            return None
        if not self._is_valid(found):
            del self._verified[digest]
            return None
        return found.caller

    def caller_of(self, key_id: str) -> TokenPrincipal | None:
        """Return the caller with this id, whose token was verified lately."""
        return self._of_keys.get(key_id)

    def _is_valid(self, found: VerifiedToken) -> bool:
        return (
            self._clock() < found.until
            and found.client.trusts(found.thumbprint)
            and self._table.tenants.named(found.caller.tenant_name) == found.caller.tenant
        )

    async def verify(self, authorization: bytes, address: str) -> None:
        """Verify the token of a header, if it has one that is not verified yet; afterwards it is
        cached. Raises Unauthenticated, TooManyRequests, Unavailable."""
        token = token_in(authorization)
        if not token or self.cached_caller(authorization) is not None:
            return
        self._unauthenticated.guard(address, time.monotonic())
        digest = hashlib.sha256(token[: MAX_TOKEN_BYTES + 1]).digest()
        task = self._running.get(digest) or self._start(token, digest, network_of(address))
        try:
            await asyncio.shield(task)
        except OidcError as e:
            self._unauthenticated.check(address, time.monotonic())
            if isinstance(e, IssuerUnreachable):
                raise errors.Unavailable(str(e), retry_after_s=RETRY_S) from e
            raise errors.Unauthenticated(f"{e}: get a new token, or use an API key") from e

    def _start(self, token: bytes, digest: bytes, network: str) -> asyncio.Task[None]:
        if len(self._running) >= MAX_WAITING or self._of_networks[network] >= MAX_OF_NETWORK:
            raise errors.TooManyRequests(
                "too many new tokens are being verified: try again", retry_after_s=1
            )

        def on_done(done: asyncio.Task[None]) -> None:
            del self._running[digest]
            self._of_networks[network] -= 1
            if not self._of_networks[network]:
                del self._of_networks[network]
            if not done.cancelled():
                done.exception()  # retrieved, also where no caller waits for it

        task = asyncio.create_task(self._verify(token, digest), name="token")
        self._running[digest] = task
        self._of_networks[network] += 1
        task.add_done_callback(on_done)
        return task

    async def _verify(self, token: bytes, digest: bytes) -> None:
        """Raises TokenRefused, IssuerUnreachable."""
        read = await self._in_thread(partial(read_token, token))
        client = self._clients.get(read.issuer)
        if client is None:
            raise TokenRefused("the token's issuer is not one whose tokens call functions here")
        key = await client.key_of(read)
        issuer, now = client.issuer, self._clock()
        audiences = [rule.audience for rule in issuer.callers]
        claims = await self._in_thread(
            partial(
                verify_token,
                read,
                key,
                issuer=issuer.issuer,
                audiences=audiences,
                now=now,
                leeway_s=issuer.leeway_s,
            )
        )
        until = min(claims["exp"] + int(issuer.leeway_s), now + MAX_KEPT_S)
        caller = self._caller(issuer, claims, until)
        self._keep(
            digest,
            VerifiedToken(caller=caller, client=client, thumbprint=key.thumbprint, until=until),
        )
        log.info(
            "event=token_verified issuer=%s key=%s subject=%r",
            issuer.name,
            caller.key_id,
            claims["sub"][:100],
        )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _keep(self, digest: bytes, verified: VerifiedToken) -> None:
        self._verified[digest] = verified
        self._of_keys[verified.caller.key_id] = verified.caller
        if len(self._verified) > MAX_CALLERS:
            self._verified.popitem(last=False)
        if len(self._of_keys) > 2 * MAX_CALLERS:
            self._of_keys = {one.caller.key_id: one.caller for one in self._verified.values()}

    def _caller(self, issuer: Issuer, claims: Mapping[str, Any], until: float) -> TokenPrincipal:
        """Return the caller by the first rule that fits a token. Raises TokenRefused."""
        audience = claims["aud"]
        named = audience if isinstance(audience, list) else [audience]
        for number, rule in enumerate(issuer.callers):
            if rule.audience in named and has_claims(claims, rule.claims):
                return self._caller_by(issuer.name, number, claims, until, rule=rule)
        raise TokenRefused(
            f"the token calls nothing here: no rule of issuers.{issuer.name}.callers fits"
        )

    def _caller_by(
        self, issuer: str, number: int, claims: Mapping[str, Any], until: float, *, rule: CallerRule
    ) -> TokenPrincipal:
        tenant = self._table.tenants.named(rule.tenant)
        if tenant is None:
            raise TokenRefused(
                f"issuers.{issuer}.callers[{number}]: there is no tenant {rule.tenant!r}"
            )
        customer = _customer_of(rule, claims)
        record = KeyRecord(
            id=key_id_of(issuer, number, claims["sub"], customer),
            hash="",
            tenant=tenant,
            scope=Scope.INVOKE.value,
            environment=rule.environment,
            app=rule.app,
            function=rule.function,
            customer=customer or None,
            expires_at=until,
        )
        return TokenPrincipal(record, tenant_name=rule.tenant)


def key_id_of(issuer: str, rule: int, subject: str, customer: str) -> str:
    """Return the id of a caller in the journal, in usage records and in quotas, of the form of
    TOKEN_KEY. Callers of one id have the same rights."""
    text = json.dumps([rule, subject, customer])
    return f"{TOKEN_KEY}{issuer}:{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _customer_of(rule: CallerRule, claims: Mapping[str, Any]) -> str:
    """Return the customer that a token names, "" where the rule asks for none. Raises
    TokenRefused."""
    if rule.customer_claim is None:
        return ""
    customer = claim_of(claims, rule.customer_claim)
    try:
        return require_customer(customer if isinstance(customer, str) else "")
    except errors.InvalidInput as e:
        raise TokenRefused(f"the token's claim {rule.customer_claim} is no id of a customer") from e

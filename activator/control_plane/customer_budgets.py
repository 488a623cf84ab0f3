"""Has the controller make the budgets that a customer gets with its first call
(`activator.billing.budgets.budgets.CustomerRegistrar`).

Callers may name any number of customers, and each that is new costs the controller a transaction: a
tenant may name PER_S new ones in a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from activator.control_plane.proxy import ControlPlaneProxy
from activator.quotas.token_bucket import Meter
from activator.routing.api_keys import Principal
from pilotlight import errors
from pilotlight.client.errors import error_from_response
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import CUSTOMER_BUDGETS_PATH, KeyRecord
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import Quotas

PER_S, BURST = 10.0, 200
"""New customers of one tenant at one activator."""
MAX_TENANTS = 1000
"""Tenants whose rates are kept, beyond which idle ones are dropped."""


class ControllerRegistrar:
    """Registers customers at the controller. Owner: the event loop."""

    def __init__(
        self,
        control: ControlPlaneProxy,
        *,
        token: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token`: the platform's, for the controller."""
        self._control = control
        self._proof = (HEADER_PLATFORM_TOKEN.encode(), token.encode())
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        self._pending: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<ControllerRegistrar {len(self._pending)} pending>"

    async def register(self, tenant: str, customer: str) -> None:
        """Have the budgets of a customer made; return once every activator has them. Calls for one
        customer share a request. Raises Unavailable, TooManyRequests."""
        asked = (tenant, customer)
        task = self._pending.get(asked)
        if task is None:
            self._count(tenant, customer)
            task = self._pending[asked] = asyncio.create_task(
                self._ask(tenant, customer), name="customer budgets"
            )
            task.add_done_callback(lambda done: self._on_done(asked, done))
        await asyncio.shield(task)

    def _on_done(self, asked: tuple[str, str], done: asyncio.Task[None]) -> None:
        del self._pending[asked]
        if not done.cancelled():
            done.exception()  # the callers that still wait raise it; there may be none

    def _count(self, tenant: str, customer: str) -> None:
        now = self._clock()
        meter = self._meters.get(tenant)
        if meter is None:
            if len(self._meters) >= MAX_TENANTS:
                self._meters = {
                    name: one for name, one in self._meters.items() if not one.is_idle(now)
                }
            quotas = Quotas(requests_per_s=PER_S, burst=BURST)
            meter = self._meters[tenant] = Meter(quotas, now)
        meter.requests = min(meter.depth, meter.requests + max(0.0, now - meter.at) * meter.per_s)
        meter.at = now
        if meter.requests < 1:
            raise errors.TooManyRequests(
                f"this tenant names more than {PER_S:g} new customers in a second: retry",
                retry_after_s=(1 - meter.requests) / meter.per_s,
                customer=customer,
            )
        meter.requests -= 1

    async def _ask(self, tenant: str, customer: str) -> None:
        caller = Principal(KeyRecord(id="", hash="", tenant=tenant, scope=Scope.INVOKE.value))
        body = {"tenant": tenant, "customer": customer}
        response = await self._control.post_json(CUSTOMER_BUDGETS_PATH, caller, self._proof, body)
        if response.is_error:
            raise error_from_response(
                response.status_code, dict(response.headers), response.content
            )

"""Routes for named webhooks, which receive an environment's events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Response
from pydantic import Field

from pilotlight.controller.api.account.budgets import Tested, post_example
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    Context,
    Ctx,
    Deployer,
    RequestId,
)
from pilotlight.controller.database import audit_trail
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.webhooks import deliveries, endpoints, webhook_sender
from pilotlight.controller.webhooks.deliveries import Delivery
from pilotlight.controller.webhooks.endpoints import Webhook
from pilotlight.controller.webhooks.webhook_sender import WebhookMessage
from pilotlight.protocol import new_call_id
from pilotlight.spec.identifiers import Scope

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])
Name = Annotated[str, Path(max_length=63)]


class WebhookRequest(Body):
    """A complete webhook."""

    url: str = Field(description="URL to which messages are posted (Standard Webhooks)")
    events: list[str] = Field(
        default_factory=list,
        description="such as `call.finished`, `slo.*`, `*`; empty: only calls that name this "
        "webhook",
    )
    new_secret: bool = Field(default=False, description="replace the secret that signs messages")


class WebhookInfo(Body):
    """A named webhook."""

    name: str
    environment: str
    url: str = Field(description="the full URL for administrators, only the host for others")
    events: list[str]
    created_by: str
    created_at: float


class WebhookSet(WebhookInfo):
    """A webhook that was set. `secret` signs its messages and is shown only once; null:
    unchanged."""

    secret: str | None


class WebhookList(Body):
    """The webhooks of an environment."""

    webhooks: list[WebhookInfo]


class DeliveryInfo(Body):
    """The delivery of one event to one webhook. `delivered_at` and `next_attempt_at` both null:
    delivery was abandoned."""

    id: str
    webhook: str
    event: str
    data: str = Field(description="JSON text")
    at: float
    delivered_at: float | None
    next_attempt_at: float | None
    attempts: int
    error: str | None


class DeliveryList(Body):
    """Deliveries, newest first."""

    deliveries: list[DeliveryInfo]


@router.get("")
def list_webhooks(context: Ctx, caller: Deployer) -> WebhookList:
    """List the webhooks of the environment."""
    caller.require_whole_environment()
    with context.store.read() as sql:
        found = endpoints.listing(sql, tenant=caller.tenant, environment=caller.environment)
    return WebhookList(webhooks=[WebhookInfo(**_info(one, caller)) for one in found])


@router.put("/{name}", dependencies=[REQUIRE_DISK_SPACE])
def set_webhook(
    context: Ctx, caller: Admin, request: RequestId, name: Name, body: WebhookRequest
) -> WebhookSet:
    """Create or update a webhook."""
    caller.require_whole_environment()
    webhook_sender.check_url(body.url, policy=context.config.settings.webhooks)
    with context.store.write() as write:
        placed = endpoints.put(
            write,
            key=context.key,
            tenant=caller.tenant,
            environment=caller.environment,
            name=name,
            url=body.url,
            events=body.events,
            new_secret=body.new_secret,
            actor=caller.key,
            request=request,
        )
    return WebhookSet(**_info(placed.webhook, caller), secret=placed.secret)


@router.delete("/{name}", status_code=204)
def delete_webhook(context: Ctx, caller: Admin, request: RequestId, name: Name) -> Response:
    """Delete a webhook, with its undelivered messages."""
    caller.require_whole_environment()
    with context.store.write() as write:
        endpoints.delete(
            write,
            tenant=caller.tenant,
            environment=caller.environment,
            name=name,
            actor=caller.key,
            request=request,
        )
    return Response(status_code=204)


@router.post("/{name}:test")
async def test_webhook(context: Ctx, caller: Admin, request: RequestId, name: Name) -> Tested:
    """Post a signed example (`type`: `webhook.test`) to a webhook once, and return the result."""
    caller.require_whole_environment()
    message, found = await context.threads.run(
        caller.tenant, _example, context, caller, name, request
    )
    secret = context.key.webhooks.open(found.sealed_secret)
    return await post_example(context, message, url=found.url, secret=secret)


@router.get("/{name}/deliveries")
def list_deliveries(
    *,
    context: Ctx,
    caller: Deployer,
    name: Name,
    failed: Annotated[bool | None, Query(description="only abandoned deliveries")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> DeliveryList:
    """List a webhook's deliveries, including those for a webhook that a call named but that does
    not exist."""
    caller.require_whole_environment()
    with context.store.read() as sql:
        found = deliveries.listing(
            sql,
            tenant=caller.tenant,
            environment=caller.environment,
            webhook=name,
            is_failed=failed,
            limit=limit,
        )
        if not found:
            endpoints.get(sql, tenant=caller.tenant, environment=caller.environment, name=name)
    return DeliveryList(deliveries=[_delivery(one) for one in found])


def _example(
    context: Context, caller: Principal, name: str, request: str
) -> tuple[WebhookMessage, Webhook]:
    with context.store.write() as write:
        found = endpoints.get(
            write.sql, tenant=caller.tenant, environment=caller.environment, name=name
        )
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="webhook.test",
            subject=name,
            request=request,
        )
        now = write.now
    data = {"webhook": name, "environment": caller.environment, "events": list(found.events)}
    return WebhookMessage(id=f"test-{new_call_id()}", type="webhook.test", at=now, data=data), found


def _info(one: Webhook, caller: Principal) -> dict[str, Any]:
    shown = one.url if caller.scope is Scope.ADMIN else webhook_sender.host_of(one.url)
    named = {
        name: getattr(one, name) for name in ("name", "environment", "created_by", "created_at")
    }
    return {**named, "url": shown, "events": list(one.events)}


def _delivery(one: Delivery) -> DeliveryInfo:
    named = {
        name: getattr(one, name)
        for name in (
            "id",
            "webhook",
            "event",
            "at",
            "delivered_at",
            "next_attempt_at",
            "attempts",
            "error",
        )
    }
    return DeliveryInfo(**named, data=one.body)

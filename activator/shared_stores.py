"""Which stores an activator shares with others: those in Redis, or its own where it is alone.

Redis need not be reachable yet: `activator.without_redis` defines the behaviour until it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from activator.billing.service import SharedBudgets
from activator.context import ActivatorContext
from activator.coordination.state import platform_id
from activator.idempotency.process_store import ProcessIdempotency
from activator.idempotency.store_protocol import IdempotencyStore
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.store_protocol import QuotaStore
from activator.settings import ActivatorSettings

if TYPE_CHECKING:
    from activator.coordination.redis_state import RedisState
    from activator.response_cache.redis_store import RedisResponses


def shared_state(settings: ActivatorSettings, context: ActivatorContext) -> RedisState | None:
    """Return the shared state; None for a single activator."""
    if settings.activators == 1 or settings.redis_url is None:
        return None
    from activator.coordination.redis_state import RedisState

    return RedisState(
        settings.redis_url, platform=platform_id(context.key.token), member=context.id
    )


def quota_store(settings: ActivatorSettings, context: ActivatorContext) -> QuotaStore:
    """Return the store that counts quotas."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return ProcessQuotas()
    from activator.quotas.redis_store import RedisQuotas

    return RedisQuotas(
        settings.redis_url,
        platform=platform_id(context.key.token),
        member=context.id,
        is_open=settings.is_open_without_redis,
    )


def idempotency_store(settings: ActivatorSettings, context: ActivatorContext) -> IdempotencyStore:
    """Return the store of answers to repeated requests: in the process for a single activator."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return ProcessIdempotency(tenant_bytes=settings.idempotency_bytes)
    from activator.idempotency.redis_store import RedisIdempotency

    return RedisIdempotency(
        settings.redis_url,
        platform=platform_id(context.key.token),
        sealer=context.key.replies,
        tenant_bytes=settings.idempotency_bytes,
        total_bytes=settings.idempotency_total_bytes,
    )


def shared_responses(
    settings: ActivatorSettings, context: ActivatorContext
) -> RedisResponses | None:
    """Return the store of answers that activators share; None where there is no Redis for it."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return None
    from activator.response_cache.redis_store import RedisResponses

    return RedisResponses(
        settings.redis_url,
        platform=platform_id(context.key.token),
        sealer=context.key.replies,
        total_bytes=settings.response_cache_redis_bytes,
    )


def shared_budgets(settings: ActivatorSettings, context: ActivatorContext) -> SharedBudgets | None:
    """Return the shared budget store; None where no other activator spends from the same
    budgets."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return None
    from activator.billing.budgets.redis_leases import RedisMoney

    store = RedisMoney(
        settings.redis_url, platform=platform_id(context.key.token), member=context.id
    )
    return SharedBudgets(store=store, is_open=settings.is_open_without_redis("budget"))

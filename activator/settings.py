"""Section `activator` and section `prices` of platform.yaml, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from pilotlight.pricing import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatorSettings:
    """How the data plane behaves.

    Attributes:
        listen: host:port of the one URL that users know; port 0 picks a free one.
        metrics_listen: host:port of Prometheus text; None = off.
        activators: processes; more than one needs redis_url, and is refused without.
        redis_url: shared state of several activators; None = everything in the process.
        max_body_bytes: a request's body; larger is answered 413 before anything is started.
        max_header_bytes: request line and headers together; larger closes the connection with 431.
        header_timeout_s: from the first byte of a request to the end of its headers.
        body_timeout_s: from the first to the last byte of a body.
        max_connections_per_address: open connections of one peer address.
        max_queued: calls that may wait in this process, all functions together.
        max_pending_submits: submitted calls not yet finished in this process.
        unauthenticated_per_s: requests without a valid key, per address, before 429; the burst is twice that.
        journal_sync_s: interval of the journal's group commit: the loss window of a power failure.
        scaledown_window_s: idle time that the platform gives away; beyond it a function pays for idling.
    """

    listen: str = "127.0.0.1:8700"
    metrics_listen: str | None = "127.0.0.1:8701"
    activators: int = 1
    redis_url: str | None = None
    max_body_bytes: int = 10 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    max_connections_per_address: int = 4096
    max_queued: int = 20_000
    max_pending_submits: int = 100_000
    unauthenticated_per_s: float = 50.0
    journal_sync_s: float = 0.05
    scaledown_window_s: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"listen = {self.listen!r}: write host:port")
        for name in ("activators", "max_body_bytes", "max_header_bytes", "max_connections_per_address", "max_queued"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("header_timeout_s", "body_timeout_s", "unauthenticated_per_s", "journal_sync_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be greater than 0")
        if self.activators > 1 and not self.redis_url:
            raise ValueError("activators = more than 1 needs redis_url: set it, or run one activator")
        if self.activators > 1 and self.port == 0:
            raise ValueError(f"listen = {self.listen!r}: several activators share one port: name it, or run one activator")
        if self.redis_url is not None and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("redis_url = ***: write redis://, rediss:// or unix://")

    def metrics_address(self, index: int) -> tuple[str, int] | None:
        """Host and port of activator `index`'s metrics: the port counts up, port 0 picks a free one for each; None = off."""
        if not self.metrics_listen:
            return None
        host, _, port = self.metrics_listen.rpartition(":")
        return host, int(port) + index if int(port) else 0

    @property
    def host(self) -> str:
        """The address part of `listen`."""
        return self.listen.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port part of `listen`."""
        return int(self.listen.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSettings:
    """Section `prices`: decimals as text, so that nothing passes through binary floating point."""

    version: str = "2026-11"
    currency: str = "USD"
    cpu_core_s: str = "0.0000131"
    memory_gib_s: str = "0.00000222"
    gpu_s: Mapping[str, str] = field(default_factory=dict)
    request: str = "0"
    idle_factor: str = "1"

    def __post_init__(self) -> None:
        for name in ("cpu_core_s", "memory_gib_s", "request", "idle_factor"):
            _decimal(name, getattr(self, name))
        for gpu, rate in self.gpu_s.items():
            _decimal(f"gpu_s.{gpu}", rate)

    def rates(self) -> Rates:
        """As the record that prices calls."""
        return Rates(
            version=self.version,
            currency=self.currency,
            cpu_core_s=Decimal(self.cpu_core_s),
            memory_gib_s=Decimal(self.memory_gib_s),
            gpu_s={gpu: Decimal(rate) for gpu, rate in self.gpu_s.items()},
            request=Decimal(self.request),
            idle_factor=Decimal(self.idle_factor),
        )


def _decimal(key: str, text: str) -> None:
    try:
        value = Decimal(text)
    except (InvalidOperation, TypeError) as e:
        raise ValueError(f'{key} = {text!r}: write a decimal number in quotes, like "0.0000131"') from e
    if not value.is_finite() or value < 0:
        raise ValueError(f"{key} = {text!r}: must be 0 or more")

"""Section `activator` of platform.yaml, as a frozen record."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotlight.core.settings import read_secret

WITHOUT_REDIS: Mapping[str, str] = {
    "requests": "open",
    "concurrent": "open",
    "tokens": "open",
    "budget": "closed",
}
"""Default behaviour of each kind of bound while Redis does not answer."""

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "drain_s": (0, 3600),
    "shutdown_s": (1, 86_400),
    "argument_check_s": (0.1, 60),
    "guard_deadline_s": (0.05, 60),
    "stranger_connections": (2, 192),
    "submitted_bytes": (2**20, 2**40),
    "tenant_submitted_bytes": (2**20, 2**40),
    "waiting_bytes": (2**20, 2**40),
    "tenant_waiting_bytes": (2**20, 2**40),
    "idempotency_bytes": (2**22, 2**40),
    "idempotency_total_bytes": (2**22, 2**40),
    "response_cache_bytes": (2**20, 2**40),
    "response_cache_redis_bytes": (2**20, 2**40),
    "prediction_log_bytes": (2**20, 2**40),
    "prediction_log_ship_s": (0.1, 3600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatorSettings:
    """How the data plane behaves.

    Attributes:
        listen: host:port of the one URL that users know; a loopback address stands for 127.0.0.1
            and [::1]; port 0 picks a free one.
        metrics_listen: host:port of Prometheus text, behind a bearer token
            (`platform.metrics_token_file`); None = only on `<run>/metrics-activator.sock`
            (`metrics-activator-1.sock`, … of several on one machine).
        activators: number of processes; more than one requires redis_url.
        redis_url: shared state of several activators; None = everything in the process.
        redis_url_file: file that contains it, such as a mounted Secret; None = use `redis_url`.
        sibling_url: URL of the other activators of a cluster, with `{index}` (0, 1, …) or
            `{member}` (a-0, a-1, …) in it; None = on this machine, behind their sockets. Needs
            `platform.tls_*`.
        sibling_listen: host:port at which the other activators reach this one, with mutual TLS;
            None = only this machine.
        agents_listen: host:port at which node agents of a cluster pass on the calls that functions
            in pods make, with mutual TLS (`platform.tls_*`); None = such functions need a key.
        grpc_listen: host:port of the Open Inference Protocol over gRPC, which a process of its own
            serves; without TLS, as `listen` is. None = it is off.
        max_body_bytes: limit of a request's body; a larger one is answered 413 before any start.
        max_header_bytes: limit of request line and headers together; more closes the connection
            with 431.
        header_timeout_s: from the first byte of a request to the end of its headers.
        body_timeout_s: from the first to the last byte of a body; under `/fn/` a second more for
            each 64 KiB of it.
        argument_check_s: time limit of an expensive check of a call's arguments, which runs in its
            own process.
        guard_on_error: what happens to a prompt or an answer whose guard cannot be asked: `refuse`
            it, or `allow` it unchecked.
        guard_deadline_s: how long the function of a guard may take, its start included.
        max_connections_per_address: open connections per peer address.
        max_call_depth: most calls between a call from outside and the last of functions that call
            each other; a deeper one is answered 400.
        max_queued: calls that may wait in this process, all functions together.
        max_pending_submits: submitted calls that this process is responsible for, all tenants
            together; one tenant may have half of it.
        submitted_bytes: their bodies and results, at least 4 KiB for each call, all tenants
            together.
        tenant_submitted_bytes: the same for one tenant.
        waiting_bytes: memory for bodies of requests answered here, from reading to answer, all
            tenants together.
        tenant_waiting_bytes: the same for one tenant.
        unauthenticated_per_s: requests without a valid key, per address, before 429; the burst is
            twice that.
        trusted_proxies: networks (or addresses) whose X-Forwarded-For names the caller; empty = the
            peer is always the caller.
        stranger_connections: of the 256 connections to the controller, those that requests without
            a known key may use.
        journal_sync_s: interval of the journal's group commit: the loss window of a power failure.
        scaledown_window_s: idle time that is not billed; beyond it a function pays for idling.
        freeze_idle_s: seconds without a call, stream or WebSocket after which the processes of an
            instance are frozen until the next call; None = never. Not for language models' engines,
            and on this machine only.
        quota_store: where quotas and budgets are counted: `process`, `redis`, or `auto` (redis with
            several activators).
        without_redis: behaviour of each kind of bound (`requests`, `concurrent`, `tokens`,
            `budget`) while Redis does not answer: `open` (each activator counts for itself) or
            `closed` (503). Kinds that are not listed keep their default.
        journal_full: `refuse` calls that cannot be journalled (503), or `serve` them unbilled.
        metrics_series: tenants and functions that have their own metrics; the others are summed as
            `other`.
        breaker_error_ratio: failed share of the calls of a revision, an instance or a node above
            which it gets no calls.
        breaker_min_calls: calls in 10 s below which a breaker does not open.
        breaker_open_s: first pause before a probe; it doubles with every failed probe, up to 32
            times.
        retry_budget: retries that a caller may cause, as a share of its calls.
        idempotency_ttl_s: how long an answer is stored for a repeat with the same Idempotency-Key.
        idempotency_bytes: stored size of these answers of one tenant; beyond it its oldest are
            evicted.
        idempotency_total_bytes: stored size of those of all tenants in Redis; beyond it the oldest
            of the tenant with the most are evicted.
        response_cache_bytes: memory for answers that are kept for equal calls (`cache`), or for
            failures (a cached fallback); beyond it the longest unused of the tenant with the most
            are dropped.
        response_cache_redis_bytes: stored size of the answers that activators share in Redis.
        traces_sampled: share of the calls whose trace is stored although they were neither slow,
            failed nor cold.
        prediction_log_bytes: disk for rows of prediction logs that are not in the blob store yet;
            one tenant may have half of it. Further rows are dropped.
        prediction_log_ship_s: how long rows are collected in one file before it is shipped.
        heartbeat_s: silence on a stream of events after which a comment is sent, so that proxies
            keep the connection open.
        engine_scrape_s: interval at which the metrics of an inference engine with calls are read;
            idle ones each 15 s.
        engine_kv_use: target share of an engine's KV memory; running calls still grow.
        affinity_load: how far above the average an instance may be loaded by prompts with the same
            prefix before other instances share them.
        drain_s: how long calls are still accepted after SIGTERM while `/readyz` fails, so that load
            balancers notice.
        shutdown_s: after that, how long running calls may continue; waiting calls are answered 503
            a little earlier.
        otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) that also gets the stored
            traces; None = none.
    """

    listen: str = "127.0.0.1:8700"
    metrics_listen: str | None = None
    activators: int = 1
    redis_url: str | None = None
    redis_url_file: str | None = None
    sibling_url: str | None = None
    sibling_listen: str | None = None
    agents_listen: str | None = None
    grpc_listen: str | None = None
    max_body_bytes: int = 10 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    argument_check_s: float = 2.0
    guard_on_error: str = "refuse"
    guard_deadline_s: float = 2.0
    max_connections_per_address: int = 4096
    max_call_depth: int = 16
    max_queued: int = 20_000
    max_pending_submits: int = 100_000
    submitted_bytes: int = 4 * 1024**3
    tenant_submitted_bytes: int = 1024**3
    waiting_bytes: int = 1024**3
    tenant_waiting_bytes: int = 512 * 1024**2
    unauthenticated_per_s: float = 50.0
    trusted_proxies: list[str] = field(default_factory=list)
    stranger_connections: int = 64
    journal_sync_s: float = 0.05
    scaledown_window_s: float = 60.0
    freeze_idle_s: float | None = None
    quota_store: str = "auto"
    without_redis: Mapping[str, str] = field(default_factory=lambda: dict(WITHOUT_REDIS))
    journal_full: str = "refuse"
    metrics_series: int = 1000
    breaker_error_ratio: float = 0.5
    breaker_min_calls: int = 20
    breaker_open_s: float = 5.0
    retry_budget: float = 0.2
    idempotency_ttl_s: float = 86_400.0
    idempotency_bytes: int = 64 * 1024**2
    idempotency_total_bytes: int = 256 * 1024**2
    response_cache_bytes: int = 64 * 1024**2
    response_cache_redis_bytes: int = 64 * 1024**2
    traces_sampled: float = 0.01
    prediction_log_bytes: int = 256 * 1024**2
    prediction_log_ship_s: float = 60.0
    heartbeat_s: float = 10.0
    engine_scrape_s: float = 2.0
    engine_kv_use: float = 0.9
    affinity_load: float = 1.25
    otlp_endpoint: str | None = None
    drain_s: float = 0.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "redis_url", read_secret("redis_url", self.redis_url, self.redis_url_file)
        )
        self._check_words()
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"listen = {self.listen!r}: write host:port")
        for name in (
            "activators",
            "max_body_bytes",
            "max_header_bytes",
            "max_connections_per_address",
            "max_call_depth",
            "max_queued",
            "metrics_series",
            "max_pending_submits",
            "breaker_min_calls",
            "affinity_load",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("breaker_error_ratio", "retry_budget", "traces_sampled", "engine_kv_use"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be between 0 and 1")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(
            ("http://", "https://")
        ):
            raise ValueError(f"otlp_endpoint = {self.otlp_endpoint!r}: write http:// or https://")
        positive = (
            "header_timeout_s",
            "body_timeout_s",
            "unauthenticated_per_s",
            "journal_sync_s",
            "breaker_open_s",
            "idempotency_ttl_s",
            "heartbeat_s",
            "engine_scrape_s",
            "engine_kv_use",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be greater than 0")
        if self.activators > 1 and not self.redis_url:
            raise ValueError(
                "activators = more than 1 needs redis_url: set it, or run one activator"
            )
        if self.activators > 1 and self.port == 0:
            raise ValueError(
                f"listen = {self.listen!r}: several activators share one port: set a fixed port, "
                f"or run one activator"
            )
        self._check_siblings()
        if self.redis_url is not None and not self.redis_url.startswith(
            ("redis://", "rediss://", "unix://")
        ):
            raise ValueError("redis_url = ***: write redis://, rediss:// or unix://")

    def _check_siblings(self) -> None:
        url, listen = self.sibling_url, self.sibling_listen
        if url is not None and not (
            url.startswith("https://") and ("{index}" in url or "{member}" in url)
        ):
            raise ValueError(
                f"sibling_url = {url!r}: write https://…{{index}}…:port, or {{member}} for a-0, "
                f"a-1, …"
            )
        if listen is not None and not listen.rpartition(":")[2].isdigit():
            raise ValueError(f"sibling_listen = {listen!r}: must be host:port, or null")
        for name in ("agents_listen", "grpc_listen"):
            given = getattr(self, name)
            if given is not None and not _is_address(given):
                raise ValueError(f"{name} = {given!r}: must be host:port, or null")
        if url is not None and listen is None:
            raise ValueError(
                f"sibling_url = {url!r}: needs sibling_listen, the address at which the other "
                f"activators reach this one"
            )

    def _check_words(self) -> None:
        for text in self.trusted_proxies:
            _check_network(text)
        if self.metrics_listen is not None and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError(f"metrics_listen = {self.metrics_listen!r}: write host:port, or null")
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from {least} to {most}")
        if self.freeze_idle_s is not None and not 1 <= self.freeze_idle_s <= 86_400:
            raise ValueError(
                f"freeze_idle_s = {self.freeze_idle_s}: must be from 1 to 86400, or null to never "
                f"freeze idle instances"
            )
        for name, words in (
            ("quota_store", ("auto", "process", "redis")),
            ("journal_full", ("refuse", "serve")),
            ("guard_on_error", ("refuse", "allow")),
        ):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: must be one of {', '.join(words)}"
                )
        for kind, word in self.without_redis.items():
            if kind not in WITHOUT_REDIS or word not in ("open", "closed"):
                kinds = ", ".join(WITHOUT_REDIS)
                raise ValueError(
                    f"without_redis.{kind} = {word!r}: kinds are {kinds}; write 'open' or "
                    f"'closed' for each"
                )
        if self.quota_store == "redis" and not self.redis_url:
            raise ValueError("quota_store = 'redis': needs redis_url")
        if self.quota_store == "process" and self.activators > 1:
            raise ValueError(
                "quota_store = 'process': several activators would each grant the whole quota; "
                "write auto or redis"
            )

    @property
    def counts_in_redis(self) -> bool:
        """Whether quotas and budgets are counted in Redis."""
        return self.quota_store == "redis" or (self.quota_store == "auto" and self.activators > 1)

    def is_open_without_redis(self, kind: str) -> bool:
        """Whether bounds of this kind are counted by each activator for itself while Redis does not
        answer."""
        return {**WITHOUT_REDIS, **self.without_redis}[kind] == "open"

    def metrics_listen_of(self, index: int) -> str | None:
        """`host:port` of activator `index`'s metrics: the port counts up, port 0 picks a free one
        for each; None = no TCP."""
        if self.metrics_listen is None:
            return None
        host, _, port = self.metrics_listen.rpartition(":")
        return f"{host}:{int(port) + index if int(port) else 0}"

    @property
    def host(self) -> str:
        """The address part of `listen`."""
        return self.listen.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port part of `listen`."""
        return int(self.listen.rpartition(":")[2])


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()


def _check_network(text: str) -> None:
    try:
        network = ipaddress.ip_network(
            str(text)
        )  # ip_network() would accept a number as an address
    except ValueError as e:
        raise ValueError(
            f"trusted_proxies = {text!r}: {e}: write networks such as 10.0.0.0/8, or addresses"
        ) from e
    if not network.prefixlen:
        raise ValueError(
            f"trusted_proxies = {text!r}: would trust X-Forwarded-For from every peer: list your "
            f"proxies' networks"
        )

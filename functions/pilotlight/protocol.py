"""Names that cross process boundaries: headers, content types, paths, and the records that travel.

Who speaks what:
- caller → activator: the public HTTP API (DESIGN §5), errors as `application/problem+json` (RFC
  9457).
- activator → worker: HTTP/1.1 over the instance's Unix socket, paths `WORKER_*` below.
- activator → controller: HTTP over the controller's Unix socket: `/internal/*` with the platform
  token (feed, usage, call results), and every public path that is not the data plane's, passed
  through.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

# -- caller → activator ----------------------------------------------------------------------------
HEADER_REQUEST_ID = "x-request-id"
HEADER_REVISION = "pilotlight-revision"
HEADER_START = "pilotlight-start"
HEADER_COST = "pilotlight-cost"
HEADER_ENVIRONMENT = "pilotlight-environment"
HEADER_TIMEOUT = "pilotlight-timeout"
"""Seconds (decimal) that the caller is ready to wait in all; cut to the function's own clocks."""
HEADER_SERVER_TIMING = "server-timing"
HEADER_PRIORITY = "pilotlight-priority"
"""`realtime`, `standard` or `batch`: at most what the tenant's plan allows."""
HEADER_RATE_LIMIT = "ratelimit"
HEADER_RATE_LIMIT_POLICY = "ratelimit-policy"
"""The quotas that apply and what is left of them (draft-ietf-httpapi-ratelimit-headers)."""
HEADER_TAG = "pilotlight-tag"
"""A caller of the function's own tenant asks for the revision that has this tag (or this name),
whatever the weights."""
HEADER_ARM = "pilotlight-arm"
"""On an answer, and on the request to the worker: the arm of the experiment that the caller is
in."""
HEADER_DEGRADED = "pilotlight-degraded"
"""On an answer that came from a variant or a fallback: `variant=<function>`, `function=<function>`,
`cached` or `static`."""
HEADER_IDEMPOTENCY_KEY = "idempotency-key"
"""Of a mutating request: a repeat with the same key and body gets the first one's answer
(draft-ietf-httpapi-idempotency-key-header)."""
HEADER_REPLAYED = "idempotency-replayed"
"""`true` on an answer that was given before."""
HEADER_WEBHOOK = "pilotlight-webhook"
"""Of a submitted call: name of the webhook that is told when it ends."""
TENANT_PATH = "/t/"
"""`/t/<tenant name>/v1/functions/…` and `/t/<tenant name>/fn/…`: a function that another tenant
shares, or that is public."""

CONTENT_JSON = "application/json"
CONTENT_PROBLEM = "application/problem+json"
CONTENT_NDJSON = "application/x-ndjson"
CONTENT_SSE = "text/event-stream"
CONTENT_PICKLE = "application/vnd.pilotlight.pickle"
"""cloudpickle bytes of `(args, kwargs)` in, of the value out; opened only in the tenant's worker
and in the SDK that asked.

Accepted from callers of the function's own tenant only (HEADER_TRUSTED_PICKLE)."""
CONTENT_PICKLE_STREAM = "application/vnd.pilotlight.pickle-stream"
"""A generator's items: each a 4-byte big-endian length, then that many cloudpickle bytes; length
0xFFFFFFFF precedes a pickled exception."""

PROBLEM_BASE = "https://pilotlight.dev/problems/"

# -- activator → worker ----------------------------------------------------------------------------
WORKER_INVOKE = "/invoke/"
"""`POST /invoke/<method>` ("" for a plain function). Body and answer by content type: JSON,
pickle."""
WORKER_ASGI = "/asgi"
"""Prefix under which an ASGI function's own paths are served; `root_path` tells it the public
prefix."""
WORKER_HEALTH = "/health"
WORKER_STATUS = "/pilotlight/health"
"""`GET` → `{"instance", "running", "start_kind", "phases_ms"}`, of every kind of function: what
probes and claims ask. Of an engine, whose bytes are handed through, it must be the first request of
its connection, which is closed after it."""
HEADER_CALL = "pilotlight-call"
"""The call's id, so that log lines carry it."""
HEADER_TRUSTED_PICKLE = "pilotlight-trusted-pickle"
"""`1` on a request whose body is a pickle from the function's own tenant. Only activators set it,
after they checked the caller's tenant. A worker opens no pickle without it, and no header of this
name that a caller sends reaches a worker."""
HEADER_OUTCOME = "pilotlight-outcome"
"""`ok`; `raised` (user code raised; body is a problem document or a pickled exception); `invalid`
(arguments do not fit); or `busy` (503: more calls than `max_inputs` are running, none of this one's
code ran: safe to send elsewhere)."""
HEADER_FINISH = "pilotlight-finish"
"""Behind a worker's stream, as a trailer (RFC 9112 §7.1.2): `stop`, or `error` where the generator
raised, or was cut off."""
HEADER_ROOT_PATH = "pilotlight-root-path"
HEADER_DEADLINE = "pilotlight-deadline-s"
"""Seconds left to the execution clock when dispatched."""
HEADER_ATTEMPT = "pilotlight-attempt"
"""Which attempt of the call this is, from 1; left out on the first."""
HEADER_BATCH = "pilotlight-batch"
"""On a worker's answer to a batched call:
`size=8;wait_ms=4.1;held_ms=2.0;compute_ms=12.3;reason=full;first=1`. `held_ms`: the part of the
wait in which the batch could have run; `first=1` on one answer of each batch."""
HEADER_SPANS = "pilotlight-spans"
"""On a worker's answer: what user code recorded as spans of the call, base64 of JSON; asked for by
a sampled `traceparent`."""

# -- activator → controller ------------------------------------------------------------------------
FEED_PATH = "/internal/feed"
"""`GET ?after=<seq>&wait_s=<s>` → `{"seq": n, "reset": bool, "changes": [FeedChange…]}`; `reset`
means: forget all, this is everything."""
USAGE_PATH = "/internal/usage"
"""`POST {"activator": id, "records": [UsageRecord…]}` → `{"accepted": n, "budgets": {budget id:
BudgetState as JSON}}`; a record already there is counted as accepted, and in `batch`. `budgets`
names those that a record of this batch falls under."""
BUDGETS_PATH = "/internal/budgets"
"""`GET` → `{"budgets": {budget id: BudgetState as JSON}}`: what the ledger has of every budget's
current period."""
CALLS_PATH = "/internal/calls"
"""`POST {"calls": [CallRecord…]}` → `{"accepted": n}`: states and results of submitted calls; the
newest `sequence` wins."""
OBSERVATIONS_PATH = "/internal/observations"
"""`POST {"activator": id, "life": text, "sequence": n, "observations": [Observation…]}` →
`{"accepted": bool}`: what calls looked like since the last post; a sequence that was there already
is not counted twice (`pilotlight.spec.observations`)."""
TRACES_PATH = "/internal/traces"
"""`POST {"activator": id, "traces": [...]}` → `{"accepted": n}`: traces that were kept."""
DUE_PATH = "/internal/due"
"""`GET ?activator=<id>&wait_s=<s>` → `{"calls": [...]}`: submitted calls that the control plane
began (schedules, dead letters sent again), claimed for this activator, without those of tenants
that it names (`&without=<tenant>`, repeated); `POST {"activator": id, "ids": [...]}` says that they
are in its journal. `PUT {"activator": id, "calls": [...]}` gives back what an activator that is
gone for good had not finished, as its journal holds them: others run them."""
MAX_WITHOUT = 200
"""Tenants that one question leaves out: as many fit into an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChange:
    """One change that activators follow.

    Attributes:
        seq: position; strictly rising. kind: `function`, `key`, `tenant`, `secret`, `quota` or
        `budget`. key: `<tenant>/<environment>/<app>/<function>` (function, quota), a key id, a
        tenant id, `<tenant>/<environment>/<secret name>`,
            or a budget id.
        value: the document (`FunctionRoute`, `KeyRecord`, `TenantRecord`,
        `pilotlight.spec.quotas.Quotas`, `BudgetRecord` as JSON; a secret's
            sealed text), None = removed.
    """

    seq: int
    kind: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key as the activator needs it.

    Attributes:
        hash: sha256 (hex) of the whole secret text. environment, app, function: the only one that
        it reaches; None = all. A function only together with its app. quotas: of this key alone
        (`pilotlight.spec.quotas.Quotas` as JSON).
    """

    id: str
    hash: str
    tenant: str
    scope: str
    environment: str | None = None
    expires_at: float | None = None
    app: str | None = None
    function: str | None = None
    quotas: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """A tenant.

    Attributes:
        uid: on nodes; None: the platform's own. plan: what it may use and how it is treated
        (`pilotlight.spec.quotas.Plan` as JSON, its own overrides included); {} = no limits.
        suspended: its calls are answered 403.
    """

    id: str
    name: str
    uid: int | None
    plan: Mapping[str, Any] = field(default_factory=dict)
    suspended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """A budget as the activator needs it. "" in `environment`, `app` and `function` covers all of
    them.

    Attributes:
        period: `day` or `month`, of the calendar in UTC.
        amount: what may be spent in one period, a decimal as text.
        hard: calls are refused when it is spent; otherwise it only warns.
    """

    id: str
    tenant: str
    environment: str
    app: str
    function: str
    period: str
    amount: str
    currency: str
    hard: bool = True

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """What the ledger knows of a budget.

    Attributes:
        period: `2026-11-21` or `2026-11`: the one that runs now by the controller's clock. spent:
        sum of the records in it, a decimal as text; of all activators, idle time included. batch:
        the part of `spent` that the records of this request make up, those that came before
        included; "0" in `GET`.
    """

    period: str
    spent: str
    batch: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRoute:
    """All that the data plane knows of a function.

    Attributes:
        traffic: (revision name, weight) pairs; weights add up to 100. revisions: revision name →
        `{"spec": FunctionSpec, "launch": LaunchSpec}` as JSON, for every revision that the traffic
        document
            names: with a weight, a tag, a pin, an arm, or as the shadow.
        document: `pilotlight.spec.traffic.TrafficDocument` as JSON; {} = the weights alone.
        stopped: the app was stopped: calls are answered 503 until it is deployed again.
    """

    id: str
    tenant: str
    environment: str
    app: str
    function: str
    traffic: tuple[tuple[str, int], ...]
    revisions: Mapping[str, Mapping[str, Any]]
    stopped: bool = False
    document: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises KeyError, TypeError or ValueError when the document is
        broken."""
        traffic = tuple((str(name), int(weight)) for name, weight in body["traffic"])
        if not traffic or sum(weight for _, weight in traffic) != 100:
            raise ValueError(
                f"traffic of {body['app']}/{body['function']} adds up to "
                f"{sum(w for _, w in traffic)}, want 100"
            )
        if missing := [name for name, _ in traffic if name not in body["revisions"]]:
            raise ValueError(f"traffic names revisions that the route does not carry: {missing}")
        return cls(**{**body, "traffic": traffic})


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """What one attempt used and costs; immutable, unique by `id`.

    Attributes:
        id: `<call id>/<attempt>` for calls; `<instance>/<kind>/<n>` for IDLE and RESERVED spans,
        CPU and a START. kind: `CALL`; `SHADOW`, the copy of one, which costs nothing; `IDLE` or
        `RESERVED` time of an instance; the `START` of one;
            `CPU` time that it used while no call ran; the `BUILD` of an image; `STORAGE`; or
            `ADJUSTMENT` of another record.
        started_at: wall clock, seconds since the epoch. queued_ms, start_ms, exec_ms: the three
        spans of a call, integers. billed_ns: the part of the instance's time that is this record's
        (processor sharing for calls); of CPU and BUILD, CPU time. cpu, memory_bytes, gpu,
        gpu_count: the footprint of the instance; of CPU and BUILD, one core. status: HTTP status of
        the call; 0 for spans. outcome: `ok`, `error`, `cancelled`, `lost` (its activator or
        instance died), `busy` (nothing ran: tried again elsewhere) or `span`. price_version,
        rate_per_s, cost: the price as it was then; decimals as text. caller: id of the tenant that
        called another one's function; "" = the tenant itself. Who owns the function pays. corrects,
        note: of an ADJUSTMENT: the id of the record that it corrects, and why. experiment, arm,
        unit: of a call in an experiment: its id, the arm, and a hash of the unit that was assigned
        to it. degraded: of a call that was answered by a variant or a fallback: what
        HEADER_DEGRADED said. tokens_in, tokens_out, tokens_cached: of a language model, by the
        engine's own count; `tokens_cached` of those in were there. finish: why an answer that
        streamed ended (`pilotlight.spec.engines.FINISH_REASONS`); "" for others. first_token_ms:
        from the request to the first token; 0 without one.
    """

    id: str
    kind: str
    call: str
    attempt: int
    tenant: str
    environment: str
    app: str
    function: str
    function_id: str
    method: str
    revision: str
    instance: str
    key: str
    start_kind: str
    started_at: float
    queued_ms: int
    start_ms: int
    exec_ms: int
    billed_ns: int
    cpu: float
    memory_bytes: int
    gpu: str | None
    gpu_count: int
    tokens_in: int = 0
    tokens_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    outcome: str = "ok"
    price_version: str = ""
    currency: str = "USD"
    rate_per_s: str = "0"
    cost: str = "0"
    caller: str = ""
    corrects: str = ""
    note: str = ""
    experiment: str = ""
    arm: str = ""
    unit: str = ""
    degraded: str = ""
    tokens_cached: int = 0
    finish: str = ""
    first_token_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A submitted call's state, as polled.

    Attributes:
        state: `QUEUED`, `RUNNING`, `SUCCEEDED`, `FAILED`, `CANCELLED`, `EXPIRED`. sequence: rises
        with every change; the newest wins. result: base64 of the answer's body (with
        `content_type`), once SUCCEEDED; for FAILED a problem document or pickled exception.
        expires_at: wall clock after which the result may be gone. attempt: attempts so far;
        is_dead: it FAILED after its last one, and waits as a dead letter. schedule: `<function
        id>/<n>` of the schedule that began it; "" = a caller did. webhook: name of the webhook that
        is told when it ends. arm, unit, experiment: as in UsageRecord.
    """

    id: str
    tenant: str
    environment: str
    app: str
    function: str
    method: str
    state: str
    sequence: int
    submitted_at: float
    finished_at: float | None = None
    status: int = 0
    content_type: str = ""
    result: str = ""
    outcome: str = ""
    revision: str = ""
    start_kind: str = ""
    queued_ms: int = 0
    start_ms: int = 0
    exec_ms: int = 0
    cost: str = "0"
    expires_at: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    is_dead: bool = False
    schedule: str = ""
    webhook: str = ""
    arm: str = ""
    unit: str = ""
    experiment: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; what an answer carries beyond the record (`attempts`) is left
        aside."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in body.items() if key in known})


def is_pickle(content_type: bytes) -> bool:
    """Whether a content type is CONTENT_PICKLE: the whole media type, in either case, with or
    without parameters (RFC 9110 §8.3)."""
    return content_type.partition(b";")[0].strip().lower() == _PICKLE


_PICKLE = CONTENT_PICKLE.encode()


def new_call_id() -> str:
    """`req-` and 32 hex digits: 48 bits of milliseconds, then 80 random ones, so that ids sort by
    time."""
    return "req-" + ((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10)).hex()


def problem(
    *,
    type: str,
    title: str,
    status: int,
    detail: str,
    instance: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A problem document (RFC 9457): `type` is a slug under PROBLEM_BASE, `instance` the request
    id, `extra` further members."""
    body: dict[str, Any] = {
        "type": PROBLEM_BASE + type,
        "title": title,
        "status": status,
        "detail": detail,
    }
    if instance:
        body["instance"] = instance
    return {**(extra or {}), **body}

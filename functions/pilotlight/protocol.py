"""Protocol between processes: headers, content types, paths, and records.

Connections:
- caller → activator: the public HTTP API (DESIGN §5), errors as `application/problem+json` (RFC
  9457).
- activator → worker: HTTP/1.1 over the instance's Unix socket, paths `WORKER_*` below.
- activator → controller: HTTP over the controller's Unix socket: `/internal/*` with the platform
  token (feed, usage, call results), and all public paths other than the data plane's, which are
  proxied.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from pilotlight.core.json_record import JsonRecord

# -- caller → activator ----------------------------------------------------------------------------
HEADER_REQUEST_ID = "x-request-id"
HEADER_REVISION = "pilotlight-revision"
HEADER_START = "pilotlight-start"
HEADER_COST = "pilotlight-cost"
HEADER_ENVIRONMENT = "pilotlight-environment"
HEADER_TIMEOUT = "pilotlight-timeout"
"""Total seconds (decimal) that the caller will wait; limited by the function's own clocks."""
HEADER_SERVER_TIMING = "server-timing"
HEADER_PRIORITY = "pilotlight-priority"
"""`realtime`, `standard` or `batch`; limited by the tenant's plan."""
HEADER_RATE_LIMIT = "ratelimit"
HEADER_RATE_LIMIT_POLICY = "ratelimit-policy"
"""The applicable quotas and their remaining amounts (draft-ietf-httpapi-ratelimit-headers)."""
HEADER_CUSTOMER = "pilotlight-customer"
"""Customer of the function's tenant for which the call is made (`identifiers.require_customer`)."""
HEADER_TAG = "pilotlight-tag"
"""Set by a caller of the function's own tenant: selects the revision with this tag (or this name),
independent of weights."""
HEADER_REPLAY = "pilotlight-replay"
"""Set by a caller with scope `deploy` that names a revision: the call repeats a logged one. It has
the arm REPLAY_ARM, is not logged as a prediction, and counts in no rollout and no objective;
neither the response cache nor fallbacks answer it."""
HEADER_ARM = "pilotlight-arm"
"""On responses and on requests to the worker: the caller's arm of the experiment, or REPLAY_ARM."""
HEADER_CACHE = "pilotlight-cache"
"""On a response of a function with a response cache: `hit`, `miss`, or `bypass` (it was not
looked for)."""
HEADER_DEGRADED = "pilotlight-degraded"
"""On a response of a variant or a fallback: `variant=<function>`, `function=<function>`, `cached`
or `static`. Of a worker's answer, and then on the response too: DEGRADED_FEATURES and a reason."""
DEGRADED_FEATURES = "features="
"""In HEADER_DEGRADED, before the worst reason why online features are defaults: `unavailable`,
`deadline`, `invalid`, `stale` or `missing`."""
HEADER_IDEMPOTENCY_KEY = "idempotency-key"
"""On a mutating request: a repeat with the same key and body gets the first response
(draft-ietf-httpapi-idempotency-key-header)."""
HEADER_REPLAYED = "idempotency-replayed"
"""`true` on a replayed response."""
HEADER_WEBHOOK = "pilotlight-webhook"
"""On a submitted call: name of the webhook that is notified when it ends."""
MIN_LEASE_S, MAX_LEASE_S = 10, 30 * 86_400
"""Bounds of an app's lease."""
HEADER_GRPC_TOKEN, HEADER_GRPC_CALLER = "pilotlight-grpc-token", "pilotlight-grpc-caller"
"""On a request of the activator's own process for gRPC: what shows that it is, and the address of
the caller."""
TENANT_PATH = "/t/"
"""`/t/<tenant name>/v1/functions/…` and `/t/<tenant name>/fn/…`: a function that another tenant
shares, or a public one."""

CONTENT_JSON = "application/json"
CONTENT_PROBLEM = "application/problem+json"
CONTENT_NDJSON = "application/x-ndjson"
CONTENT_SSE = "text/event-stream"
CONTENT_PICKLE = "application/vnd.pilotlight.pickle"
"""cloudpickle bytes of `(args, kwargs)` as the request, of the value as the response; unpickled
only in the tenant's worker and in the calling SDK.

Accepted only from callers of the function's own tenant (HEADER_TRUSTED_PICKLE)."""
CONTENT_BYTES = "application/octet-stream"
"""The body is the one `bytes` argument, or the result."""
CONTENT_NPY = "application/x-npy"
"""The body is the one array argument, or the result, as `numpy.save` writes it. In a schema, as
`contentMediaType` and with a parameter `datatype` where that is known, it marks a value that is a
`numpy.ndarray`."""
CONTENT_TENSORS = "application/vnd.pilotlight.tensors"
"""Arguments, or the members of a result, of which some are tensors (`pilotlight.core.
binary_tensors`). Between activators and workers only."""
CONTENT_PICKLE_STREAM = "application/vnd.pilotlight.pickle-stream"
"""A generator's items: each a 4-byte big-endian length, then that many cloudpickle bytes; length
0xFFFFFFFF precedes a pickled exception."""

RESULT_JSON, RESULT_BASE64 = "json", "base64"
"""`result_encoding` of a submitted call's record, as callers read it: `result` is the JSON value
(of CONTENT_NDJSON, the list of its lines), or base64 of the response's body."""

PROBLEM_BASE = "https://pilotlight.dev/problems/"

# -- activator → worker ----------------------------------------------------------------------------
WORKER_INVOKE = "/invoke/"
"""`POST /invoke/<method>` ("" for a plain function). Request and response by content type: JSON,
pickle."""
WORKER_ASGI = "/asgi"
"""Prefix under which an ASGI function's own paths are served; `root_path` is the public prefix."""
WORKER_SANDBOX = "/sandbox"
"""Prefix of the requests to a sandbox (`pilotlight.spec.sandboxes`)."""
WORKER_HEALTH = "/health"
WORKER_STATUS = "/pilotlight/health"
"""`GET` → `{"instance", "running", "start_kind", "phases_ms"}`, for every kind of function; used by
probes and claims. For an engine, whose bytes are proxied, it must be the first request of its
connection, which is then closed."""
WORKER_END = "/pilotlight/end"
"""`POST`: the worker finishes the calls that run, and exits; for a pod that is being deleted. Of an
engine as with WORKER_STATUS. Callers cannot reach this path through an activator."""
HEADER_CALL = "pilotlight-call"
"""The call's id, for log lines."""
HEADER_PARENT = "pilotlight-parent"
"""On a call that a function makes, over its instance's socket: ids of the calls in which it makes
it, separated by commas (a batch has several). Accepted only for calls that run on that
instance."""
HEADER_TRUSTED_PICKLE = "pilotlight-trusted-pickle"
"""`1` on a request whose body is a pickle from the function's own tenant. Only activators set it,
after checking the caller's tenant. A worker refuses a pickle without it, and activators strip this
header from callers' requests."""
HEADER_OUTCOME = "pilotlight-outcome"
"""`ok`; `raised` (user code raised; body is a problem document or a pickled exception); `invalid`
(invalid arguments); or `busy` (503: more calls than `max_inputs` are running, and no code of this
call ran: safe to send elsewhere)."""
HEADER_FINISH = "pilotlight-finish"
"""Trailer of a worker's stream (RFC 9112 §7.1.2): `stop`, or `error` if the generator raised or was
interrupted."""
HEADER_RETRY = "pilotlight-retry"
"""Of a worker's answer: "no" = the function's retries are not for what it raised."""
HEADER_ROOT_PATH = "pilotlight-root-path"
HEADER_DEADLINE = "pilotlight-deadline-s"
"""Remaining seconds of the execution clock at dispatch."""
HEADER_ATTEMPT = "pilotlight-attempt"
"""Number of the call's attempt, from 1; omitted on the first."""
HEADER_BATCH = "pilotlight-batch"
"""On a worker's response to a batched call:
`size=8;wait_ms=4.1;held_ms=2.0;compute_ms=12.3;reason=full;first=1`. `held_ms`: the part of the
wait in which the batch could have run; `first=1` on one response of each batch."""
HEADER_SPANS = "pilotlight-spans"
"""On a worker's response: the spans that user code recorded, base64 of JSON; requested by a sampled
`traceparent`."""

# -- activator → promoted pod ----------------------------------------------------------------------
POD_CONTROL_PORT = 8079
"""Port of a warm pod's launcher, for the two paths below; instances serve on the ports after it."""
POD_PROMOTE = "/pilotlight/promote"
"""`POST {"launch": signed launch document, "secrets": {name: value}}` → 202: this pod becomes an
instance of that revision. The same document again is 202, another one 409."""
POD_FORK = "/pilotlight/fork"
"""`POST {"instance": id, "secrets": {name: value}}` → `{"port": n}`: a further instance of the same
revision in this pod; 409 when the pod has no template or no room. Connections to the port wait
until the instance serves. The same id again gets the same port."""
POD_INSTANCES = "/pilotlight/instances"
"""`GET` → `{"instances": [{"instance", "port", "state": "starting" | "ready" | "ended", "status",
"error"}], "template": bool}`: those of this pod, the first one at the worker's port, and the last
that have ended, with exit status and what their code raised; and whether the pod has a Template, of
which POD_FORK makes others."""
POD_STOP = "/pilotlight/stop"
"""`POST {"port", "grace_s"}` → 202: the instance at that port finishes its calls and exits, and is
killed after `grace_s`. Others go on."""

# -- activator → controller ------------------------------------------------------------------------
FEED_PATH = "/internal/feed"
"""`GET ?after=<seq>&wait_s=<s>` → `{"seq": n, "reset": bool, "changes": [FeedChange…]}`; `reset`
means that `changes` is the complete state, which replaces the previous one."""
USAGE_PATH = "/internal/usage"
"""`POST {"activator": id, "records": [UsageRecord…]}` → `{"accepted": n, "budgets": {budget id:
BudgetState as JSON}}`; an existing record counts as accepted, and in `batch`. `budgets` has those
that cover a record of this batch."""
BUDGETS_PATH = "/internal/budgets"
"""`GET` → `{"budgets": {budget id: BudgetState as JSON}}`: the ledger's state of every budget's
current period, and of all prepaid credit; with `?id=` (repeated) of these."""
CUSTOMER_BUDGETS_PATH = "/internal/budgets/customers"
"""`POST {"tenant", "customer"}` → `{"budgets": n}`: makes the budgets that the customer gets from
those for `identifiers.ANY_CUSTOMER`, and which it does not have; n of them are new. 429 when the
tenant has too many."""
CALLS_PATH = "/internal/calls"
"""`POST {"calls": [CallRecord…]}` → `{"accepted": n}`: states and results of submitted calls; the
newest `sequence` wins."""
OBSERVATIONS_PATH = "/internal/observations"
"""`POST {"activator": id, "life": text, "sequence": n, "observations": [Observation…]}` →
`{"accepted": bool}`: observations of calls since the last post; a repeated sequence is not counted
twice (`pilotlight.spec.observations`)."""
TRACES_PATH = "/internal/traces"
PREDICTIONS_PATH = "/internal/predictions"
"""`POST {"activator": id, "traces": [...]}` → `{"accepted": n}`: kept traces."""
REFUSALS_PATH = "/internal/refusals"
"""`POST {"refusals": [{"tenant", "function", "revision", "key", "stage", "rule", "call", "calls",
"first_at", "last_at"}]}` → `{"accepted": n}`: what guards refused, for the audit log."""
PODS_PROMOTE_PATH = "/internal/pods/promote"
"""`POST {"tenant", "revision": key, "attempt": instance id, "member", "exclude": [pod uids]}` →
`{"namespace", "name", "uid", "ip", "node", "launch": signed launch document}`: claims a warm pod
for a revision; the same attempt gets the same pod. 409 `no-warm-pod`."""
PODS_DELETE_PATH = "/internal/pods/delete"
"""`POST {"namespace", "name", "uid", "reason"}` → 204: deletes a promoted pod; one that is gone
counts as deleted."""
BIND_PATH = "/internal/bind"
"""Where activators have bound functions made (`pilotlight.spec.bound`)."""
DUE_PATH = "/internal/due"
"""`GET ?activator=<id>&wait_s=<s>` → `{"calls": [...]}`: calls submitted by the control plane
(schedules, redriven dead letters), claimed for this activator, except those of named tenants
(`&without=<tenant>`, repeated); `POST {"activator": id, "ids": [...]}` confirms that they are in
its journal. `PUT {"activator": id, "calls": [...]}` returns the unfinished calls in the journal of
a permanently removed activator: others run them."""
MAX_WITHOUT = 200
"""Maximum number of tenants that one request excludes, which fit into a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedChange:
    """One change of the feed to activators.

    Attributes:
        seq: position; strictly increasing.
        kind: `function`, `key`, `tenant`, `secret`, `quota`, `budget` or `credit`.
        key: `<tenant>/<environment>/<app>/<function>` (function, quota), `<tenant>/<customer>`
            (quota), a key id, a tenant id, `<tenant>/<environment>/<secret name>`, or the id of a
            budget or credit.
        value: the document (`FunctionRoute`, `KeyRecord`, `TenantRecord`,
            `pilotlight.spec.quotas.Quotas`, `BudgetRecord`, `CreditRecord` as JSON; a secret's
            sealed text); None =
            removed.
    """

    seq: int
    kind: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key, for activators.

    Attributes:
        hash: sha256 (hex) of the whole secret text.
        environment, app, function: the only one that it may access; None = all. A function requires
            its app.
        quotas: of this key alone (`pilotlight.spec.quotas.Quotas` as JSON).
        customer: the customer for which all of its calls are made; None = callers may name any.
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
    customer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """A tenant.

    Attributes:
        uid: user id on nodes; None: the platform's own.
        plan: its limits and priority (`pilotlight.spec.quotas.Plan` as JSON, including its own
            overrides); {} = no limits.
        suspended: whether its calls are answered 403.
        deleted: whether it is deleted: its keys are refused, and what runs for it ends at once. It
            is suspended, too.
    """

    id: str
    name: str
    uid: int | None
    plan: Mapping[str, Any] = field(default_factory=dict)
    suspended: bool = False
    deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord(JsonRecord):
    """A budget, for activators. "" in `environment`, `app`, `function` and `customer` covers all.

    Attributes:
        period: `day` or `month`, by the calendar in UTC.
        amount: limit per period, a decimal as text.
        hard: whether calls are refused when it is exhausted; otherwise it only warns.
        customer: whose calls it covers; `identifiers.ANY_CUSTOMER` = it covers none, and is the
            budget that each customer without an own one of the same reach and period gets with its
            first call.
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
    customer: str = ""


CREDIT_PERIOD = "credit"
"""The only period of prepaid credit, in place of a day or month."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRecord(BudgetRecord):
    """The prepaid credit of a customer, for activators: a hard budget that has no period.

    Attributes:
        amount: what was left when this was written. The current one is in the ledger's
            `BudgetState`, which is to be read when `version` has changed.
        opened_at: it pays the customer's calls that begin from then on, to the millisecond.
        version: rises with each grant and withdrawal.
    """

    opened_at: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The ledger's state of a budget, or of prepaid credit.

    Attributes:
        period: the current one by the controller's clock, `2026-11-21` or `2026-11`; of credit
            CREDIT_PERIOD.
        spent: sum of its records, a decimal as text; of all activators, including idle time.
        batch: the part of `spent` from the records of this request, including repeated ones; "0" in
            `GET`.
        amount: of credit: what was granted in all, and is neither withdrawn nor expired.
        expiring: of credit: of each grant that will expire, when, and what is unused of it.
        version: of credit: that of the `CreditRecord` whose changes are in it.
    """

    period: str
    spent: str
    batch: str = "0"
    amount: str = ""
    expiring: tuple[tuple[float, str], ...] = ()
    version: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what is of credit is missing for a budget."""
        body = {"period": self.period, "spent": self.spent, "batch": self.batch}
        if self.period != CREDIT_PERIOD:
            return body
        expiring = [[at, unused] for at, unused in self.expiring]
        return {**body, "amount": self.amount, "expiring": expiring, "version": self.version}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRoute(JsonRecord):
    """A function's description for the data plane.

    Attributes:
        traffic: (revision name, weight) pairs; weights add up to 100.
        revisions: revision name → `{"spec": FunctionSpec, "launch": LaunchSpec}` as JSON, for every
            revision in the traffic document: with a weight, a tag, a pin, an arm, or as the shadow.
        document: `pilotlight.spec.traffic.TrafficDocument` as JSON; {} = only the weights.
        stopped: whether the app was stopped: calls are answered 503 until it is deployed again.
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

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises KeyError, TypeError or ValueError if the document is
        invalid."""
        traffic = tuple((str(name), int(weight)) for name, weight in body["traffic"])
        if not traffic or sum(weight for _, weight in traffic) != 100:
            raise ValueError(
                f"traffic of {body['app']}/{body['function']} adds up to "
                f"{sum(w for _, w in traffic)}, want 100"
            )
        if missing := [name for name, _ in traffic if name not in body["revisions"]]:
            raise ValueError(f"traffic names revisions that the route does not have: {missing}")
        return cls(**{**body, "traffic": traffic})


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord(JsonRecord):
    """Usage and cost of one attempt; immutable, unique by `id`.

    Attributes:
        id: `<call id>/<attempt>` for calls; `<instance>/<kind>/<n>` for IDLE and RESERVED spans,
            CPU and a START.
        kind: `CALL`; `SHADOW`, a copy of a call, which costs nothing; `IDLE` or `RESERVED` time of
            an instance; the `START` of an instance; `CPU` time that it used while no call ran; the
            `BUILD` of an image; `STORAGE`; or `ADJUSTMENT` of another record.
        started_at: wall clock, seconds since the epoch.
        queued_ms, start_ms, exec_ms: the three spans of a call, integers.
        billed_ns: this record's share of the instance's time (processor sharing for calls); for CPU
            and BUILD, CPU time.
        cpu, memory_bytes, gpu, gpu_count: the footprint of the instance; for CPU and BUILD, one
            core.
        status: HTTP status of the call; 0 for spans.
        outcome: `ok`, `error`, `cancelled`, `lost` (its activator or instance died), `busy`
            or `unsent` (nothing ran, which costs nothing: retried elsewhere) or `span`.
        price_version, rate_per_s, cost: the price at that time; decimals as text.
        caller: id of the tenant that called another one's function; "" = the tenant itself. The
            function's owner pays.
        corrects, note: for an ADJUSTMENT: the id of the corrected record, and the reason.
        experiment, arm, unit: for a call in an experiment: its id, the arm, and a hash of the unit
            assigned to it.
        degraded: for a call answered by a variant or a fallback: the value of HEADER_DEGRADED.
        tokens_in, tokens_out, tokens_cached: for a language model, by the engine's own count;
            `tokens_cached` is the part of `tokens_in` that was cached.
        finish: why a streamed answer ended (`pilotlight.spec.engines.FINISH_REASONS`); "" for
            others.
        first_token_ms: from the request to the first token; 0 without one.
        parent: of a call that a function made, the id of the record of the attempt that made it; ""
            for others. `key` then names the function,
            `function:<tenant>/<environment>/<app>/<name>`.
        customer: of a call: the customer of the tenant for which it was made (HEADER_CUSTOMER); ""
            = none was named.
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
    parent: str = ""
    customer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord(JsonRecord):
    """State of a submitted call, as returned to polls.

    Attributes:
        state: `QUEUED`, `RUNNING`, `SUCCEEDED`, `FAILED`, `CANCELLED`, `EXPIRED`.
        sequence: increases with every change; the newest wins.
        result: base64 of the response's body (with `content_type`), once SUCCEEDED; for FAILED a
            problem document or pickled exception.
        expires_at: wall clock after which the result may be deleted.
        attempt: number of attempts so far.
        is_dead: whether it FAILED after its last attempt and is a dead letter.
        schedule: `<function id>/<n>` of the schedule that submitted it; "" = a caller.
        webhook: name of the webhook that is notified when it ends.
        arm, unit, experiment: as in UsageRecord.
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

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`, also for a record as callers read it (`result_encoding`);
        ignores further members of a response (`attempts`)."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in body.items() if key in known}
        if body.get("result_encoding") == RESULT_JSON:
            values["result"] = base64.b64encode(
                _json_body(str(body["content_type"]), body["result"])
            ).decode()
        elif body.get("result", "") is None:
            values["result"] = ""
        return cls(**values)


def _json_body(content_type: str, result: Any) -> bytes:
    if content_type.partition(";")[0].strip().lower() == CONTENT_NDJSON:
        return "".join(f"{json.dumps(line)}\n" for line in result).encode()
    return json.dumps(result).encode()


BATCH_LABEL = "batch"
"""Label of a submitted call that is a line of a batch: the batch's id."""
ARGUMENTS_PREFIX = "pilotlight: arguments of the failed call: "
"""Begin of the line with the arguments' types and sizes, in the log after the traceback."""


def is_pickle(content_type: bytes) -> bool:
    """Whether a content type is CONTENT_PICKLE: the whole media type, case-insensitive, with or
    without parameters (RFC 9110 §8.3)."""
    return content_type.partition(b";")[0].strip().lower() == _PICKLE


_PICKLE = CONTENT_PICKLE.encode()


def new_call_id() -> str:
    """A new call id: `req-` and 32 hex digits: 48 bits of milliseconds, then 80 random bits, so
    that ids sort by time."""
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
    id, `extra` additional members."""
    body: dict[str, Any] = {
        "type": PROBLEM_BASE + type,
        "title": title,
        "status": status,
        "detail": detail,
    }
    if instance:
        body["instance"] = instance
    return {**(extra or {}), **body}

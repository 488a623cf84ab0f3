"""Request and response bodies of the public API, as shown in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    model_validator,
)

from pilotlight.protocol import MAX_LEASE_S, MIN_LEASE_S
from pilotlight.spec.function import FunctionSpec, ImageSpec
from snapshotter.types import SnapshotInfo


class Body(BaseModel):
    """Base class of the API's bodies; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {
            key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"
        }
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True)
class DocumentedAs:
    """The JSON schema of a dataclass, derived when a document asks for it."""

    kind: Any

    def __get_pydantic_json_schema__(
        self, _schema: Any, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = TypeAdapter(self.kind).json_schema()
        return dict(_inlined(schema, schema.get("$defs", {})))


# Parsed by pilotlight.spec.function, which reports key, value and bound; documented here.
FunctionSpecBody = Annotated[dict[str, Any], DocumentedAs(FunctionSpec)]
ImageSpecBody = Annotated[dict[str, Any], DocumentedAs(ImageSpec)]


MAX_MEMBERS = 256
"""Members of an object at most. Objects with thousands are refused at once: each invalid member
costs tens of microseconds to report."""


def _few_members(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_MEMBERS:
        raise ValueError(f"it has {len(given)} members: at most {MAX_MEMBERS} are allowed")
    return given


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Numbers = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=128)], Number], BeforeValidator(_few_members)
]
Meta = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=1024)]
    ],
    BeforeValidator(_few_members),
]


MAX_LABELS_CHARS = 16_384
"""Characters in all labels of a deploy together: each deploy's labels are stored as long as the
history."""
MAX_ARGV_BYTES = 131_072
"""Bytes in a command at most: the limit for one argument on Linux (execve(2), MAX_ARG_STRLEN)."""


def _fit(labels: dict[str, str]) -> dict[str, str]:
    size = sum(len(key) + len(value) for key, value in labels.items())
    if size > MAX_LABELS_CHARS:
        raise ValueError(
            f"the labels have {size} characters together: at most {MAX_LABELS_CHARS} are allowed"
        )
    return labels


def _fits_one_command(argv: list[str]) -> list[str]:
    size = sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in argv)
    if size > MAX_ARGV_BYTES:
        raise ValueError(f"the command has {size} bytes: at most {MAX_ARGV_BYTES} are allowed")
    return argv


Labels = Annotated[Meta, AfterValidator(_fit)]


class DeployRequest(Body):
    """A deploy: the complete desired state of the app, and how new revisions take over."""

    functions: Annotated[list[FunctionSpecBody], FailFast()]
    message: str = Field(default="", max_length=2000)
    labels: Labels = Field(
        default_factory=dict,
        max_length=64,
        description=f"at most {MAX_LABELS_CHARS} characters together",
    )
    meta: Meta = Field(
        default_factory=dict,
        max_length=64,
        description="lineage of the new revisions, such as {'git.commit': '…'}",
    )
    evaluation: Numbers = Field(
        default_factory=dict,
        max_length=256,
        description="offline evaluation results of the new revisions, by metric",
    )
    rollout: dict[str, Any] | None = Field(
        default=None, description="roll out step by step ({'steps': [5, 100], …}); null: at once"
    )
    keep_others: bool = Field(
        default=False, description="add the functions to the app, which keeps its other ones"
    )
    no_traffic: bool = Field(
        default=False, description="create the revisions without changing the traffic"
    )
    tag: str | None = Field(
        default=None,
        max_length=63,
        description="tag by which the new revisions can be called, independent of their traffic",
    )
    allow_breaking: bool = Field(
        default=False, description="allow schema changes that break callers"
    )
    override_freeze: bool = Field(
        default=False,
        description="release although an error budget is spent; requires a key with scope admin",
    )
    lease_s: float | None = Field(
        default=None,
        ge=MIN_LEASE_S,
        le=MAX_LEASE_S,
        description="delete the app after this time unless it is renewed or deployed again; null: "
        "keep it",
    )

    _has_few_members = model_validator(mode="before")(_few_members)


class DeployedFunction(Body):
    """One function after a deploy. `created`: its revision is new."""

    function: str
    revision: str
    created: bool
    stage: Literal["live", "waiting", "no_traffic", "rollout"] = Field(
        default="live", description="waiting: the revision needs approvals"
    )
    approvals: int = Field(default=0, description="number of approvals still needed")
    rollout: str = Field(default="", description="id of the rollout that introduces the revision")


class DeployResponse(Body):
    """The result of a deploy."""

    app: str
    environment: str
    version: int
    functions: list[DeployedFunction]


class BlobInfo(Body):
    """A stored blob. `created`: this tenant did not have it before."""

    digest: str
    size_bytes: int
    created: bool


class AppSummary(Body):
    """An app in a list. `functions` is the number of its functions."""

    name: str
    version: int
    stopped: bool
    created_at: float
    updated_at: float
    expires_at: float | None
    functions: int


class AppList(Body):
    """The apps of one environment."""

    apps: list[AppSummary]


class TrafficShare(Body):
    """A revision's share of the traffic, in percent."""

    revision: str
    weight: int


class ClusterStatus(Body):
    """A function's state in the cluster: `ready`, `pending`, or `failed` with the reason and what
    to do."""

    phase: Literal["ready", "pending", "failed"]
    reason: str
    message: str
    since: float


class AppFunction(Body):
    """A deployed function."""

    id: str
    name: str
    created_at: float
    snapshots: bool = Field(description="the operator's switch; the spec has a separate one")
    traffic: list[TrafficShare]
    spec: FunctionSpecBody
    cluster: ClusterStatus | None = Field(
        default=None, description="state in the cluster; null where there is no cluster"
    )


class AppDetail(Body):
    """One app."""

    name: str
    environment: str
    version: int
    stopped: bool
    created_at: float
    updated_at: float
    expires_at: float | None
    functions: list[AppFunction]


class HistoryEntry(Body):
    """One change of an app. `action` is `deploy`, `rollback`, `promote`, `stop`, `delete`, or
    another change of its traffic."""

    version: int
    action: str
    created_at: float
    created_by: str
    message: str
    labels: dict[str, str]
    functions: list[DeployedFunction]


class History(Body):
    """An app's changes, newest first."""

    history: list[HistoryEntry]


class Stopped(Body):
    """An app that was stopped."""

    app: str
    version: int


class SecretRequest(Body):
    """A secret's variables. `{"value": "…"}` is short for one variable with the secret's own
    name."""

    values: dict[str, str] | None = None
    value: str | None = None


class SecretInfo(Body):
    """A secret without its values."""

    name: str
    variables: list[str]
    created_at: float
    updated_at: float


class SecretList(Body):
    """The secrets of one environment."""

    secrets: list[SecretInfo]


class NamedRequest(Body):
    """An object that has only a name."""

    name: str


class EnvironmentInfo(Body):
    """An environment."""

    name: str
    created_at: float


class EnvironmentList(Body):
    """A tenant's environments."""

    environments: list[EnvironmentInfo]


class BillLine(Body):
    """One line of a bill. `cost` is exact, as a string; `cpu_core_s`, `memory_gib_s` and `gpu_s`
    are for display. `gpu` is the kind of the granted GPUs, `gpu_state` what they did: `start`,
    `idle_free`, `idle_paid`, `busy`, `asleep`."""

    name: str
    group: dict[str, str]
    kind: str
    currency: str
    records: int
    errors: int = 0
    queued_ms: int
    start_ms: int
    exec_ms: int
    billed_ns: int
    tokens_in: int
    tokens_out: int
    bytes_in: int
    bytes_out: int
    cpu_core_s: float
    memory_gib_s: float
    gpu_s: float = 0.0
    cost: str
    gpu: str = ""
    gpu_state: str = ""


class Bill(Body):
    """A bill for since <= time < until (seconds since the epoch; null: unbounded), with `totals` by
    currency."""

    by: str
    since: float | None
    until: float | None
    environment: str | None
    rows: list[BillLine]
    totals: dict[str, str]


class ExecRequest(Body):
    """A command to run alongside an instance."""

    argv: Annotated[list[str], AfterValidator(_fits_one_command)] = Field(
        min_length=1, max_length=1024, description=f"at most {MAX_ARGV_BYTES} bytes together"
    )


class Instances(Body):
    """Live instances (`snapshotter.types.InstanceInfo`)."""

    instances: list[dict[str, Any]]


class Templates(Body):
    """Resident Templates (`snapshotter.types.TemplateInfo`)."""

    templates: list[dict[str, Any]]


Snapshot = Annotated[dict[str, Any], DocumentedAs(SnapshotInfo)]


class Snapshots(Body):
    """Snapshots on the node."""

    snapshots: list[Snapshot]


class SnapshotQuarantine(Body):
    """Why a snapshot is quarantined."""

    reason: str = Field(min_length=1, max_length=500)


class SnapshotsSwitch(Body):
    """Whether a function may have snapshots."""

    enabled: bool


class SnapshotsSwitched(Body):
    """The new state of the switch. `deleted`: how many snapshots were deleted; null: the node did
    not respond, and they are deleted later."""

    app: str
    function: str
    enabled: bool
    deleted: int | None


class SnapshotsDeleted(Body):
    """How many snapshots were deleted."""

    deleted: int


class FeedAnswer(Body):
    """A page of the feed. `more`: another page is ready. Apply a `reset` when `more` is false."""

    seq: int
    reset: bool
    more: bool
    changes: list[dict[str, Any]]


class CallsRequest(Body):
    """States of submitted calls (`pilotlight.protocol.CallRecord`)."""

    calls: list[dict[str, Any]]


class Accepted(Body):
    """How many records are stored; records that were already known count."""

    accepted: int


class UsageAccepted(Accepted):
    """The number of stored records, and the state of the budgets that they fall under, by budget id
    (`pilotlight.protocol.BudgetState`)."""

    budgets: dict[str, dict[str, Any]]

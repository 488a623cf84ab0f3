"""Checks of a deploy against the fleet that will run it: what this fleet cannot do is refused with
the option's name. Runs before anything changes.

`pilotlight.controller.settings` checks the plans of platform.yaml by the same rules when the
controller starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.settings import FLEET, ControllerConfig, refused_plan
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.manifests.network_policies import WORKER_PORT
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.quotas import Plan
from pilotlight.spec.warm_shape import MAX_INSTANCES

PORTS_OF_PODS = frozenset(
    {8008, 8012, 8013, 8022, 8112, 9090, 9091, *range(WORKER_PORT, WORKER_PORT + MAX_INSTANCES)}
)
"""Ports of workers, and of Knative's queue-proxy (pkg/networking/constants.go), which share a pod's
network with user code."""
_SLEEP_LEVEL = EngineSpec.__dataclass_fields__["sleep_level"].default


AUTO_BY_DEFAULT = False
"""Whether a function that says no window has "auto". Off while "auto" loses to another policy on a
seed of benchmarks/autoscaler_seeds.py (docs/benchmarks/autoscalers.md)."""


def settled(
    specs: Sequence[FunctionSpec], config: ControllerConfig, *, is_auto: bool = AUTO_BY_DEFAULT
) -> list[FunctionSpec]:
    """The specs with a window for idle instances where they say none: a fixed one, or "auto" if
    `is_auto`, except where Knative's autoscaler decides, which does not predict pauses between
    calls."""
    is_kpa = config.platform.fleet == "knative" and config.cluster.uses_kpa
    predicts = is_auto and not is_kpa
    return [replace(spec, scaling=spec.scaling.settled(predicts=predicts)) for spec in specs]


def check_fleet(
    sql: sa.Connection, config: ControllerConfig, *, tenant: str, specs: Sequence[FunctionSpec]
) -> None:
    """Raise InvalidInput for the first option of the specs, or term of the tenant's plan, that this
    platform's fleet would ignore. Instances of this machine's node agent ignore none."""
    check_logs(specs)
    if config.platform.fleet == "knative":
        plan = tenant_plan_of(tenants.get(sql, tenant=tenant), config.plans).resolve()
        check_cluster(specs, plan, config.cluster)


def check_logs(specs: Sequence[FunctionSpec], *, library: str = "pyarrow") -> None:
    """Raise InvalidInput for a prediction log where the platform cannot write its files."""
    for spec in specs:
        if spec.log is not None and importlib.util.find_spec(library) is None:
            raise InvalidInput(
                f"function {spec.name!r}: log: this platform cannot write Parquet files, because "
                f"{library} is not installed",
                function=spec.name,
                parameter="log",
                hint="Install it where the platform runs: pip install 'pilotlight[predictions]'.",
            )


def check_sandboxes(specs: Sequence[FunctionSpec], *, uid: int | None) -> None:
    """Raise InvalidInput for a sandbox where slots share the machine's processes and files. `uid`:
    of the tenant; None where the platform does not run as root."""
    for spec in specs:
        if spec.sandbox and uid is None:
            raise InvalidInput(
                f"function {spec.name!r}: sandbox: the platform does not run as root, so a sandbox "
                f"could not be kept from the machine's processes and files",
                function=spec.name,
                parameter="sandbox",
                hint="Start the platform as root (docs/how-to/run-as-root.md).",
            )


def check_cluster(specs: Sequence[FunctionSpec], plan: Plan, settings: ClusterSettings) -> None:
    """Raise InvalidInput for the first option that has no effect in pods. `plan`: of the tenant
    that deploys."""
    for spec in specs:
        _check_spec(spec, settings)
    if (refused := refused_plan(plan, settings)) is not None:
        key, why, hint = refused
        raise InvalidInput(
            f"the tenant's plan has {key} = {getattr(plan, key)}, but {FLEET} {why}",
            parameter=key,
            hint=hint,
        )


def _check_spec(spec: FunctionSpec, settings: ClusterSettings) -> None:
    if spec.scaling.keep_asleep_s > 0:
        raise _refused(
            spec,
            "keep_asleep",
            spec.scaling.keep_asleep_s,
            "pods do not sleep",
            "Remove keep_asleep; scaledown_window keeps an idle instance running instead.",
        )
    if spec.volumes:
        raise _refused(
            spec,
            "volumes",
            ", ".join(volume.name for volume in spec.volumes),
            "pods mount no volumes",
            "Read models as weights, and keep other data in an object store; or deploy to a "
            "platform of one machine.",
        )
    if spec.sandbox:
        raise _refused(
            spec,
            "sandbox",
            True,
            "has no sandboxes",
            "Use a platform of one machine for them.",
        )
    if spec.web_server is not None and spec.web_server.port in PORTS_OF_PODS:
        raise _refused(
            spec,
            "web_server",
            spec.web_server.port,
            "have pods, in which the platform and Knative listen at that port",
            "Let the server listen at another port, such as 8000.",
        )
    if spec.scaling.waiting_cost is not None and settings.uses_kpa:
        raise _refused(
            spec,
            "waiting_cost",
            spec.scaling.waiting_cost,
            "Knative's autoscaler does not predict pauses between calls",
            'Set scaledown_window to a number of seconds in place of "auto", or let the operator '
            "set cluster.autoscaler: pilotlight.",
        )
    if spec.engine is not None and spec.engine.sleep_level != _SLEEP_LEVEL:
        raise _refused(
            spec,
            "sleep_level",
            spec.engine.sleep_level,
            "language models do not sleep",
            "Remove sleep_level; scaledown_window keeps an idle instance running instead.",
        )


def _refused(
    spec: FunctionSpec, parameter: str, value: object, why: str, hint: str
) -> InvalidInput:
    return InvalidInput(
        f"function {spec.name!r}: {parameter} = {value!r}: {FLEET} {why}",
        function=spec.name,
        parameter=parameter,
        hint=hint,
    )

"""Reconciliation of one function: compare desired and live objects and take one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.conditions import Condition, ready_of
from pilotlight.controller.kubernetes.desired_state import DesiredState, secrets_of
from pilotlight.controller.kubernetes.function_status import FunctionStatus, Phase
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.controller.kubernetes.namespaces import Namespaces
from pilotlight.controller.kubernetes.rollout_step import ServiceStep, next_step
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests import autoscaling, knative_service, revisions, traffic
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.manifests.secrets import secret_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.watch_events import Object
from pilotlight.protocol import FunctionRoute

_WASTE = (kinds.SERVICE, kinds.POD_DISRUPTION_BUDGET)
"""Objects to delete with a function. Knative deletes those that it created; launch documents are
deleted with the revisions that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """Result of reconciling a function. `status`: None if it was deleted. `again_s`: reconcile
    again after this time, even if nothing changes."""

    status: FunctionStatus | None
    again_s: float | None = None


class FunctionReconciler:
    """Reconciles functions. Owner: the reconciler's event loop; a function is reconciled by one
    task at a time (`WorkQueue`)."""

    def __init__(
        self,
        *,
        state: DesiredState,
        mirror: Informers,
        writer: Applier,
        namespaces: Namespaces,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._mirror = mirror
        self._writer = writer
        self._namespaces = namespaces
        self._wall = wall

    async def reconcile(self, id: str) -> ReconcileResult:
        """Do what is possible now. Raises ClusterError, InvalidInput."""
        route = self._state.functions.get(id)
        tenancy = (
            self._state.tenancy(route.tenant, route.environment) if route is not None else None
        )
        if route is None and self._state.is_unreadable(id):
            return ReconcileResult(status=_not_understood())
        if route is None or tenancy is None or route.stopped:
            await self._remove(id)
            return ReconcileResult(status=None if route is None or tenancy is None else _stopped())
        await self._namespaces.ensure(tenancy)
        await self._secrets(route, tenancy)
        there, named = self._revisions(route, tenancy), self._named(route, tenancy)
        for made in named:
            await self._launch_document(made)
            await self._autoscaler(made, there.get(made.name))
        await self._writer.put(knative_service.disruption_budget(route, tenancy))
        live = await self._live_service(route, tenancy)
        step = next_step(route, tenancy, named=named, live=live, there=there, now=self._wall())
        if step.service is not None:
            live = await self._writer.put(step.service, live=live)
        await self._delete_documents(id, keep={made.name for made in named}, there=there)
        return ReconcileResult(status=_status(route, step, live, there), again_s=step.again_s)

    async def _secrets(self, route: FunctionRoute, tenancy: Tenancy) -> None:
        for name in secrets_of(route):
            values = self._state.secret(route.tenant, route.environment, name)
            await self._writer.put(secret_manifest(name, tenancy, values=values))

    async def _launch_document(self, made: RevisionOf) -> None:
        """Create the launch document if it is missing. It never changes, except its owner."""
        metadata = {
            "name": made.name,
            "namespace": made.tenancy.namespace,
            "annotations": {names.KEY: made.key},
        }
        live = await self._writer.live(kinds.CONFIG_MAP, metadata)
        if live is None:
            await self._writer.put(revisions.config_map(made), live=None)
        else:
            owner = {names.PLATFORM: self._state.platform.id}
            await self._writer.label(kinds.CONFIG_MAP, live, owner)

    async def _autoscaler(self, made: RevisionOf, live: Object | None) -> None:
        """Hand a revision to the autoscaler of the settings, if it was created for the other one:
        only a Revision's `spec` is immutable, and Knative copies its annotations."""
        if live is not None:
            said = live["metadata"].get("annotations") or {}
            change = autoscaling.class_change(made.spec, made.tenancy.settings, said)
            await self._writer.annotate(kinds.REVISION, live, change)

    async def _live_service(self, route: FunctionRoute, tenancy: Tenancy) -> Object | None:
        metadata = {
            "name": names.service_name(route.app, route.function),
            "namespace": tenancy.namespace,
            "annotations": {names.PATH: knative_service.path_of(route)},
        }
        found = await self._writer.live(kinds.SERVICE, metadata)
        return found if found is None or not found["metadata"].get("deletionTimestamp") else None

    def _named(self, route: FunctionRoute, tenancy: Tenancy) -> list[RevisionOf]:
        return [
            self._state.revision(route, tenancy, name)
            for name in knative_service.revision_names(route)
        ]

    def _revisions(self, route: FunctionRoute, tenancy: Tenancy) -> dict[str, Object]:
        """Return the function's Revisions by name, without those being deleted."""
        found = (item for item in self._mirror.of_function(kinds.REVISION, route.id))
        return {
            item["metadata"]["name"]: item
            for item in found
            if item["metadata"].get("namespace") == tenancy.namespace
            and not item["metadata"].get("deletionTimestamp")
        }

    async def _delete_documents(self, id: str, *, keep: set[str], there: dict[str, Object]) -> None:
        """Delete launch documents of revisions that Knative has deleted: no pod will read them."""
        for item in self._mirror.of_function(kinds.CONFIG_MAP, id):
            if item["metadata"]["name"] not in keep and item["metadata"]["name"] not in there:
                await self._writer.remove(kinds.CONFIG_MAP, item)

    async def _remove(self, id: str) -> None:
        for kind in _WASTE:
            for item in self._mirror.of_function(kind, id):
                await self._writer.remove(kind, item)
        left = {item["metadata"]["name"] for item in self._mirror.of_function(kinds.REVISION, id)}
        for item in self._mirror.of_function(kinds.CONFIG_MAP, id):
            if item["metadata"]["name"] not in left:
                await self._writer.remove(kinds.CONFIG_MAP, item)


def _not_understood() -> FunctionStatus:
    said = (
        "its route cannot be parsed (written by another version?): the objects in the cluster stay "
        "unchanged. Deploy it again."
    )
    return FunctionStatus(phase=Phase.FAILED, reason="NotUnderstood", message=said)


def _stopped() -> FunctionStatus:
    return FunctionStatus(
        phase=Phase.READY,
        reason="Stopped",
        message="the app is stopped: it has no objects in the cluster",
    )


def _status(
    route: FunctionRoute, step: ServiceStep, live: Object | None, there: Mapping[str, Object]
) -> FunctionStatus:
    """`there`: the function's Revisions by name in the cluster."""
    document = traffic.document_of(route)

    def status(phase: Phase, reason: str = "", message: str = "") -> FunctionStatus:
        newest = revisions.newest(knative_service.revision_names(route))
        return FunctionStatus(
            phase=phase,
            reason=reason,
            message=message,
            generation=document.generation,
            revision=newest,
        )

    condition, revision = step.condition, step.waits_for
    if condition is None and not step.waits_for and live is not None:
        condition = ready_of(live)
        if condition.is_true:
            return status(Phase.READY)
        revision, condition = _cause(condition, live, there)
    if condition is None:
        return status(
            Phase.PENDING, "RevisionMissing", f"revision {step.waits_for} is being created"
        )
    phase = Phase.FAILED if condition.status is False else Phase.PENDING
    return status(phase, condition.reason or "Unknown", _message_of(condition, revision))


def _cause(
    condition: Condition, live: Object, there: Mapping[str, Object]
) -> tuple[str, Condition]:
    """Return the revision with traffic that keeps a Service from being ready, and its condition.
    The Service itself says only that a revision is missing, also of one that failed."""
    for name in traffic.percents(live["spec"].get("traffic") or []):
        if name in there and (own := ready_of(there[name])).status is False:
            return name, own
    return "", condition


def _message_of(condition: Condition, revision: str) -> str:
    parts = [
        f"revision {revision}" if revision else "",
        condition.message or "not ready",
        condition.hint,
    ]
    return ": ".join(part for part in parts[:2] if part) + (
        f" {condition.hint}" if condition.hint else ""
    )

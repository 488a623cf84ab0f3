"""Knative's Service, Configuration and Route: templates become revisions, traffic becomes labels on
them.

Source of behaviour: knative/serving pkg/reconciler/{service,configuration,route}.
"""

from __future__ import annotations

from typing import Any

from pilotlight.kubernetes.kinds import CONFIGURATION, REVISION, ROUTE, SERVICE
from tests.fakes.knative.controllers import (
    Controller,
    View,
    condition,
    condition_of,
    controlled_by,
    owned,
)

Json = dict[str, Any]
_P = "serving.knative.dev"


class Services(Controller):
    """Service → Configuration and Route, and their conditions back."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(SERVICE, self.enqueue)
        for kind in (CONFIGURATION, ROUTE):
            view.on(kind, self.enqueue_owner("Service"))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        service = self.view.get(SERVICE, namespace, name)
        if service is None or service["metadata"].get("deletionTimestamp"):
            return
        labels = {
            **(service["metadata"].get("labels") or {}),
            f"{_P}/service": name,
            f"{_P}/serviceUID": service["metadata"]["uid"],
        }
        configuration = self.view.get(CONFIGURATION, namespace, name)
        route = self.view.get(ROUTE, namespace, name)
        template, traffic = (
            service["spec"]["template"],
            _for_route(service["spec"].get("traffic") or [], name),
        )
        if configuration is None:
            made = {
                **owned(CONFIGURATION, SERVICE, service, name, labels=labels),
                "spec": {"template": template},
            }
            configuration = await self.view.create(made)
        elif configuration["spec"]["template"] != template:
            template_patch = _replacing(configuration["spec"]["template"], template)
            await self.view.patch(
                CONFIGURATION, configuration, {"spec": {"template": template_patch}}
            )
        if route is None:
            route = await self.view.create(
                {
                    **owned(ROUTE, SERVICE, service, name, labels=labels),
                    "spec": {"traffic": traffic},
                }
            )
        elif route["spec"].get("traffic") != traffic:
            await self.view.patch(ROUTE, route, {"spec": {"traffic": traffic}})
        await self._report(service, configuration or {}, route or {})

    async def _report(self, service: Json, configuration: Json, route: Json) -> None:
        parts = [_part("ConfigurationsReady", configuration), _part("RoutesReady", route)]
        routed, configured = route.get("status") or {}, configuration.get("status") or {}
        status = {
            "observedGeneration": service["metadata"]["generation"],
            "conditions": [*parts, summary(parts)],
            "latestCreatedRevisionName": configured.get("latestCreatedRevisionName"),
            "latestReadyRevisionName": configured.get("latestReadyRevisionName"),
            "traffic": routed.get("traffic") or [],
            "url": routed.get("url"),
            "address": routed.get("address"),
        }
        await self.view.set_status(
            SERVICE, service, {key: value for key, value in status.items() if value is not None}
        )


def _part(kind: str, item: Json) -> Json:
    ready = condition_of(item, "Ready")
    is_newest = (item.get("status") or {}).get("observedGeneration") == (
        item.get("metadata") or {}
    ).get("generation")
    if not ready or not is_newest:
        return condition(kind, None)
    return {**ready, "type": kind}


def summary(parts: list[Json], kind: str = "Ready") -> Json:
    """Ready: True if all are, False if one is, else Unknown."""
    worst = next((one for one in parts if one["status"] == "False"), None)
    worst = worst or next((one for one in parts if one["status"] == "Unknown"), None)
    if worst is None:
        return condition(kind, True)
    return {
        key: value for key, value in worst.items() if key in ("status", "reason", "message")
    } | {"type": kind}


def _for_route(traffic: list[Json], name: str) -> list[Json]:
    return [
        {**target, "configurationName": name} if target.get("latestRevision") else target
        for target in traffic
    ]


def _replacing(old: Any, new: Any) -> Any:
    """A merge patch that turns `old` into `new`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch = {key: None for key in old if key not in new}
    return patch | {
        key: _replacing(old.get(key), value) for key, value in new.items() if old.get(key) != value
    }


class Configurations(Controller):
    """Configuration → a Revision for each generation."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(CONFIGURATION, self.enqueue)
        view.on(REVISION, self.enqueue_owner("Configuration"))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        configuration = self.view.get(CONFIGURATION, namespace, name)
        if configuration is None or configuration["metadata"].get("deletionTimestamp"):
            return
        template = configuration["spec"]["template"]
        generation = configuration["metadata"]["generation"]
        wanted = (template.get("metadata") or {}).get("name") or f"{name}-{generation:05d}"
        revision = self.view.get(REVISION, namespace, wanted) or await self.view.create(
            _revision(configuration, template, wanted)
        )
        if revision is None:
            self.later((namespace, name), 0.05)
            return
        if not controlled_by(revision, configuration) or not _fits(revision, template):
            taken = (
                f"Revision {wanted!r} is not what the template of generation {generation} "
                f"says: its name is taken"
            )
            ready = condition(
                "Ready",
                False,
                "RevisionFailed",
                f'Revision creation failed with message: revisions "{wanted}": {taken}',
            )
            await self._report(configuration, wanted, {**ready, "reason": "RevisionNameTaken"})
            return
        ready = condition_of(revision, "Ready") or condition("Ready", None)
        if ready["status"] == "False":
            text = f'Revision "{wanted}" failed with message: {ready.get("message", "")}.'
            ready = condition("Ready", False, ready.get("reason") or "RevisionFailed", text)
        await self._report(configuration, wanted, ready)

    async def _report(self, configuration: Json, revision: str, ready: Json) -> None:
        old = configuration.get("status") or {}
        status: Json = {
            "observedGeneration": configuration["metadata"]["generation"],
            "conditions": [
                {key: value for key, value in ready.items() if key != "lastTransitionTime"}
                | {"type": "Ready"}
            ],
            "latestCreatedRevisionName": revision,
        }
        latest_ready = revision if ready["status"] == "True" else old.get("latestReadyRevisionName")
        await self.view.set_status(
            CONFIGURATION,
            configuration,
            status | ({"latestReadyRevisionName": latest_ready} if latest_ready else {}),
        )


def _fits(revision: Json, template: Json) -> bool:
    wanted: Json = template.get("spec") or {}
    return all(revision["spec"].get(key) == value for key, value in wanted.items())


def _revision(configuration: Json, template: Json, name: str) -> Json:
    its, of_template = configuration["metadata"], template.get("metadata") or {}
    labels = {
        **(of_template.get("labels") or {}),
        f"{_P}/configuration": its["name"],
        f"{_P}/configurationGeneration": str(its["generation"]),
        f"{_P}/configurationUID": its["uid"],
        f"{_P}/service": (its.get("labels") or {}).get(f"{_P}/service", ""),
        f"{_P}/serviceUID": (its.get("labels") or {}).get(f"{_P}/serviceUID", ""),
        f"{_P}/routingState": "pending",
    }
    annotations = {**(of_template.get("annotations") or {}), f"{_P}/creator": "kubernetes-admin"}
    head = owned(
        REVISION, CONFIGURATION, configuration, name, labels=labels, annotations=annotations
    )
    return {**head, "spec": template.get("spec") or {}}


class Routes(Controller):
    """Route: which revisions are reachable, and whether all that the traffic names are there and
    ready."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(ROUTE, self.enqueue)
        view.on(REVISION, self._revision_seen)
        view.on(CONFIGURATION, self.enqueue)

    def _revision_seen(self, revision: Json) -> None:
        service = (revision["metadata"].get("labels") or {}).get(f"{_P}/service")
        if service:
            self.look_at((revision["metadata"]["namespace"], service))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        route = self.view.get(ROUTE, namespace, name)
        if route is None or route["metadata"].get("deletionTimestamp"):
            return
        traffic, problem = self._resolved(namespace, route)
        for revision in self.view.items(REVISION, namespace):
            labels = revision["metadata"].get("labels") or {}
            if labels.get(f"{_P}/service") != name:
                continue
            is_named = any(
                target.get("revisionName") == revision["metadata"]["name"] for target in traffic
            )
            wanted = (
                "active"
                if is_named
                else ("reserve" if labels.get(f"{_P}/routingState") != "pending" else "pending")
            )
            if labels.get(f"{_P}/routingState") != wanted:
                await self.view.patch(
                    REVISION, revision, {"metadata": {"labels": {f"{_P}/routingState": wanted}}}
                )
        url = f"http://{name}.{namespace}.svc.cluster.local"
        parts = [problem or condition("AllTrafficAssigned", True), condition("IngressReady", True)]
        parts.append(condition("CertificateProvisioned", True, "TLSNotEnabled"))
        status = {
            "observedGeneration": route["metadata"]["generation"],
            "conditions": [*parts, summary(parts)],
            "url": url,
        }
        status |= {"address": {"url": url}} | ({"traffic": traffic} if problem is None else {})
        await self.view.set_status(ROUTE, route, status)

    def _resolved(self, namespace: str, route: Json) -> tuple[list[Json], Json | None]:
        found, problem = [], None
        for target in route["spec"].get("traffic") or ():
            name = target.get("revisionName")
            if target.get("latestRevision"):
                configuration = self.view.get(
                    CONFIGURATION,
                    namespace,
                    target.get("configurationName") or route["metadata"]["name"],
                )
                name = ((configuration or {}).get("status") or {}).get("latestReadyRevisionName")
                if name is None:
                    text = (
                        f'Configuration "{route["metadata"]["name"]}" is waiting for a '
                        f"Revision to become ready."
                    )
                    problem = condition("AllTrafficAssigned", None, "RevisionMissing", text)
                    continue
            revision = self.view.get(REVISION, namespace, name)
            ready = condition_of(revision, "Ready").get("status")
            if revision is None:
                problem = condition(
                    "AllTrafficAssigned",
                    False,
                    "RevisionMissing",
                    f'Revision "{name}" referenced in traffic not found.',
                )
            elif ready != "True":
                is_bad = ready == "False"
                text = (
                    f'Revision "{name}" '
                    f"{'failed to become ready' if is_bad else 'is not yet ready'}."
                )
                problem = condition(
                    "AllTrafficAssigned",
                    False if is_bad else None,
                    "RevisionFailed" if is_bad else "RevisionMissing",
                    text,
                )
            entry = {
                key: value
                for key, value in target.items()
                if key not in ("configurationName", "revisionName")
            }
            found.append({**entry, "revisionName": name})
        return found, problem

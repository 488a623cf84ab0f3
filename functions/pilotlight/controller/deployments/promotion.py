"""Promotion between environments: deploy the revisions that serve in one environment to another,
with the same specs and their metadata.

The promotion counts as the promoter's approval, unless the promoter created the revision; if the
target's app requires more approvals, the revision waits for them. Everything that the specs refer
to must exist in the target, in particular secrets of the same names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry, dependency_checks, releases
from pilotlight.controller.deployments.app_registry import Deployment, FunctionDeployment
from pilotlight.controller.deployments.releases import ReleaseOptions
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry import revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import app_history, approvals, traffic
from pilotlight.controller.weights import blobs, weight_names
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json, to_json
from weight_cache.manifest import Manifest

ACTION = "promote"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionCandidate:
    """A revision that serves in one environment, with its metadata."""

    revision: str
    spec: FunctionSpec
    metadata: RevisionMetadata


def candidates(
    sql: sa.Connection, origin: AppRef, *, function: str | None
) -> list[PromotionCandidate]:
    """The serving revisions in `origin`, by function name; of one function, or of the whole app.
    Raises NotFound, Conflict for a function without a serving revision."""
    names = [function] if function is not None else app_registry.function_names(sql, origin)
    if not names:
        text = f"there is no app {origin.app!r} in environment {origin.environment!r}"
        raise NotFound(text, app=origin.app, environment=origin.environment)
    return [_candidate(sql, origin, name) for name in names]


def promote(
    write: Write,
    target: AppRef,
    *,
    origin: AppRef,
    found: list[PromotionCandidate],
    manifests: Mapping[str, Manifest],
    bundle_max_bytes: int,
    terms: ReleaseOptions,
    message: str,
    whole_app: bool,
    is_bound: bool,
) -> tuple[Deployment, list[str]]:
    """Deploy the candidates to `target`; returns also the digests that lost their pins. `is_bound`:
    as in `weight_names.record_deployed`.

    `whole_app`: reject the promotion if the target has functions that `origin` does not have.
    Raises the errors of a deploy, without changing anything."""
    specs = [one.spec for one in found]
    tenants.require_environment(write.sql, tenant=target.tenant, name=target.environment)
    dependency_checks.check_access(write.sql, specs)
    dependency_checks.check_dependencies(
        write.sql,
        tenant=target.tenant,
        environment=target.environment,
        specs=specs,
        manifests=manifests,
        bundle_max_bytes=bundle_max_bytes,
    )
    unpinned = weight_names.record_deployed(
        write, target, specs=specs, manifests=manifests, is_bound=is_bound
    )
    present = set(app_registry.function_names(write.sql, target)) if whole_app else set[str]()
    gone = present - {spec.name for spec in specs}
    if gone:
        lost = ", ".join(sorted(gone))
        text = f"{origin.environment} has no {lost} of {target.app}, but {target.environment} has"
        raise Conflict(
            f"{text}: name the function to promote, or deploy the app there", functions=sorted(gone)
        )
    version = app_registry.continue_deployment(write, target)
    deployed = tuple(_one(write, target, origin, one, terms) for one in found)
    app_history.record_version(
        write,
        target,
        version=version,
        action=ACTION,
        message=message,
        functions=to_json(deployed),
        labels=_labels(origin),
    )
    after = {
        "from": origin.environment,
        "functions": {one.function: one.revision for one in deployed},
        "version": version,
    }
    app_registry.record_app_change(write, target, f"app.{ACTION}", after=after)
    return Deployment(
        app=target.app, environment=target.environment, version=version, functions=deployed
    ), unpinned


def manifests_of(
    sql: sa.Connection, files: blobs.BlobStore, *, tenant: str, found: list[PromotionCandidate]
) -> dict[str, Manifest]:
    """The manifests of weights that the candidates use, read before any lock is taken."""
    return dependency_checks.check_weights(
        sql, files, tenant=tenant, specs=[one.spec for one in found]
    )


def _one(
    write: Write, target: AppRef, origin: AppRef, found: PromotionCandidate, terms: ReleaseOptions
) -> FunctionDeployment:
    lineage = {
        **found.metadata.lineage,
        "promoted_from": f"{origin.environment}/{origin.app}/{found.spec.name}@{found.revision}",
    }
    metadata = replace(found.metadata, lineage=lineage)
    revision, created = app_registry.place_revision(write, target, found.spec, metadata=metadata)
    brought_by = revisions.get_row(
        write.sql, function_id=target.function_id(found.spec.name), revision=revision
    ).created_by
    # another key may have deployed it there already
    if target.actor not in (metadata.author, brought_by):
        approvals.approve(
            write,
            target,
            function=found.spec.name,
            revision=revision,
            note=f"promoted from {origin.environment}",
        )
    done = releases.release(
        write,
        target,
        function=found.spec.name,
        revision=revision,
        terms=replace(terms, metadata=metadata),
    )
    app_registry.publish_unchanged_traffic(write, target, found.spec.name, done)
    return app_registry.to_function_deployment(found.spec.name, revision, done, created=created)


def _candidate(sql: sa.Connection, origin: AppRef, function: str) -> PromotionCandidate:
    traffic.find(sql, origin, function)
    function_id = origin.function_id(function)
    revision = releases.serving_revision(sql, function_id)
    if not revision:
        text = (
            f"{origin.app}/{function} has no serving revision in environment "
            f"{origin.environment!r}: promote a revision there first"
        )
        raise Conflict(text, function=function, environment=origin.environment)
    row = revisions.get_row(sql, function_id=function_id, revision=revision)
    metadata = RevisionMetadata(**revisions.metadata_of(row), author=row.created_by)
    return PromotionCandidate(
        revision=revision, spec=from_json(FunctionSpec, json.loads(row.spec)), metadata=metadata
    )


def _labels(origin: AppRef) -> dict[str, str]:
    return {"from": origin.environment}


def require_different_environments(origin: AppRef, target: AppRef) -> None:
    """Raise InvalidInput if both environments are the same."""
    if origin.environment == target.environment:
        how = f"within one, use: pilotlight app promote {origin.app}/FUNCTION REVISION"
        raise InvalidInput(
            f"both environments are {origin.environment!r}: name two different ones; {how}",
            parameter="to_environment",
        )


def describe_promotion(done: Deployment) -> dict[str, Any]:
    """Return the response body, in the format of a deploy."""
    body: dict[str, Any] = to_json(done)
    del body["removed"]
    return body

"""Makes bound functions (`pilotlight.spec.bound`), when a caller asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.billing import price_lists
from pilotlight.controller.context import Context
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry, dependency_checks, fleet_checks
from pilotlight.controller.deployments.releases import serving_revision
from pilotlight.controller.registry import bound_functions, revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import approvals, traffic
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import ApprovalRequired, Conflict, NotFound
from pilotlight.spec.bound import MAX_BOUND, bind
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import to_json
from pilotlight.spec.traffic import WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingRequest:
    """A function, and what a caller binds it to (`pilotlight.spec.bound.bind`)."""

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def make(write: Write, context: Context, place: AppRef, wanted: BindingRequest) -> str:
    """Return the name of the bound function, which is made if the app does not have it.

    Raises NotFound, InvalidInput naming an argument or option, ApprovalRequired for options where
    releases need approvals, Conflict for more than MAX_BOUND, and the errors of a deploy."""
    base = _serving_spec(write.sql, place, wanted.function)
    spec = bind(base, wanted.arguments, wanted.options)
    if spec is base:
        return base.name
    if _is_there(write.sql, place, spec):
        return spec.name
    if wanted.options and approvals.policy(write.sql, place).approvals:
        raise ApprovalRequired(
            f"releases of {place.app} need approvals, so callers cannot choose options: deploy "
            f"{wanted.function} with them",
            approvals=approvals.policy(write.sql, place).approvals,
        )
    others = bound_functions.names_of(write.sql, place, wanted.function)
    if len(others) >= MAX_BOUND:
        raise Conflict(
            f"{place.app}/{wanted.function} is bound to {len(others)} sets of arguments, the most "
            f"that it can have: pass values of which there are many to the method",
            limit=MAX_BOUND,
        )
    _check(write.sql, context, place, spec)
    with storage_usage.enforce_deploy_limits(write, context.config.plans, tenant=place.tenant):
        metadata = RevisionMetadata(author=place.actor)
        revision, _ = app_registry.place_revision(write, place, spec, metadata=metadata)
        traffic.change(
            write,
            place,
            spec.name,
            lambda document: replace(document, weights={revision: WHOLE}, stable=""),
            action="",
        )
    app_registry.record_app_change(
        write, place, "function.bind", after={"function": spec.name, "of": wanted.function}
    )
    return spec.name


def _serving_spec(sql: sa.Connection, place: AppRef, function: str) -> FunctionSpec:
    app_registry.find_function(sql, place, function)
    function_id = place.function_id(function)
    revision = serving_revision(sql, function_id)
    if not revision:
        raise NotFound(f"{place.app}/{function} has no serving revision", function=function)
    return revisions.spec_of(sql, function_id=function_id, revision=revision)


def _is_there(sql: sa.Connection, place: AppRef, spec: FunctionSpec) -> bool:
    try:
        return _serving_spec(sql, place, spec.name) == spec
    except NotFound:
        return False


def _check(sql: sa.Connection, context: Context, place: AppRef, spec: FunctionSpec) -> None:
    """The checks of a deploy for what a caller can choose: code, image and weights are those of a
    revision that serves."""
    declared = replace(spec, container_image=None)  # which a deploy cannot name
    dependency_checks.parse_specs(place.app, [to_json(declared)])
    fleet_checks.check_fleet(sql, context.config, tenant=place.tenant, specs=[spec])
    if spec.resources.gpu:
        rates = price_lists.of_tenant(sql, context.config, place.tenant)
        dependency_checks.check_prices([spec], rates)
    dependency_checks.check_secrets(
        sql, tenant=place.tenant, environment=place.environment, specs=[spec]
    )

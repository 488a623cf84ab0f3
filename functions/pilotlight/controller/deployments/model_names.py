"""Model server terms: a model is `app/function`; a model version is a revision, an alias or a
tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry, releases
from pilotlight.controller.deployments.releases import ReleaseOptions, ReleaseResult, ReleaseStage
from pilotlight.controller.registry import revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import aliases, app_history, traffic
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionSpec, Resources
from pilotlight.spec.identifiers import check_name
from pilotlight.spec.record_json import from_json, to_json


def parse_model_name(model: str) -> tuple[str, str]:
    """Parse a model's id into app and function. Raises InvalidInput."""
    app, _, function = model.partition("/")
    try:
        return check_name("app", app), check_name("function", function)
    except ValueError as e:
        raise InvalidInput(
            f"modelId = {model!r}: use the form app/function ({e})", parameter="modelId"
        ) from e


def model_version(
    sql: sa.Connection, place: AppRef, *, function: str, reference: str
) -> FunctionSpec:
    """Return the spec of a version. Raises NotFound, InvalidInput."""
    traffic.find(sql, place, function)
    revision = aliases.resolve(sql, place, function, reference)
    return revisions.spec_of(sql, function_id=place.function_id(function), revision=revision)


def deploy_version(
    write: Write,
    place: AppRef,
    *,
    function: str,
    reference: str,
    resources: Mapping[str, Any],
    terms: ReleaseOptions,
) -> tuple[str, ReleaseResult]:
    """Deploy a version; return its revision and the result. Different resources create another
    revision of the same code.

    Raises NotFound, InvalidInput, and the errors of `releases.release`, except that a revision
    without enough approvals waits for them."""
    traffic.find(write.sql, place, function)
    revision = aliases.resolve(write.sql, place, function, reference)
    function_id = place.function_id(function)
    row = revisions.get_row(write.sql, function_id=function_id, revision=revision)
    revisions.require_blobs(row)
    spec = revisions.spec_of(write.sql, function_id=function_id, revision=revision)
    requested = from_json(Resources, {**to_json(spec.resources), **resources}, "resources")
    created = False
    if requested != spec.resources:
        metadata = RevisionMetadata(**revisions.metadata_of(row), author=place.actor)
        metadata = replace(metadata, lineage={**metadata.lineage, "resources_of": revision})
        revision, created = app_registry.place_revision(
            write, place, replace(spec, resources=requested), metadata=metadata
        )
    version = app_registry.continue_deployment(write, place)
    released = releases.release(write, place, function=function, revision=revision, terms=terms)
    app_registry.publish_unchanged_traffic(write, place, function, released)
    entry = to_json(
        app_registry.to_function_deployment(function, revision, released, created=created)
    )
    app_history.record_version(
        write,
        place,
        version=version,
        action="promote" if released.stage is ReleaseStage.LIVE else "deploy",
        functions=[entry],
    )
    app_registry.record_app_change(
        write,
        place,
        "app.promote",
        after={"function": function, "revision": revision, "stage": released.stage.value},
    )
    return revision, released

"""The terms of model servers: a model is `app/function`; a version of it is a revision, an alias or
a tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import aliases, history, registry, releases, revisions, traffic
from pilotlight.controller.places import Place
from pilotlight.controller.releases import Released, Stage, Terms
from pilotlight.controller.revisions import Told
from pilotlight.controller.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.spec import FunctionSpec, Resources, from_json, to_json
from pilotlight.types import check_name


def parse(model: str) -> tuple[str, str]:
    """Parse a model's id into app and function. Raises InvalidInput."""
    app, _, function = model.partition("/")
    try:
        return check_name("app", app), check_name("function", function)
    except ValueError as e:
        raise InvalidInput(
            f"modelId = {model!r}: use the form app/function ({e})", parameter="modelId"
        ) from e


def version(sql: sa.Connection, place: Place, *, function: str, reference: str) -> FunctionSpec:
    """Return the spec of a version. Raises NotFound, InvalidInput."""
    traffic.find(sql, place, function)
    revision = aliases.resolve(sql, place, function, reference)
    return revisions.spec_of(sql, function_id=place.function_id(function), revision=revision)


def deploy(
    write: Write,
    place: Place,
    *,
    function: str,
    reference: str,
    resources: Mapping[str, Any],
    terms: Terms,
) -> tuple[str, Released]:
    """Deploy a version; return its revision and the result. Different resources create another
    revision of the same code.

    Raises NotFound, InvalidInput, and what `releases.release` raises, except that a revision
    without enough approvals waits for them."""
    traffic.find(write.sql, place, function)
    revision = aliases.resolve(write.sql, place, function, reference)
    function_id = place.function_id(function)
    row = revisions.row(write.sql, function_id=function_id, revision=revision)
    revisions.require_blobs(row)
    spec = revisions.spec_of(write.sql, function_id=function_id, revision=revision)
    requested = from_json(Resources, {**to_json(spec.resources), **resources}, "resources")
    created = False
    if requested != spec.resources:
        metadata = Told(**revisions.told_of(row), author=place.actor)
        metadata = replace(metadata, lineage={**metadata.lineage, "resources_of": revision})
        revision, created = registry.place_revision(
            write, place, replace(spec, resources=requested), told=metadata
        )
    version = registry.go_on(write, place)
    released = releases.release(write, place, function=function, revision=revision, terms=terms)
    registry.settle(write, place, function, released)
    entry = to_json(registry.deployed(function, revision, released, created=created))
    history.note(
        write,
        place,
        version=version,
        action="promote" if released.stage is Stage.LIVE else "deploy",
        functions=[entry],
    )
    registry.note(
        write,
        place,
        "app.promote",
        after={"function": function, "revision": revision, "stage": released.stage.value},
    )
    return revision, released

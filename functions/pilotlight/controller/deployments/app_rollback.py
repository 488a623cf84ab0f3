"""Rollback of an app: all of its functions return to the revisions that served before, or none."""

from __future__ import annotations

from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry, releases
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import app_history
from pilotlight.errors import Conflict, NotFound
from pilotlight.spec.bound import is_bound
from pilotlight.spec.traffic import TrafficDocument


def rollback(
    write: Write, place: AppRef, *, message: str = ""
) -> dict[str, tuple[str, TrafficDocument]]:
    """Send all traffic of each function to its previous revision; returns revision and traffic by
    function. The history and the audit log get one entry each.

    Raises NotFound; Conflict, which the caller's transaction undoes, if no earlier revision of one
    of them served; the errors of `releases.rollback`."""
    names = [n for n in app_registry.function_names(write.sql, place) if not is_bound(n)]
    if not names:
        raise NotFound(
            f"there is no app {place.app!r} in environment {place.environment!r}", app=place.app
        )
    before = {name: releases.serving_revision(write.sql, place.function_id(name)) for name in names}
    moved = {name: _move(write, place, name, message=message) for name in names}
    version = app_history.next_version(write, place)
    app_history.record_version(
        write,
        place,
        version=version,
        action=app_history.ROLLBACK,
        functions=[
            {"function": name, "revision": revision, "created": False}
            for name, (revision, _) in moved.items()
        ],
        message=message,
    )
    after = {name: revision for name, (revision, _) in moved.items()}
    app_registry.record_app_change(
        write,
        place,
        "app.rollback",
        before={"functions": before},
        after={"functions": after, "version": version},
    )
    return moved


def _move(
    write: Write, place: AppRef, function: str, *, message: str
) -> tuple[str, TrafficDocument]:
    try:
        return releases.rollback(write, place, function=function, message=message, note=False)
    except Conflict as e:
        if type(e) is not Conflict:
            raise  # a gate that was not passed, with a type of its own
        raise Conflict(
            f"{place.app} is not rolled back, and no function was changed: {e}",
            app=place.app,
            function=function,
            hint=f"Roll back its other functions by name: `pilotlight app rollback "
            f"{place.app}/NAME`.",
        ) from e

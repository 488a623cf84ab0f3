"""Deletion: preconditions, finalizers, grace of pods, dependents, namespaces.

Collecting garbage comes a turn of the event loop later, as in a real cluster nothing is collected
within the request."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Any

from tests.fakes.kubernetes.faults import Faults
from tests.fakes.kubernetes.kinds import Resource
from tests.fakes.kubernetes.problems import Refused, details_of, not_found, qualified
from tests.fakes.kubernetes.store import Event, Key, Place, Store, Stored

Json = dict[str, Any]
_FOREGROUND = "foregroundDeletion"
_ORPHAN = "orphan"
_NAMESPACES: Key = ("", "namespaces")


class Deleter:
    """Takes objects away. Owner: the server's event loop; `later` runs a function in its next
    turn."""

    def __init__(
        self, store: Store, faults: Faults, later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._store = store
        self._faults = faults
        self._later = later

    def watch_kind(self, key: Key) -> None:
        """Collect what this kind's objects own, or what they have lost."""
        self._store.listen(key, lambda event: self._seen(key, event))

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Json, *, dry_run: bool = False
    ) -> tuple[Stored, bool]:
        """DELETE; returns the object and whether it is gone already. Raises Refused 404, 409
        (preconditions)."""
        stored = self._store.get(resource.key, (namespace, name))
        if stored is None:
            raise not_found(resource.plural, resource.group, name)
        self._check_preconditions(resource, stored, options.get("preconditions") or {})
        if dry_run:
            return stored, True
        return self._begin(resource.key, (namespace, name), stored, options)

    def _begin(self, key: Key, place: Place, stored: Stored, options: Json) -> tuple[Stored, bool]:
        metadata = stored.body["metadata"]
        finalizers = list(metadata.get("finalizers") or ())
        policy = options.get("propagationPolicy") or (
            "Orphan" if options.get("orphanDependents") else "Background"
        )
        mark = {"Foreground": _FOREGROUND, "Orphan": _ORPHAN}.get(policy)
        dependents = self._store.owned_by(metadata["uid"])
        if mark and dependents and mark not in finalizers and not metadata.get("deletionTimestamp"):
            finalizers.append(mark)
        grace_s = self._grace_s(key, stored.body, options)
        if not finalizers and grace_s == 0 and key != _NAMESPACES:
            return self._store.remove(key, place), True
        if metadata.get("deletionTimestamp") and grace_s >= metadata.get(
            "deletionGracePeriodSeconds", 0
        ):
            return stored, False
        return self._mark(key, place, stored, finalizers, grace_s), False

    def _mark(
        self, key: Key, place: Place, stored: Stored, finalizers: list[str], grace_s: int
    ) -> Stored:
        metadata = dict(stored.body["metadata"])
        at = dt.datetime.fromtimestamp(time.time() + self._faults.clock_skew_s + grace_s, dt.UTC)
        metadata |= {
            "deletionTimestamp": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "deletionGracePeriodSeconds": grace_s,
        }
        if finalizers:
            metadata["finalizers"] = finalizers
        if "generation" in metadata:
            metadata["generation"] += 1
        body = {**stored.body, "metadata": metadata}
        if key == _NAMESPACES:
            body["status"] = {**body.get("status", {}), "phase": "Terminating"}
        return self._store.put(key, place, body)

    def _grace_s(self, key: Key, body: Json, options: Json) -> int:
        """Seconds that a pod on a node has left; everything else goes at once."""
        if (
            key != ("", "pods")
            or not body["spec"].get("nodeName")
            or body.get("status", {}).get("phase") in ("Succeeded", "Failed")
        ):
            return 0
        given = options.get("gracePeriodSeconds")
        return int(
            body["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given
        )

    def _check_preconditions(self, resource: Resource, stored: Stored, wanted: Json) -> None:
        metadata = stored.body["metadata"]
        for field, name in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(field) and wanted[field] != metadata[field]:
                shown = qualified(resource.plural, resource.group)
                text = (
                    f"Precondition failed: {name} in precondition: {wanted[field]}, {name} in "
                    f"object meta: {metadata[field]}"
                )
                details = details_of(resource.group, resource.plural, metadata["name"])
                raise Refused(
                    409,
                    f'Operation cannot be fulfilled on {shown} "{metadata["name"]}": {text}',
                    details=details,
                )

    def _seen(self, key: Key, event: Event) -> None:
        metadata = event.now.body["metadata"]
        if event.kind == "DELETED":
            self._later(lambda: self._collect(metadata["uid"]))
            for owner in metadata.get("ownerReferences") or ():
                self._later(lambda uid=owner["uid"]: self._finish_by_uid(uid))  # type: ignore[misc]
            if event.place[0]:
                self._later(lambda: self._finish_namespace(event.place[0]))
        elif metadata.get("deletionTimestamp"):
            self._later(lambda: self._finish(key, event.place))
        elif event.kind == "ADDED" and metadata.get("ownerReferences"):
            self._later(lambda: self._check_owners(key, event.place))

    def _check_owners(self, key: Key, place: Place) -> None:
        """An object whose owners are all gone is garbage."""
        stored = self._store.get(key, place)
        if stored is None:
            return
        owners = stored.body["metadata"].get("ownerReferences") or ()
        if owners and not any(self._store.find(owner["uid"]) for owner in owners):
            self._begin(key, place, stored, {})

    def _collect(self, uid: str) -> None:
        for key, place in self._store.owned_by(uid):
            self._check_owners(key, place)

    def _finish_by_uid(self, uid: str) -> None:
        found = self._store.find(uid)
        if found is not None:
            self._finish(*found)

    def _finish(self, key: Key, place: Place) -> None:
        """Go on with an object that is being deleted."""
        stored = self._store.get(key, place)
        if stored is None or not stored.body["metadata"].get("deletionTimestamp"):
            return
        if key == _NAMESPACES:
            self._finish_namespace(place[1])
            return
        metadata = stored.body["metadata"]
        finalizers = metadata.get("finalizers") or []
        dependents = self._store.owned_by(metadata["uid"])
        if _ORPHAN in finalizers:
            self._orphan(dependents, metadata["uid"])
            self._drop_finalizer(key, place, stored, _ORPHAN)
        elif _FOREGROUND in finalizers:
            for other, where in dependents:
                dependent = self._store.get(other, where)
                if dependent is not None and not dependent.body["metadata"].get(
                    "deletionTimestamp"
                ):
                    self._begin(other, where, dependent, {"propagationPolicy": "Foreground"})
            if not self._store.owned_by(metadata["uid"]):
                self._drop_finalizer(key, place, stored, _FOREGROUND)

    def _orphan(self, dependents: list[tuple[Key, Place]], uid: str) -> None:
        for key, place in dependents:
            body = dict(self._store.get(key, place).body)  # type: ignore[union-attr]
            body["metadata"] = dict(body["metadata"])
            body["metadata"]["ownerReferences"] = [
                one for one in body["metadata"]["ownerReferences"] if one["uid"] != uid
            ]
            self._store.put(key, place, body)

    def _drop_finalizer(self, key: Key, place: Place, stored: Stored, finalizer: str) -> None:
        metadata = dict(stored.body["metadata"])
        metadata["finalizers"] = [one for one in metadata["finalizers"] if one != finalizer]
        body = {**stored.body, "metadata": metadata}
        if metadata["finalizers"]:
            self._store.put(key, place, body)
        else:
            self._store.remove(key, place, body)

    def _finish_namespace(self, name: str) -> None:
        stored = self._store.get(_NAMESPACES, ("", name))
        if stored is None or not stored.body["metadata"].get("deletionTimestamp"):
            return
        for key, place in self._store.everything_in(name):
            found = self._store.get(key, place)
            if found is not None and not found.body["metadata"].get("deletionTimestamp"):
                self._begin(key, place, found, {})
        if any(True for _ in self._store.everything_in(name)) or stored.body["metadata"].get(
            "finalizers"
        ):
            return
        self._store.remove(_NAMESPACES, ("", name))

"""Create, replace, patch and apply: one path from a body to a stored object."""

from __future__ import annotations

import datetime as dt
import json
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.kubernetes import admission, defaults, managed, naming, patches
from tests.fakes.kubernetes.cleaning import Findings, cleaned, copied
from tests.fakes.kubernetes.faults import Faults
from tests.fakes.kubernetes.kinds import Resource, Target
from tests.fakes.kubernetes.managed import Manager
from tests.fakes.kubernetes.problems import (
    Refused,
    details_of,
    invalid,
    not_found,
    qualified,
    webhook_refused,
)
from tests.fakes.kubernetes.schema import metadata as metadata_schema
from tests.fakes.kubernetes.store import Store, Stored

Json = dict[str, Any]
APPLY = "application/apply-patch+yaml"
_SET_BY_SERVER = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
)
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(kw_only=True)
class Options:
    """Of one write: the query's parameters, and `warnings`, which become headers."""

    dry_run: bool = False
    manager: str = "unknown"
    validation: str = "Warn"
    force: bool = False
    user: str = "kubernetes-admin"
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What an admission hook is asked: `before` is None for a create, `body` is {} for a DELETE;
    `warn` adds a Warning header."""

    operation: str
    resource: Resource
    body: Json
    before: Json | None
    user: str
    dry_run: bool
    warn: Callable[[str], None]
    subresource: str = ""


Hook = Callable[[Review], None]
"""Looks at (and may default, in place) a body; raises Refused."""


class Writer:
    """Writes objects into a store. Owner: the server's event loop."""

    def __init__(
        self, store: Store, faults: Faults, hooks: list[Hook], checks: Sequence[Hook] = ()
    ) -> None:
        """`checks`: what is asked last, once the body is as it will be."""
        self._store = store
        self._faults = faults
        self._hooks = hooks
        self._checks = checks

    def now(self) -> str:
        """The server's time as it is written into objects."""
        at = dt.datetime.fromtimestamp(time.time() + self._faults.clock_skew_s, dt.UTC)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")

    def create(self, resource: Resource, namespace: str, body: Json, options: Options) -> Stored:
        """POST. Raises Refused."""
        admission.check_metadata(resource, body, namespace)
        body = self._clean(resource, body, options)
        metadata = body["metadata"]
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(
                    resource.kind,
                    resource.group,
                    "",
                    [("metadata.name", "Required value: name or generateName is required")],
                )
            metadata["name"] = metadata["generateName"][:58] + "".join(
                secrets.choice(_SUFFIX) for _ in range(5)
            )
        if metadata.get("resourceVersion"):
            raise Refused(400, "resourceVersion should not be set on objects to be created")
        metadata.pop("managedFields", None)
        manager = Manager(
            name=options.manager, operation="Update", api_version=resource.api_version
        )
        return self._add(resource, namespace, body, options, manager)

    def _add(
        self, resource: Resource, namespace: str, body: Json, options: Options, manager: Manager
    ) -> Stored:
        metadata = body["metadata"]
        place = (namespace, metadata["name"])
        self._check_namespace(resource, namespace, metadata["name"])
        if self._store.get(resource.key, place) is not None:
            shown = qualified(resource.plural, resource.group)
            details = details_of(resource.group, resource.plural, metadata["name"])
            raise Refused(
                409,
                f'{shown} "{metadata["name"]}" already exists',
                reason="AlreadyExists",
                details=details,
            )
        if resource.has_status and resource.key != ("", "namespaces"):
            body.pop("status", None)
        for name in _SET_BY_SERVER:
            metadata.pop(name, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.now()}
        if resource.counts_generations:
            metadata["generation"] = 1
        self._admit("CREATE", resource, body, None, options)
        metadata["managedFields"] = managed.after_update(
            None, body, resource.schema, manager, self.now()
        )
        return self._keep(resource, place, body, options)

    def replace(self, target: Target, body: Json, options: Options) -> Stored:
        """PUT of an object or its status. Raises Refused: 409 for a version that is not the
        newest."""
        resource, name = target.resource, target.name
        admission.check_metadata(resource, body, target.namespace)
        live = self._live(target)
        body = self._clean(resource, body, options)
        given = body["metadata"]
        if given.get("name") != name:
            raise Refused(
                400,
                f"the name of the object ({given.get('name')}) does not match the name on the URL "
                f"({name})",
            )
        self._check_version(resource, live, given)
        given.pop("managedFields", None)
        manager = Manager(
            name=options.manager,
            operation="Update",
            api_version=resource.api_version,
            subresource=target.subresource,
        )
        return self._change(resource, live, body, manager, options)

    def patch(self, target: Target, how: str, body: Any, options: Options) -> Stored:
        """PATCH of any kind; an apply may create. Raises Refused."""
        if how == APPLY:
            return self._apply(target, body, options)
        resource, live = target.resource, self._live(target)
        base = {
            **live.body,
            "metadata": {
                key: value for key, value in live.body["metadata"].items() if key != "managedFields"
            },
        }
        if how == "application/json-patch+json":
            patched = patches.json_patch(base, body)
        elif how == "application/strategic-merge-patch+json":
            if resource.custom:
                raise Refused(
                    415,
                    "the body of the request was in an unknown format - accepted media types "
                    "include: json-patch, merge-patch",
                )
            patched = patches.strategic_merge(base, body, resource.schema)
        elif how == "application/merge-patch+json":
            patched = patches.merge_patch(base, body)
        else:
            raise Refused(415, f"the body of the request was in an unknown format: {how}")
        admission.check_metadata(resource, patched, target.namespace)
        patched = self._clean(resource, patched, options)
        self._check_version(resource, live, patched["metadata"])
        manager = Manager(
            name=options.manager,
            operation="Update",
            api_version=resource.api_version,
            subresource=target.subresource,
        )
        return self._change(resource, live, patched, manager, options)

    def _apply(self, target: Target, config: Json, options: Options) -> Stored:
        resource, namespace, name, subresource = (
            target.resource,
            target.namespace,
            target.name,
            target.subresource,
        )
        if config.get("apiVersion") != resource.api_version or config.get("kind") != resource.kind:
            raise Refused(
                400, f"invalid object type: {config.get('apiVersion')}, Kind={config.get('kind')}"
            )
        admission.check_metadata(resource, config, namespace)
        self._check_declared(resource, config, namespace, name)
        config = self._clean(resource, config, options)
        metadata = config["metadata"]
        if not options.manager:
            raise invalid(
                "PatchOptions",
                "meta.k8s.io",
                "",
                [("fieldManager", "Required value: is required for apply patch")],
            )
        if metadata.get("managedFields"):
            raise Refused(400, "metadata.managedFields must be nil")
        if metadata.setdefault("name", name) != name:
            raise Refused(
                400,
                f"the name of the object ({metadata['name']}) does not match the name on the URL "
                f"({name})",
            )
        live = self._store.get(resource.key, (namespace, name))
        manager = Manager(
            name=options.manager,
            operation="Apply",
            api_version=resource.api_version,
            subresource=subresource,
        )
        if live is None:
            if subresource:
                raise not_found(resource.plural, resource.group, name)
            if metadata.get("uid"):
                raise Refused(
                    409,
                    f"uid mismatch: the provided object specified uid {metadata['uid']}, and no "
                    f"existing object was found",
                )
            self._check_namespace(resource, namespace, name)
            body = managed.apply(
                None, config, resource.schema, manager, self.now(), force=options.force
            )
            return self._add_applied(resource, namespace, body, options)
        self._check_version(resource, live, metadata)
        body = managed.apply(
            live.body, config, resource.schema, manager, self.now(), force=options.force
        )
        return self._change(resource, live, body, manager, options)

    def _add_applied(
        self, resource: Resource, namespace: str, body: Json, options: Options
    ) -> Stored:
        entries = body["metadata"].pop("managedFields")
        body = copied(body)
        if resource.has_status:
            body.pop("status", None)
        metadata = body["metadata"]
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.now()}
        if resource.counts_generations:
            metadata["generation"] = 1
        self._admit("CREATE", resource, body, None, options)
        metadata["managedFields"] = entries
        return self._keep(resource, (namespace, metadata["name"]), body, options)

    def _change(
        self, resource: Resource, live: Stored, body: Json, manager: Manager, options: Options
    ) -> Stored:
        """The common end of all changes of an object that exists: what may not change stays, and no
        change is no write."""
        before = live.body
        body = dict(body)
        body["metadata"] = metadata = dict(body["metadata"])
        if resource.has_status:
            body = _PARTS.get(manager.subresource, _of_object)(before, body)
            metadata = body["metadata"]
        for name in _SET_BY_SERVER:
            metadata.pop(name, None)
            if name in before["metadata"]:
                metadata[name] = before["metadata"][name]
        entries = metadata.pop("managedFields", None)
        body = copied(body)
        metadata = body["metadata"]
        if manager.subresource != "status":
            self._admit("UPDATE", resource, body, before, options, subresource=manager.subresource)
        if entries is None:
            body["metadata"]["managedFields"] = before["metadata"].get("managedFields", [])
            entries = managed.after_update(before, body, resource.schema, manager, self.now())
        body["metadata"]["managedFields"] = entries
        if managed.is_same(body, before):
            return live
        if resource.counts_generations and _meaning(body) != _meaning(before):
            metadata["generation"] = before["metadata"].get("generation", 0) + 1
        place = (metadata.get("namespace", ""), metadata["name"])
        if (
            metadata.get("deletionTimestamp")
            and not metadata.get("finalizers")
            and not _is_waiting(resource, body)
        ):
            return (
                self._store.remove(resource.key, place, body)
                if not options.dry_run
                else _unkept(body)
            )
        return self._keep(resource, place, body, options)

    def _keep(
        self, resource: Resource, place: tuple[str, str], body: Json, options: Options
    ) -> Stored:
        if options.dry_run:
            return _unkept(body)
        return self._store.put(resource.key, place, body)

    def _live(self, target: Target) -> Stored:
        live = self._store.get(target.resource.key, target.place)
        if live is None:
            raise not_found(target.resource.plural, target.resource.group, target.name)
        return live

    def _check_version(self, resource: Resource, live: Stored, given: Json) -> None:
        metadata = live.body["metadata"]
        shown = qualified(resource.plural, resource.group)
        head = f'Operation cannot be fulfilled on {shown} "{metadata["name"]}": '
        details = details_of(resource.group, resource.plural, metadata["name"])
        if given.get("uid") and given["uid"] != metadata["uid"]:
            text = (
                f"Precondition failed: UID in precondition: {given['uid']}, UID in object "
                f"meta: {metadata['uid']}"
            )
            raise Refused(409, head + text, details=details)
        version = given.get("resourceVersion")
        if version and version not in ("0", metadata["resourceVersion"]):
            text = (
                "the object has been modified; please apply your changes to the latest version "
                "and try again"
            )
            raise Refused(409, head + text, details=details)

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        found = self._store.get(("", "namespaces"), ("", namespace))
        if found is None:
            raise not_found("namespaces", "", namespace)
        if found.body["metadata"].get("deletionTimestamp"):
            shown = qualified(resource.plural, resource.group)
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {namespace} is being terminated",
                "field": "metadata.namespace",
            }
            text = (
                f'{shown} "{name}" is forbidden: unable to create new content in namespace '
                f"{namespace} because it is being terminated"
            )
            raise Refused(
                403, text, details=details_of(resource.group, resource.plural, name, [cause])
            )

    def _clean(self, resource: Resource, body: Json, options: Options) -> Json:
        if (
            body.get("apiVersion", resource.api_version) != resource.api_version
            or body.get("kind", resource.kind) != resource.kind
        ):
            raise Refused(
                400,
                f"the object provided is unrecognized: {body.get('apiVersion')} {body.get('kind')}",
            )
        findings = Findings()
        schema = resource.schema
        if schema.form == "any":
            result = {
                **copied(body),
                "metadata": cleaned(
                    body.get("metadata", {}), metadata_schema(), findings, "metadata"
                ),
            }
        else:
            result = cleaned(body, schema, findings)
        result.setdefault("apiVersion", resource.api_version)
        result.setdefault("kind", resource.kind)
        result["metadata"].pop("selfLink", None)
        self._report(resource, result, findings, options)
        return result

    def _check_declared(self, resource: Resource, config: Json, namespace: str, name: str) -> None:
        """An apply of a field that the schema lacks fails before any validation, whatever
        `fieldValidation` says: status 500, without a reason."""
        if resource.schema.form == "any":
            return
        findings = Findings()
        cleaned(config, resource.schema, findings)
        said = [f".{path}: field not declared in schema" for path in findings.unknown]
        if said:
            where = f"{namespace}/{name}" if namespace else f"/{name}"
            errors = (
                said[0] if len(said) == 1 else "\n".join(("errors:", *map("  {}".format, said)))
            )
            raise Refused(
                500,
                f"failed to create typed patch object ({where}; {resource.api_version}, "
                f"Kind={resource.kind}): {errors}",
                reason="",
            )

    def _report(self, resource: Resource, body: Json, findings: Findings, options: Options) -> None:
        name = body["metadata"].get("name", "")
        if findings.unknown and options.validation == "Strict":
            text = ", ".join(f'unknown field "{path}"' for path in findings.unknown)
            head = (
                f'{resource.kind} in version "{resource.version}" cannot be handled as a '
                f"{resource.kind}: "
                if not resource.custom
                else ""
            )
            raise Refused(400, f"{head}strict decoding error: {text}")
        if options.validation == "Warn":
            options.warnings += [f'unknown field "{path}"' for path in findings.unknown]
        if (
            findings.wrong
            and not resource.custom
            and any("must be of type" in text for _, text in findings.wrong)
        ):
            path, text = findings.wrong[0]
            head = (
                f'{resource.kind} in version "{resource.version}" cannot be handled as a '
                f"{resource.kind}"
            )
            raise Refused(
                400, f"{head}: json: cannot unmarshal into Go struct field {path}: {text}"
            )
        faults = findings.wrong + [
            (path, "Required value") for path in findings.missing if not path.startswith("status")
        ]
        if faults:
            raise invalid(resource.kind, resource.group, name, faults)

    def _admit(
        self,
        operation: str,
        resource: Resource,
        body: Json,
        before: Json | None,
        options: Options,
        *,
        subresource: str = "",
    ) -> None:
        defaults.apply_defaults(resource.key, body)
        for name, message in self._faults.refusals:
            if name == resource.qualified:
                webhook_refused(f"test.{resource.group or 'core'}", message)
        review = Review(
            operation=operation,
            resource=resource,
            body=body,
            before=before,
            user=options.user,
            dry_run=options.dry_run,
            warn=options.warnings.append,
            subresource=subresource,
        )
        for hook in self._hooks:
            hook(review)
        if faults := naming.faults(resource.key, body["metadata"]):
            raise invalid(resource.kind, resource.group, body["metadata"]["name"], faults)
        admission.check(resource, body, before, subresource=subresource)
        for check in self._checks:
            check(review)


def _unkept(body: Json) -> Stored:
    return Stored(body, json.dumps(body, separators=(",", ":")).encode())


def _of_status(before: Json, body: Json) -> Json:
    """What a write to `status` may change: the status, and of the metadata nothing but
    managedFields."""
    metadata = dict(before["metadata"])
    if "managedFields" in body["metadata"]:
        metadata["managedFields"] = body["metadata"]["managedFields"]
    else:
        metadata.pop("managedFields", None)
    result = {key: value for key, value in before.items() if key != "status"} | {
        "metadata": metadata
    }
    return result | ({"status": body["status"]} if "status" in body else {})


def _of_object(before: Json, body: Json) -> Json:
    result = {key: value for key, value in body.items() if key != "status"}
    return result | ({"status": before["status"]} if "status" in before else {})


def _of_resize(before: Json, body: Json) -> Json:
    """What a write to `resize` may change: resources of the containers, and how they are changed
    (registry/core/pod/strategy.go, dropNonResizeUpdates). Containers that come or go stay in, to be
    refused."""
    result = {**before, "metadata": _of_status(before, body)["metadata"]}
    known = {one["name"]: one for one in before["spec"]["containers"]}
    containers = [
        {
            **known.get(one.get("name", ""), one),
            **{key: one[key] for key in ("resources", "resizePolicy") if key in one},
        }
        for one in (body.get("spec") or {}).get("containers") or ()
    ]
    return result | {"spec": {**before["spec"], "containers": containers}}


_PARTS = {"status": _of_status, "resize": _of_resize}


def _meaning(body: Json) -> Json:
    return {key: value for key, value in body.items() if key not in ("metadata", "status")}


def _is_waiting(resource: Resource, body: Json) -> bool:
    """Whether an object that is being deleted stays for another reason than finalizers."""
    if resource.key == ("", "namespaces"):
        return bool(body.get("spec", {}).get("finalizers"))
    return resource.key == ("", "pods") and bool(body["metadata"].get("deletionGracePeriodSeconds"))

"""The documents with which a client finds out what there is: /api, /apis, /apis/<group>/<version>,
/version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.fakes.kubernetes.kinds import ALL_VERBS, Resource
from tests.fakes.kubernetes.problems import Refused

Json = dict[str, Any]
VERSION = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.1",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2025-09-09T19:37:23Z",
    "goVersion": "go1.24.6",
    "compiler": "gc",
    "platform": "linux/amd64",
}
_EXTRA = {
    "pods": (
        ("log", "Pod", ("get",)),
        ("eviction", "Eviction", ("create",)),
        ("binding", "Binding", ("create",)),
    ),
    "namespaces": (("finalize", "Namespace", ("update",)),),
}


def answer(parts: list[str], resources: Iterable[Resource]) -> Json | None:
    """The document at a path; None = it is not a path of discovery. Raises Refused 404 for groups
    that are not there."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name, resources) for name in _groups(resources)],
        }
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in _groups(resources):
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], resources)}
    if parts == ["api", "v1"]:
        return _resource_list("", "v1", resources)
    if parts[0] == "apis" and len(parts) == 3:
        return _resource_list(parts[1], parts[2], resources)
    return None


def _groups(resources: Iterable[Resource]) -> list[str]:
    return sorted({resource.group for resource in resources if resource.group})


def _group(name: str, resources: Iterable[Resource]) -> Json:
    versions = sorted({resource.version for resource in resources if resource.group == name})
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resource_list(group: str, version: str, resources: Iterable[Resource]) -> Json:
    listed: list[Json] = []
    for resource in resources:
        if (resource.group, resource.version) == (group, version):
            listed += _described(resource)
    if not listed:
        raise Refused(404, "404 page not found")
    api_version = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": api_version,
        "resources": listed,
    }


def _described(resource: Resource) -> list[Json]:
    base: Json = {"namespaced": resource.namespaced, "singularName": ""}
    main: Json = {
        **base,
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "kind": resource.kind,
    }
    main["verbs"] = ["create"] if resource.create_only else list(ALL_VERBS)
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    found = [main]
    if resource.has_status:
        found.append(
            {
                **base,
                "name": f"{resource.plural}/status",
                "kind": resource.kind,
                "verbs": ["get", "patch", "update"],
            }
        )
    if resource.scalable:
        scale = {
            "group": "autoscaling",
            "version": "v1",
            "kind": "Scale",
            "verbs": ["get", "patch", "update"],
        }
        found.append({**base, "name": f"{resource.plural}/scale", **scale})
    if resource.group == "":
        for name, kind, verbs in _EXTRA.get(resource.plural, ()):
            found.append(
                {**base, "name": f"{resource.plural}/{name}", "kind": kind, "verbs": list(verbs)}
            )
    return found

"""values.schema.json of the Helm chart: the chart's own values by hand, the sections of
platform.yaml from the records that parse them."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from activator.settings import ActivatorSettings
from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.settings import PlatformSettings
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import Plan
from snapshotter.settings import SnapshotterSettings
from weight_cache.settings import WeightCacheSettings

Schema = dict[str, Any]

SECTIONS: Mapping[str, type[Any]] = {
    "platform": PlatformSettings,
    "cluster": ClusterSettings,
    "activator": ActivatorSettings,
    "controller": ControllerSettings,
    "snapshotter": SnapshotterSettings,
    "weight_cache": WeightCacheSettings,
    "prices": PriceSettings,
}
SECRETS = {"controller": "database_url", "activator": "redis_url"}
"""Keys that hold a password: the ConfigMap is no place for them (`…_file` names a mounted
secret)."""

_SIMPLE: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
DIGEST = r"^[^\s@]+@sha256:[0-9a-f]{64}$"
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
_DURATION = r"^([0-9]+(h|m|s))+$"


def of_hint(hint: Any) -> Schema:
    """What a value of this type looks like in JSON."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"anyOf": [of_hint(arg) for arg in typing.get_args(hint)]}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    base = typing.get_origin(hint) or hint
    if isinstance(base, type) and issubclass(base, list | tuple):
        items: list[Any] = [arg for arg in typing.get_args(hint) if is_dataclass(arg)]
        return {"type": "array", **({"items": section(items[0])} if items else {})}
    return {"type": "object"}


def section(record: type[Any], *, leave_out: str = "") -> Schema:
    """One section of platform.yaml."""
    hints = typing.get_type_hints(record)
    return _object({f.name: of_hint(hints[f.name]) for f in fields(record) if f.name != leave_out})


def config() -> Schema:
    """Values `config`."""
    sections = {
        name: section(record, leave_out=SECRETS.get(name, "")) for name, record in SECTIONS.items()
    }
    named = {
        name: {"type": "object", "additionalProperties": section(record, leave_out="name")}
        for name, record in {"plans": Plan, "issuers": Issuer}.items()
    }
    return _object({**sections, **named})


def _object(properties: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties), **more}


def _text(pattern: str | None = None) -> Schema:
    return {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}


def _number(lowest: int, highest: int) -> Schema:
    return {"type": "integer", "minimum": lowest, "maximum": highest}


_BOOL: Schema = {"type": "boolean"}
_ANY_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_NAMES: Schema = {"type": "array", "items": _text(_NAME)}
_PORTS: Schema = {"type": "array", "items": _number(1, 65535)}
_RESOURCES = _object({"requests": _ANY_OBJECT, "limits": _ANY_OBJECT})
_OPTIONAL_NAME = _text(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_PLACEMENT: Mapping[str, Schema] = {
    "nodeSelector": _STRINGS,
    "tolerations": _OBJECTS,
    "affinity": _ANY_OBJECT,
}
_POD: Mapping[str, Schema] = {
    **_PLACEMENT,
    "podAnnotations": _STRINGS,
    "extraEnv": _OBJECTS,
    "priorityClassName": _OPTIONAL_NAME,
    "serviceAccountAnnotations": _STRINGS,
}


def _processes() -> dict[str, Schema]:
    journal = _object(
        {
            "size": _text(_QUANTITY),
            "storageClassName": _OPTIONAL_NAME,
            "accessMode": {"enum": _ACCESS},
        }
    )
    service = _object(
        {"type": {"enum": ["ClusterIP", "LoadBalancer", "NodePort"]}, "annotations": _STRINGS}
    )
    share = {"anyOf": [_number(1, 1000), _text(r"^(100|[1-9][0-9]?)%$")]}
    return {
        "controller": _object({**_POD, "replicas": _number(1, 2), "resources": _RESOURCES}),
        "activator": _object(
            {
                **_POD,
                "replicas": _number(1, 100),
                "drainSeconds": _number(0, 3600),
                "shutdownSeconds": _number(1, 86_400),
                "journal": journal,
                "service": service,
                "maxUnavailable": share,
                "resources": _RESOURCES,
            }
        ),
        "node": _object(
            {
                **_POD,
                "enabled": _BOOL,
                "hostPath": _text(r"^/[a-zA-Z0-9._-]+(/[a-zA-Z0-9._-]+)*$"),
                "privileged": _BOOL,
                "hostPID": _BOOL,
                "runtimeClassName": _OPTIONAL_NAME,
                "registrySecret": _OPTIONAL_NAME,
                "maxUnavailable": share,
                "resources": _object({"snapshotter": _RESOURCES, "weightCache": _RESOURCES}),
            }
        ),
        "redis": _object(
            {
                **_PLACEMENT,
                "enabled": _BOOL,
                "size": _text(_QUANTITY),
                "storageClassName": _OPTIONAL_NAME,
                "resources": _RESOURCES,
            }
        ),
    }


_ACCESS = ["ReadWriteOnce", "ReadWriteOncePod"]


def _surroundings() -> dict[str, Schema]:
    issuer = _object(
        {"name": _text(_NAME), "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": _text()}
    )
    named = _object(dict.fromkeys(("controller", "activator", "node"), _OPTIONAL_NAME))
    tls = {"mode": {"enum": ["certManager", "secrets"]}, "issuer": issuer, "secrets": named}
    ingress = {
        "enabled": _BOOL,
        "className": _OPTIONAL_NAME,
        "annotations": _STRINGS,
        "host": _text(),
        "tlsSecretName": _OPTIONAL_NAME,
    }
    monitoring = {
        **dict.fromkeys(("podMonitors", "dashboards", "rules"), _BOOL),
        **dict.fromkeys(("labels", "dashboardLabels"), _STRINGS),
        "interval": _text(_DURATION),
    }
    policy = {
        "enabled": _BOOL,
        **dict.fromkeys(("callersFrom", "metricsFrom", "extraEgress"), _OBJECTS),
        **dict.fromkeys(
            ("databasePorts", "objectStorePorts", "apiServerPorts", "redisPorts"), _PORTS
        ),
    }
    return {
        "secrets": _object(
            {
                "name": _text(_NAME),
                "keys": _object(
                    dict.fromkeys(
                        (
                            "platformKey",
                            "activatorKey",
                            "nodeKey",
                            "metricsToken",
                            "databaseUrl",
                            "redisUrl",
                            "redisPassword",
                        ),
                        _text(r"^[-._a-zA-Z0-9]+$"),
                    )
                ),
                "issuers": {
                    "type": "object",
                    "additionalProperties": _text(r"^[-._a-zA-Z0-9]+$"),
                },
            }
        ),
        "s3": _object({"secretName": _OPTIONAL_NAME}),
        "tls": _object({**tls, "duration": _text(_DURATION), "renewBefore": _text(_DURATION)}),
        "networkPolicy": _object(policy),
        "admissionPolicies": _object({"enabled": _BOOL}),
        "monitoring": _object(monitoring),
        "ingress": _object(ingress),
        "gateway": _object(
            {
                "enabled": _BOOL,
                "parentRefs": _OBJECTS,
                "hostnames": {"type": "array", "items": _text()},
            }
        ),
    }


def schema() -> Schema:
    """The whole file."""
    which = ("controller", "activator", "node", "redis")
    by_digest = {"properties": {"images": {"properties": dict.fromkeys(which, _text(DIGEST))}}}
    values = {
        "nameOverride": _OPTIONAL_NAME,
        "fullnameOverride": _OPTIONAL_NAME,
        "images": _object(dict.fromkeys(which, _text(r"^\S+$"))),
        "allowTags": _BOOL,
        "imagePullSecrets": _NAMES,
        "config": config(),
        **_processes(),
        **_surroundings(),
        "global": _ANY_OBJECT,
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart pilotlight",
        **_object(values),
        "if": {"properties": {"allowTags": {"const": False}}},
        "then": by_digest,
    }

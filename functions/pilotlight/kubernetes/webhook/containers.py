"""Checks one container of a revision: image, port, variables, mounts, probes, security context."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.kubernetes.errors import FieldProblem
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

RESERVED_PORTS = frozenset({8008, 8012, 8013, 8022, 8112, 9090, 9091})
"""Ports of the queue-proxy."""
RESERVED_ENV = frozenset({"PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"})
RESERVED_NAMES = frozenset({"queue-proxy"})
RESERVED_PATHS = frozenset({"/", "/dev", "/dev/log"})
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}\Z")
_HANDLERS = ("exec", "grpc", "httpGet", "tcpSocket")


def problems(
    container: Mapping[str, Any], path: str, config: KnativeConfig
) -> Iterator[FieldProblem]:
    """The problems of a container."""
    if container.get("name") in RESERVED_NAMES:
        yield FieldProblem(
            f"{path}.name", f"{container['name']!r} is reserved by Knative", "Use another name."
        )
    if not _DIGEST.match(str(container.get("image") or "")):
        yield FieldProblem(
            f"{path}.image",
            f"{container.get('image')!r} is not referenced by digest: the image could change, and "
            f"Knative queries the registry at each deploy",
            "Write image@sha256:<64 hex digits>.",
        )
    yield from _ports(container.get("ports") or (), path)
    yield from _variables(container.get("env") or (), path, config)
    yield from _rights(container.get("securityContext") or {}, path, config)
    yield from _resources(container.get("resources") or {}, path)
    for name in ("readinessProbe", "startupProbe", "livenessProbe"):
        if container.get(name):
            yield from _probe(name, container[name], container.get("ports") or (), path)


def _ports(ports: Any, path: str) -> Iterator[FieldProblem]:
    if len(ports) > 1:
        yield FieldProblem(
            f"{path}.ports", f"{len(ports)} ports: a revision has only one", "Remove the others."
        )
    for port in ports:
        where = f"{path}.ports[0]"
        if port.get("containerPort") in RESERVED_PORTS:
            yield FieldProblem(
                f"{where}.containerPort",
                f"{port['containerPort']} is reserved for the queue-proxy",
                "Listen on 8080.",
            )
        elif not 0 < int(port.get("containerPort", 0)) < 65536:
            yield FieldProblem(
                f"{where}.containerPort",
                f"{port.get('containerPort')} is not a valid port",
                "Listen on 8080.",
            )
        if port.get("name", "") not in ("", "http1", "h2c"):
            yield FieldProblem(f"{where}.name", f"{port['name']!r}: must be http1 or h2c")
        for key in ("hostPort", "hostIP"):
            if key in port:
                yield FieldProblem(
                    f"{where}.{key}", f"must not set the field(s): {where}.{key}", "Remove it."
                )


def _variables(env: Any, path: str, config: KnativeConfig) -> Iterator[FieldProblem]:
    for index, variable in enumerate(env):
        name, where = str(variable.get("name", "")), f"{path}.env[{index}]"
        if name in RESERVED_ENV:
            yield FieldProblem(f"{where}.name", f"{name} is set by Knative", "Use another name.")
        elif not _ENV.match(name):
            yield FieldProblem(
                f"{where}.name",
                f"{name!r} is not a valid variable name",
                "Use letters, digits and _, and start with no digit.",
            )
        source = variable.get("valueFrom") or {}
        if source.keys() & {"fieldRef", "resourceFieldRef"} and (
            feature := config.lacks("kubernetes.podspec-fieldref")
        ):
            yield FieldProblem(
                f"{where}.valueFrom",
                f"requires the feature {feature.flag}",
                config.switch_on(feature),
            )


def _rights(context: Mapping[str, Any], path: str, config: KnativeConfig) -> Iterator[FieldProblem]:
    where = f"{path}.securityContext"
    capabilities = context.get("capabilities") or {}
    if capabilities.get("add") and (
        feature := config.lacks("kubernetes.containerspec-addcapabilities")
    ):
        yield FieldProblem(
            f"{where}.capabilities.add",
            f"requires the feature {feature.flag}",
            config.switch_on(feature),
        )
    if "all" in (capabilities.get("drop") or ()):
        yield FieldProblem(f"{where}.capabilities.drop", "'all' drops nothing", "Write ALL.")
    for key in ("runAsUser", "runAsGroup"):
        if not 0 <= int(context.get(key, 0)) < 1 << 31:
            yield FieldProblem(f"{where}.{key}", f"{context[key]} is not a valid id")
    if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
        yield FieldProblem(f"{where}.runAsUser", "0 is root, which runAsNonRoot forbids")


def _resources(resources: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    for kind in ("limits", "requests"):
        for name, amount in (resources.get(kind) or {}).items():
            if not re.match(r"[0-9]+(\.[0-9]+)?([EPTGMk]i?|Ki|m|u|n)?\Z", str(amount)):
                yield FieldProblem(
                    f"{path}.resources.{kind}[{name}]",
                    f"{amount!r} is not a valid quantity",
                    "Write 500m, 2 or 4Gi.",
                )


def _probe(name: str, probe: Mapping[str, Any], ports: Any, path: str) -> Iterator[FieldProblem]:
    where = f"{path}.{name}"
    handlers = [handler for handler in _HANDLERS if handler in probe]
    if len(handlers) != 1:
        yield FieldProblem(
            where, f"{len(handlers)} handlers: expected exactly one of {', '.join(_HANDLERS)}"
        )
    if name != "livenessProbe" and probe.get("successThreshold", 1) not in (0, 1):
        yield FieldProblem(f"{where}.successThreshold", f"{probe['successThreshold']}: must be 1")
    if name == "readinessProbe" and probe.get("periodSeconds"):
        yield FieldProblem(
            f"{where}.periodSeconds",
            f"{probe['periodSeconds']}: the pod would be probed at this interval in seconds "
            f"instead of every 50 ms, which slows its start",
            "Remove it.",
        )
    for key in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "failureThreshold"):
        if int(probe.get(key, 0)) < 0:
            yield FieldProblem(f"{where}.{key}", f"{probe[key]}: must not be negative")
    known = (
        {port.get("containerPort") for port in ports}
        | {port.get("name") for port in ports}
        | {None, 0}
    )
    asked = next(
        (probe[handler].get("port") for handler in handlers if isinstance(probe[handler], Mapping)),
        None,
    )
    if ports and asked not in known:
        yield FieldProblem(
            f"{where}.port",
            f"{asked}: the container listens on {ports[0].get('containerPort')} only",
        )

"""Knative's rules for the pod of a Revision: fields behind flags, volumes, containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
_BEHIND_FLAGS = {
    "affinity": "podspec-affinity",
    "topologySpreadConstraints": "podspec-topologyspreadconstraints",
    "hostAliases": "podspec-hostaliases",
    "nodeSelector": "podspec-nodeselector",
    "runtimeClassName": "podspec-runtimeclassname",
    "tolerations": "podspec-tolerations",
    "schedulerName": "podspec-schedulername",
    "priorityClassName": "podspec-priorityclassname",
    "dnsPolicy": "podspec-dnspolicy",
    "dnsConfig": "podspec-dnsconfig",
    "hostIPC": "podspec-hostipc",
    "hostPID": "podspec-hostpid",
    "hostNetwork": "podspec-hostnetwork",
    "shareProcessNamespace": "podspec-shareprocessnamespace",
}
_POD_SECURITY = (
    "runAsUser",
    "runAsGroup",
    "runAsNonRoot",
    "fsGroup",
    "supplementalGroups",
    "seccompProfile",
)
_VOLUMES = {
    "hostPath": (
        "podspec-volumes-hostpath",
        "HostPath volume support is disabled, but found HostPath volume {}",
    ),
    "csi": ("podspec-volumes-csi", "CSI volume support is disabled, but found CSI volume {}"),
    "ephemeral": (
        "podspec-volumes-ephemeral",
        "Ephemeral volume support is disabled, but found ephemeral volume {}",
    ),
    "image": (
        "podspec-volumes-image",
        "Image volume support is disabled, but found image volume {}",
    ),
    "persistentVolumeClaim": (
        "podspec-persistent-volume-claim",
        "Persistent volume claim support is disabled, but found persistent volume claim {}",
    ),
    "emptyDir": (
        "podspec-volumes-emptydir",
        "EmptyDir volume support is disabled, but found EmptyDir volume {}",
    ),
}
_ON_BY_DEFAULT = ("multi-container", "podspec-volumes-emptydir")
_RESERVED_PORTS = (8008, 8012, 8013, 8022, 8112, 9090, 9091)
_RESERVED_ENV = ("PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION")
_RESERVED_MOUNTS = ("/", "/dev", "/dev/log", "/tmp-knative-internal")
_WRITABLE = ("emptyDir", "persistentVolumeClaim", "ephemeral")


@dataclass(frozen=True, kw_only=True)
class PodRules:
    """`features`: data of config-features; `warn` takes what is only a warning."""

    features: Mapping[str, str]
    max_timeout_s: int
    max_concurrency: int
    warn: Callable[[str], None]

    def faults(self, spec: Json, path: str) -> list[str]:
        """Everything that is wrong with a pod's spec at `path`."""
        masked = [
            f"{path}.{field}"
            for field, flag in _BEHIND_FLAGS.items()
            if field in spec and not self._allows(flag)
        ]
        found = [f"must not set the field(s): {', '.join(masked)}"] if masked else []
        containers = spec.get("containers") or []
        if not containers:
            found.append(f"missing field(s): {path}.containers")
        if len(containers) > 1 and not self._allows("multi-container"):
            found.append(
                f"multi-container is off, but found {len(containers)} containers: {path}.containers"
            )
        found += (
            self._numbers(spec, path) + self._pod_security(spec, path) + self._volumes(spec, path)
        )
        if (count := len(spec.get("initContainers") or ())) and not self._enables(
            "podspec-init-containers"
        ):
            found.append(
                f"pod spec support for init-containers is off, but found {count} init containers"
            )
        if spec.get("automountServiceAccountToken"):
            found.append(f"invalid value: true: {path}.automountServiceAccountToken")
        for index, container in enumerate(containers):
            found += self._container(container, spec, f"{path}.containers[{index}]")
        if sum(len(container.get("ports") or ()) for container in containers) > 1:
            found.append(
                f"more than one container port is set: {path}.containers[*].ports\nOnly a single "
                f"port is allowed across all containers"
            )
        return found

    def _numbers(self, spec: Json, path: str) -> list[str]:
        found = []
        timeout_s = spec.get("timeoutSeconds", 0)
        bounds = {
            "timeoutSeconds": self.max_timeout_s,
            "responseStartTimeoutSeconds": timeout_s or self.max_timeout_s,
            "idleTimeoutSeconds": timeout_s or self.max_timeout_s,
            "containerConcurrency": self.max_concurrency,
        }
        for field, high in bounds.items():
            value = spec.get(field, 0)
            if not 0 <= value <= high:
                found.append(f"expected 0 <= {value} <= {high}: {path}.{field}")
        return found

    def _pod_security(self, spec: Json, path: str) -> list[str]:
        given = spec.get("securityContext") or {}
        if self._allows("podspec-securitycontext"):
            refused = [name for name in given if name not in _POD_SECURITY]
        else:
            refused = list(given)
        return (
            [
                (
                    f"must not set the field(s): "
                    f"{', '.join(f'{path}.securityContext.{name}' for name in refused)}"
                )
            ]
            if refused
            else []
        )

    def _volumes(self, spec: Json, path: str) -> list[str]:
        found = []
        mounted = {
            mount["name"]
            for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
            for mount in container.get("volumeMounts") or ()
        }
        seen: set[str] = set()
        for index, volume in enumerate(spec.get("volumes") or ()):
            for source, (flag, text) in _VOLUMES.items():
                if source in volume and not self._enables(flag):
                    found.append(text.format(volume["name"]))
            if volume["name"] not in mounted:
                found.append(
                    f'volume with name "{volume["name"]}" not mounted: {path}.volumes[{index}].name'
                )
            if volume["name"] in seen:
                found.append(
                    f'duplicate volume name "{volume["name"]}": {path}.volumes[{index}].name'
                )
            seen.add(volume["name"])
        return found

    def _container(self, container: Json, spec: Json, path: str) -> list[str]:
        found = []
        if not container.get("image"):
            found.append(f"missing field(s): {path}.image")
        if container.get("name") == "queue-proxy":
            found.append(f'"queue-proxy" is a reserved container name: {path}.name')
        found += (
            self._ports(container, path)
            + self._env(container, path)
            + self._mounts(container, spec, path)
        )
        return found + self._security(
            container.get("securityContext") or {}, f"{path}.securityContext"
        )

    def _ports(self, container: Json, path: str) -> list[str]:
        found = []
        for index, port in enumerate(container.get("ports") or ()):
            where = f"{path}.ports[{index}]"
            number = port.get("containerPort", 0)
            if number in _RESERVED_PORTS:
                found.append(f"{number} is a reserved port: {where}.containerPort")
            if not 0 <= number <= 65535:
                found.append(f"expected 0 <= {number} <= 65535: {where}.containerPort")
            if port.get("name") not in (None, "", "h2c", "http1"):
                text = "Port name must be empty, or one of: 'h2c', 'http1'"
                found.append(f"Port name {port['name']} is not allowed: {where}.name\n{text}")
            if port.get("protocol", "TCP") != "TCP":
                found.append(f"invalid value: {port['protocol']}: {where}.protocol")
        return found

    def _env(self, container: Json, path: str) -> list[str]:
        found = []
        for index, one in enumerate(container.get("env") or ()):
            where = f"{path}.env[{index}]"
            if one["name"] in _RESERVED_ENV:
                found.append(f'"{one["name"]}" is a reserved environment variable: {where}.name')
            refs = [
                name
                for name in ("fieldRef", "resourceFieldRef")
                if name in (one.get("valueFrom") or {})
            ]
            if refs and not self._allows("podspec-fieldref"):
                found.append(
                    f"must not set the field(s): "
                    f"{', '.join(f'{where}.valueFrom.{name}' for name in refs)}"
                )
        return found

    def _mounts(self, container: Json, spec: Json, path: str) -> list[str]:
        volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
        found = []
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            where = f"{path}.volumeMounts[{index}]"
            volume = volumes.get(mount["name"])
            if volume is None:
                found.append(f"volumeMount has no matching volume: {where}.name")
            elif not mount.get("readOnly") and not any(source in volume for source in _WRITABLE):
                found.append(
                    f"volume mount should be readOnly for this type of volume: {where}.readOnly"
                )
            if not mount["mountPath"].startswith("/") or mount["mountPath"].rstrip("/") in (
                "",
                *_RESERVED_MOUNTS,
            ):
                found.append(
                    f'mountPath "{mount["mountPath"]}" is a reserved path: {where}.mountPath'
                )
            if "mountPropagation" in mount and not self._enables(
                "podspec-volumes-mount-propagation"
            ):
                found.append(f"must not set the field(s): {where}.mountPropagation")
        return found

    def _security(self, given: Json, path: str) -> list[str]:
        found = []
        if given.get("privileged"):
            found.append(f"must not set the field(s): {path}.privileged")
        capabilities = given.get("capabilities") or {}
        added = [name for name in capabilities.get("add") or () if name != "NET_BIND_SERVICE"]
        if added and not self._enables("containerspec-addcapabilities"):
            found.append(f"must not set the field(s): {path}.capabilities.add")
        if "all" in (capabilities.get("drop") or ()):
            text = (
                "Kubernetes default value is insecure, Knative may default this to secure in a "
                "future release"
            )
            self.warn(f'{text}: {path}.capabilities.drop: use "ALL"')
        return found

    def _flag(self, name: str) -> str:
        default = "enabled" if name in _ON_BY_DEFAULT else "disabled"
        return self.features.get(f"kubernetes.{name}", self.features.get(name, default)).lower()

    def _allows(self, name: str) -> bool:
        return self._flag(name) in ("enabled", "allowed")

    def _enables(self, name: str) -> bool:
        return self._flag(name) == "enabled"

"""Checks a revision's spec: limits, volumes and mounts, and fields that require a feature flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.kubernetes.errors import FieldProblem
from pilotlight.kubernetes.knative_features import FEATURES
from pilotlight.kubernetes.webhook import containers
from pilotlight.kubernetes.webhook.containers import RESERVED_PATHS
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

PATH = "spec.template.spec"
_PLAIN_VOLUMES = frozenset({"secret", "configMap", "projected"})
_VOLUME_FLAGS: Mapping[str, str] = {
    "emptyDir": "kubernetes.podspec-volumes-emptydir",
    "hostPath": "kubernetes.podspec-volumes-hostpath",
    "csi": "kubernetes.podspec-volumes-csi",
    "ephemeral": "kubernetes.podspec-volumes-ephemeral",
    "image": "kubernetes.podspec-volumes-image",
    "persistentVolumeClaim": "kubernetes.podspec-persistent-volume-claim",
}
_WRITABLE = frozenset({"emptyDir", "persistentVolumeClaim", "ephemeral"})
_POD_FLAGS: Mapping[str, str] = {
    field: feature.flag
    for feature in FEATURES
    if feature.flag.startswith("kubernetes.podspec-")
    and "-volume" not in feature.flag
    and feature.flag != "kubernetes.podspec-fieldref"
    for field in feature.fields
}


def problems(spec: Mapping[str, Any], config: KnativeConfig) -> Iterator[FieldProblem]:
    """The problems of a revision's spec."""
    yield from _bounds(spec, config)
    for field, flag in _POD_FLAGS.items():
        if field in spec and (feature := config.lacks(flag)):
            yield FieldProblem(
                f"{PATH}.{field}", f"requires the feature {feature.flag}", config.switch_on(feature)
            )
    if spec.get("automountServiceAccountToken", False):
        yield FieldProblem(
            f"{PATH}.automountServiceAccountToken",
            "must be false",
            "Remove it, or write false.",
        )
    those = spec.get("containers") or ()
    if not those:
        yield FieldProblem(f"{PATH}.containers", "has no container")
    for index, container in enumerate(those):
        yield from containers.problems(container, f"{PATH}.containers[{index}]", config)
    yield from _volumes(spec, config)


def _bounds(spec: Mapping[str, Any], config: KnativeConfig) -> Iterator[FieldProblem]:
    timeout_s = int(spec.get("timeoutSeconds") or 0)
    if not 0 <= timeout_s <= config.max_timeout_s:
        yield FieldProblem(
            f"{PATH}.timeoutSeconds",
            f"expected 0 <= {timeout_s} <= {config.max_timeout_s}",
            config.set_default("max-revision-timeout-seconds", str(timeout_s)),
        )
    for key in ("responseStartTimeoutSeconds", "idleTimeoutSeconds"):
        value = int(spec.get(key) or 0)
        if value < 0 or (timeout_s and value > timeout_s):
            yield FieldProblem(
                f"{PATH}.{key}",
                f"expected 0 <= {value} <= {timeout_s}",
                "Set it to timeoutSeconds.",
            )
    if (
        not 0
        <= (concurrency := int(spec.get("containerConcurrency") or 0))
        <= config.max_concurrency
    ):
        yield FieldProblem(
            f"{PATH}.containerConcurrency",
            f"expected 0 <= {concurrency} <= {config.max_concurrency}",
            config.set_default("container-concurrency-max-limit", str(concurrency)),
        )


def _volumes(spec: Mapping[str, Any], config: KnativeConfig) -> Iterator[FieldProblem]:
    kinds: dict[str, str] = {}
    for index, volume in enumerate(spec.get("volumes") or ()):
        name, where = str(volume.get("name", "")), f"{PATH}.volumes[{index}]"
        kind = next((key for key in volume if key != "name"), "")
        if name in kinds:
            yield FieldProblem(f"{where}.name", f"two volumes have the name {name!r}")
        kinds[name] = kind
        if kind in _VOLUME_FLAGS:
            if feature := config.lacks(_VOLUME_FLAGS[kind]):
                said = (
                    f"{kind[0].upper()}{kind[1:]} volume support is disabled, but found volume "
                    f"{name}: requires the feature {feature.flag}"
                )
                yield FieldProblem(f"{where}.{kind}", said, config.switch_on(feature))
        elif kind not in _PLAIN_VOLUMES:
            yield FieldProblem(
                f"{where}.{kind}",
                "Knative does not support this type of volume",
                f"Use one of {', '.join(sorted({*_PLAIN_VOLUMES, *_VOLUME_FLAGS}))}.",
            )
    mounted: set[str] = set()
    for index, container in enumerate(spec.get("containers") or ()):
        yield from _mounts(container, f"{PATH}.containers[{index}]", kinds, mounted)
    for name in sorted(kinds.keys() - mounted):
        yield FieldProblem(
            f"{PATH}.volumes",
            f"no container mounts the volume {name!r}",
            "Mount it, or remove it.",
        )


def _mounts(
    container: Mapping[str, Any], path: str, kinds: Mapping[str, str], mounted: set[str]
) -> Iterator[FieldProblem]:
    places: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        where, place = f"{path}.volumeMounts[{index}]", str(mount.get("mountPath", ""))
        kind = kinds.get(str(mount.get("name", "")))
        if kind is None:
            yield FieldProblem(f"{where}.name", f"there is no volume {mount.get('name')!r}")
        elif kind not in _WRITABLE and not mount.get("readOnly", kind in _PLAIN_VOLUMES):
            yield FieldProblem(
                f"{where}.readOnly",
                "volume mount should be readOnly for this type of volume",
                "Write readOnly: true.",
            )
        if not place.startswith("/") or place in RESERVED_PATHS:
            yield FieldProblem(
                f"{where}.mountPath",
                f"{place!r} cannot be a mount path",
                "Mount it below its own directory.",
            )
        if place in places:
            yield FieldProblem(f"{where}.mountPath", f"{place!r} is mounted twice")
        places.add(place)
        mounted.add(str(mount.get("name", "")))

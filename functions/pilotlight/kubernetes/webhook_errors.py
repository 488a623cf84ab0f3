"""Translates messages of Knative's webhook into field problems with fixes.

Messages of knative/serving after v1.23 (k8s_validation.go, route_validation.go,
annotation_validation.go). An unknown message is passed on unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pilotlight.kubernetes.errors import FieldProblem
from pilotlight.kubernetes.manifests.knative_features import (
    BY_FIELD,
    Feature,
    patch_config,
    switch_on,
)

_HEAD = re.compile(r"^validation failed: ")
_MASKED = re.compile(r"must not set the field\(s\): (?P<fields>[^\n]+)")
_VOLUME = re.compile(
    r"(?P<type>hostpath|csi|ephemeral|image|persistent volume claim|emptydir) volume support is "
    r"(?:disabled|off)"
    r"(?:, but found [^\n]*?volume ?(?P<name>[\w-]*))?",
    re.IGNORECASE,
)
_VOLUMES = {
    "hostpath": "hostPath",
    "csi": "csi",
    "ephemeral": "ephemeral",
    "image": "image volume",
    "persistent volume claim": "persistentVolumeClaim",
    "emptydir": "emptyDir",
}
_PATH = r"(?:spec|metadata)[\w.\[\]/-]*"
_TEMPLATE = "spec.template"
_SCALING = f"{_TEMPLATE}.metadata.annotations.autoscaling.knative.dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A message pattern with its field, its meaning and its fix: a sentence, or a key of one of
    Knative's ConfigMaps.

    Named groups of `pattern` are inserted into the texts.
    """

    pattern: str
    field: str
    said: str
    fix: str = ""
    config: tuple[str, str, str] | None = None

    def problem(self, line: str, namespace: str) -> FieldProblem | None:
        found = re.search(self.pattern, line, re.IGNORECASE)
        if found is None:
            return None
        groups = found.groupdict()
        fix = self.fix
        if self.config is not None:
            name, key, value = self.config
            command = patch_config(name, {key: value.format(**groups)}, knative_namespace=namespace)
            fix = f"{fix}{command}"
        return FieldProblem(self.field.format(**groups), self.said.format(**groups), fix)


_RULES = (
    _Rule(
        pattern=r"=0 not allowed by cluster",
        field=f"{_SCALING}/initial-scale",
        said="this cluster does not allow an initial scale of zero, without which each deploy "
        "needs a free GPU",
        config=("config-autoscaler", "allow-zero-initial-scale", "true"),
    ),
    _Rule(
        pattern=r"expected \d+ <= (?P<value>\d+) <= (?P<most>\d+): "
        r"(?P<field>[\w.\[\]]*timeoutSeconds)",
        field="{field}",
        said="{value} s exceeds the cluster's limit of {most} s (max-revision-timeout-seconds)",
        config=("config-defaults", "max-revision-timeout-seconds", "{value}"),
    ),
    _Rule(
        pattern=r"expected \d+ <= (?P<value>\d+) <= (?P<most>\d+): "
        r"(?P<field>[\w.\[\]]*containerConcurrency)",
        field="{field}",
        said="{value} exceeds the cluster's limit of {most} (container-concurrency-max-limit)",
        config=("config-defaults", "container-concurrency-max-limit", "{value}"),
    ),
    _Rule(
        pattern=r"traffic targets sum to (?P<sum>-?\d+), want 100",
        field="spec.traffic",
        said="percents add up to {sum}, must be exactly 100",
        fix="set weights that add up to 100: pilotlight traffic set",
    ),
    _Rule(
        pattern=r"autoscaling annotations must be put under",
        field="metadata.annotations",
        said="autoscaling annotations only take effect on the revision's template",
        fix=f"move them to {_TEMPLATE}.metadata.annotations",
    ),
    _Rule(
        pattern=rf"volume mount should be readOnly for this type of volume(?:: "
        rf"(?P<field>{_PATH}))?",
        field=f"{_TEMPLATE}.spec.containers[0].volumeMounts",
        said="Knative always mounts this type of volume read-only",
        fix="set readOnly: true; only the node agent writes to it",
    ),
    _Rule(
        pattern=r"saw the following changes without a name change",
        field=f"{_TEMPLATE}.metadata.name",
        said="the template changed but its revision's name did not: revisions are immutable",
        fix="deploy again, which creates a new name",
    ),
    _Rule(
        pattern=r"(?P<text>[^\n]*max-?scale[^\n]*max-scale-limit[^\n]*)",
        field=f"{_SCALING}/max-scale",
        said="{text}",
        fix="lower max_instances, or: ",
        config=("config-autoscaler", "max-scale-limit", "0"),
    ),
)


def webhook_problems(why: str, *, knative_namespace: str) -> list[FieldProblem]:
    """The field problems of the text after `denied the request:`, line by line."""
    problems: list[FieldProblem] = []
    for line in _HEAD.sub("", why.strip()).splitlines():
        problems += _of_line(line.strip(), knative_namespace)
    return problems or [FieldProblem("", why.strip())]


def _of_line(line: str, namespace: str) -> list[FieldProblem]:
    if not line:
        return []
    if (masked := _MASKED.search(line)) is not None:
        return [_masked(path.strip(), namespace) for path in masked.group("fields").split(",")]
    if (volume := _VOLUME.search(line)) is not None:
        feature, name = _VOLUMES[volume.group("type").lower()], volume.group("name") or ""
        return [
            _switched_off(
                f"{_TEMPLATE}.spec.volumes",
                BY_FIELD[feature],
                namespace,
                what=f"{feature} {name}".strip(),
            )
        ]
    if "support for init-containers is off" in line:
        return [
            _switched_off(f"{_TEMPLATE}.spec.initContainers", BY_FIELD["initContainers"], namespace)
        ]
    for rule in _RULES:
        if (problem := rule.problem(line, namespace)) is not None:
            return [problem]
    message, _, path = line.rpartition(": ")
    return (
        [FieldProblem(path, message)]
        if message and re.fullmatch(_PATH, path)
        else [FieldProblem("", line)]
    )


def _masked(path: str, namespace: str) -> FieldProblem:
    parts = re.sub(r"\[\d+\]", "", path).split(".")
    names = (".".join(parts[-2:]), parts[-1])  # `capabilities.add`, `nodeSelector`
    if path.startswith(f"{_TEMPLATE}.spec.securityContext"):
        names = ("securityContext", "")
    feature = next((BY_FIELD[name] for name in names if name in BY_FIELD), None)
    if feature is None:
        return FieldProblem(path, "Knative never allows this field")
    return _switched_off(path, feature, namespace)


def _switched_off(path: str, feature: Feature, namespace: str, *, what: str = "") -> FieldProblem:
    said = f"disabled in this cluster ({feature.flag})"
    return FieldProblem(
        path, f"{what}: {said}" if what else said, switch_on(feature, knative_namespace=namespace)
    )

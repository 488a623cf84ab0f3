"""Checks Knative's ConfigMaps: the flags and limits on which our manifests depend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pilotlight.kubernetes.doctor.facts import Facts
from pilotlight.kubernetes.doctor.findings import BROKEN, NOTE, OK, Finding
from pilotlight.kubernetes.doctor.gpus import gpu_nodes
from pilotlight.kubernetes.manifests.knative_features import BY_FIELD, patch_config, switch_on
from pilotlight.kubernetes.settings import ClusterSettings

_DEFAULT_TIMEOUT_S = 600
_DEFAULT_CONCURRENCY = 1000
_DEFAULT_NON_ACTIVE = 1000
_MANY_NON_ACTIVE = 100
"""Each retained revision has a Deployment, a launch document, and an entry in every watch."""


@dataclass(frozen=True, slots=True)
class Need:
    """A field of our pods, its purpose, and whether only functions with GPUs need it."""

    field: str
    why: str
    is_for_gpus: bool = False


def needs(settings: ClusterSettings) -> list[Need]:
    """Fields of our manifests that require a flag with these settings
    (pilotlight/kubernetes/manifests)."""
    found = [
        Need("hostPath", "the node agent provides code and weights in it"),
        Need("affinity", "pods go to nodes that hold the weights"),
        Need("nodeSelector", "pods with a GPU go to nodes that have it", is_for_gpus=True),
        Need("tolerations", "nodes with GPUs are tainted", is_for_gpus=True),
    ]
    if settings.reserved_priority_class is not None:
        why = f"cluster.reserved_priority_class is {settings.reserved_priority_class}"
        found.append(Need("priorityClassName", why))
    if settings.runtime_class is not None:
        found.append(Need("runtimeClassName", f"cluster.runtime_class is {settings.runtime_class}"))
    elif settings.gpu_runtime_class is not None:
        found.append(
            Need(
                "runtimeClassName",
                f"cluster.gpu_runtime_class is {settings.gpu_runtime_class}",
                is_for_gpus=True,
            )
        )
    return found


def check(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about Knative's settings."""
    if not facts.is_known("config"):
        yield Finding(
            what="Knative's settings",
            state=NOTE,
            detail=f"not checked: {facts.troubles['config']}",
        )
        return
    if absent := [name for name, data in facts.config.items() if data is None]:
        detail = f"no ConfigMap {', '.join(absent)} in {settings.knative_namespace}"
        yield Finding(
            what="Knative's settings",
            state=BROKEN,
            detail=detail,
            way_out="Apply Knative's serving-core.yaml again.",
        )
    data = {name: found or {} for name, found in facts.config.items()}
    yield from _features(
        data["config-features"], settings, has_gpus=bool(gpu_nodes(facts, settings))
    )
    yield from _autoscaler(data["config-autoscaler"], settings)
    yield from _defaults(data["config-defaults"], facts, settings)
    yield from _deployment(data["config-deployment"], settings)
    yield _garbage(data["config-gc"], settings)


def _features(
    data: Mapping[str, str], settings: ClusterSettings, *, has_gpus: bool
) -> Iterator[Finding]:
    for need in needs(settings):
        feature = BY_FIELD[need.field]
        what = f"feature {need.field}"
        if feature.is_on(data):
            yield Finding(what=what, state=OK, detail=feature.flag)
            continue
        state = NOTE if need.is_for_gpus and not has_gpus else BROKEN
        value = data.get(feature.flag, feature.default)
        wanted = "must be enabled" if feature.needs_enabled else "must be allowed or enabled"
        detail = f"{feature.flag} is {value}, {wanted}: {need.why}"
        if state == NOTE:
            detail += " (no node has one yet)"
        yield Finding(
            what=what,
            state=state,
            detail=detail,
            commands=(switch_on(feature, knative_namespace=settings.knative_namespace),),
        )


def _autoscaler(data: Mapping[str, str], settings: ClusterSettings) -> Iterator[Finding]:
    def command(key: str, value: str) -> tuple[str, ...]:
        return (
            patch_config(
                "config-autoscaler", {key: value}, knative_namespace=settings.knative_namespace
            ),
        )

    what = "revisions at zero"
    if _is_true(data, "allow-zero-initial-scale", default=False):
        yield Finding(what=what, state=OK, detail="allow-zero-initial-scale is true")
    else:
        detail = (
            "allow-zero-initial-scale is false: every deploy would be refused or need a free GPU"
        )
        yield Finding(
            what=what,
            state=BROKEN,
            detail=detail,
            commands=command("allow-zero-initial-scale", "true"),
        )
    if not _is_true(data, "enable-scale-to-zero", default=True):
        detail = "enable-scale-to-zero is false: every function keeps a pod"
        yield Finding(
            what="scale to zero",
            state=BROKEN,
            detail=detail,
            commands=command("enable-scale-to-zero", "true"),
        )
    limit = _number(data, "max-scale-limit", default=0)
    if limit:
        detail = f"max-scale-limit is {limit}: a function with a greater max_instances is refused"
        yield Finding(
            what="instances of a function",
            state=NOTE,
            detail=detail,
            commands=command("max-scale-limit", "0"),
        )


def _defaults(
    data: Mapping[str, str], facts: Facts, settings: ClusterSettings
) -> Iterator[Finding]:
    namespace = settings.knative_namespace
    bound = _number(data, "max-revision-timeout-seconds", default=_DEFAULT_TIMEOUT_S)
    what = "bound of a request's time"
    if bound < settings.max_timeout_s:
        detail = (
            f"max-revision-timeout-seconds is {bound}, cluster.max_timeout_s "
            f"{settings.max_timeout_s}: long functions would be refused"
        )
        key = {"max-revision-timeout-seconds": str(settings.max_timeout_s)}
        command = patch_config("config-defaults", key, knative_namespace=namespace)
        yield Finding(what=what, state=BROKEN, detail=detail, commands=(command,))
    elif bound > settings.max_timeout_s:
        detail = (
            f"max-revision-timeout-seconds is {bound}, cluster.max_timeout_s only "
            f"{settings.max_timeout_s}"
        )
        way_out = f"To use it, set max_timeout_s: {bound} in section cluster of platform.yaml."
        yield Finding(what=what, state=NOTE, detail=detail, way_out=way_out)
    else:
        yield Finding(what=what, state=OK, detail=f"{bound} s, including the start")
    yield from _drain(bound, facts, namespace)
    most = _number(data, "container-concurrency-max-limit", default=_DEFAULT_CONCURRENCY)
    if most < _DEFAULT_CONCURRENCY:
        detail = (
            f"container-concurrency-max-limit is {most}: a function with a greater "
            f"max_inputs is refused"
        )
        key = {"container-concurrency-max-limit": str(_DEFAULT_CONCURRENCY)}
        command = patch_config("config-defaults", key, knative_namespace=namespace)
        yield Finding(what="calls at once in a pod", state=NOTE, detail=detail, commands=(command,))


def _drain(bound_s: int, facts: Facts, namespace: str) -> Iterator[Finding]:
    """Knative's activator drops pending requests after its grace period, which must be as long as a
    request may take."""
    activator = facts.knative.get("activator")
    if activator is None:
        return
    spec = (activator.get("spec") or {}).get("template", {}).get("spec", {})
    grace_s = int(spec.get("terminationGracePeriodSeconds") or 30)
    if grace_s >= bound_s:
        return
    body = f'{{"spec":{{"template":{{"spec":{{"terminationGracePeriodSeconds":{bound_s}}}}}}}}}'
    detail = (
        f"Knative's activator has a grace period of {grace_s} s, but a start may take "
        f"{bound_s} s: an upgrade would abort starts"
    )
    command = f"kubectl patch deployment/activator -n {namespace} --type merge -p '{body}'"
    yield Finding(
        what="drain of Knative's activator", state=NOTE, detail=detail, commands=(command,)
    )


def _deployment(data: Mapping[str, str], settings: ClusterSettings) -> Iterator[Finding]:
    def command(key: str, value: str) -> tuple[str, ...]:
        return (
            patch_config(
                "config-deployment", {key: value}, knative_namespace=settings.knative_namespace
            ),
        )

    if not _is_true(data, "pod-is-always-schedulable", default=False):
        detail = (
            "pod-is-always-schedulable is false: if nodes are added on demand, a pod that "
            "waits for one fails its revision"
        )
        yield Finding(
            what="nodes on demand",
            state=NOTE,
            detail=detail,
            commands=command("pod-is-always-schedulable", "true"),
        )
    kind = data.get("default-affinity-type", "prefer-spread-revision-over-nodes")
    if kind != "none":
        detail = (
            f"default-affinity-type is {kind}: functions without weights are spread over "
            f"nodes and start cold on each"
        )
        yield Finding(
            what="default affinity",
            state=NOTE,
            detail=detail,
            commands=command("default-affinity-type", "none"),
        )


def _garbage(data: Mapping[str, str], settings: ClusterSettings) -> Finding:
    text = data.get("max-non-active-revisions", str(_DEFAULT_NON_ACTIVE))
    what = "old revisions"
    if text.isdigit() and int(text) <= _MANY_NON_ACTIVE:
        return Finding(what=what, state=OK, detail=f"at most {text} per function are kept")
    wanted = {"max-non-active-revisions": "20", "min-non-active-revisions": "5"}
    detail = (
        f"max-non-active-revisions is {text}: each function keeps as many, with a Deployment each"
    )
    command = patch_config("config-gc", wanted, knative_namespace=settings.knative_namespace)
    return Finding(what=what, state=NOTE, detail=detail, commands=(command,))


def _is_true(data: Mapping[str, str], key: str, *, default: bool) -> bool:
    return data[key].strip().lower() == "true" if key in data else default


def _number(data: Mapping[str, str], key: str, *, default: int) -> int:
    text = data.get(key, "").strip()
    return int(text) if text.isdigit() else default

"""Checks nodes with GPUs: drivers, labels, taints, runtime classes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from pilotlight.kubernetes.doctor.facts import Facts
from pilotlight.kubernetes.doctor.findings import BROKEN, NOTE, OK, Finding
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import Object

# of gpu-feature-discovery, newest first
_DRIVER_LABELS = ("nvidia.com/cuda.driver-version.full", "nvidia.com/cuda.driver.major")
_PRESENT = "nvidia.com/gpu.present"


def gpu_nodes(facts: Facts, settings: ClusterSettings) -> list[Object]:
    """Nodes with allocatable GPUs."""
    return [node for node in facts.nodes if _gpus(node, settings) > 0]


def check(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about GPUs and runtime classes."""
    if not facts.is_known("nodes"):
        yield Finding(what="nodes", state=NOTE, detail=f"not checked: {facts.troubles['nodes']}")
        return
    yield _ready(facts)
    found = gpu_nodes(facts, settings)
    yield from _drivers(facts, settings)
    if found:
        count = sum(_gpus(node, settings) for node in found)
        yield Finding(
            what="GPUs", state=OK, detail=f"{count} of {settings.gpu_resource} on {_named(found)}"
        )
        yield from _labels(found, settings)
        yield from _versions(found)
        yield from _taints(found, settings)
    else:
        detail = f"no node offers {settings.gpu_resource}: functions with gpu= cannot start"
        yield Finding(
            what="GPUs",
            state=NOTE,
            detail=detail,
            way_out="Install the GPU operator, or its driver and device plugin.",
        )
    yield from _runtimes(facts, settings, has_gpus=bool(found))


def _ready(facts: Facts) -> Finding:
    away = [node for node in facts.nodes if not _is_ready(node)]
    if not facts.nodes:
        return Finding(what="nodes", state=BROKEN, detail="the cluster has none")
    if away:
        commands = tuple(f"kubectl describe node {_name(node)}" for node in away)
        return Finding(
            what="nodes", state=NOTE, detail=f"not ready: {_named(away)}", commands=commands
        )
    return Finding(what="nodes", state=OK, detail=f"{len(facts.nodes)} ready")


def _drivers(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Nodes labelled as having GPUs that offer none: the driver or device plugin is missing."""
    silent = [
        node for node in facts.nodes if _has_gpu_label(node, settings) and not _gpus(node, settings)
    ]
    if silent:
        detail = (
            f"{_named(silent)}: labelled as having a GPU, but {settings.gpu_resource} is not "
            f"allocatable"
        )
        way_out = "Check that the driver and the device plugin run on these nodes."
        commands = tuple(
            f"kubectl get pods -A -o wide --field-selector spec.nodeName={_name(node)}"
            for node in silent
        )
        yield Finding(
            what="GPU drivers", state=BROKEN, detail=detail, way_out=way_out, commands=commands
        )


def _labels(found: Sequence[Object], settings: ClusterSettings) -> Iterator[Finding]:
    bare = [node for node in found if settings.gpu_label not in _labels_of(node)]
    if bare:
        detail = (
            f"{_named(bare)}: without the label {settings.gpu_label}, by which functions select "
            f"a GPU"
        )
        commands = tuple(
            f"kubectl label node {_name(node)} {settings.gpu_label}=PRODUCT" for node in bare
        )
        way_out = "Run gpu-feature-discovery, which sets it, or set cluster.gpu_label."
        yield Finding(
            what="GPU labels", state=BROKEN, detail=detail, way_out=way_out, commands=commands
        )
    products = {
        _labels_of(node)[settings.gpu_label]
        for node in found
        if settings.gpu_label in _labels_of(node)
    }
    if products:
        yield Finding(what="GPU products", state=OK, detail=", ".join(sorted(products)))
    unknown = {
        name: product for name, product in settings.gpu_products.items() if product not in products
    }
    if unknown:
        listed = ", ".join(f"{name}: {product}" for name, product in sorted(unknown.items()))
        detail = f"no node has these products of cluster.gpu_products: {listed}"
        yield Finding(
            what="GPU names",
            state=NOTE,
            detail=detail,
            way_out=f"Nodes have: {', '.join(sorted(products)) or 'none'}.",
        )


def _versions(found: Sequence[Object]) -> Iterator[Finding]:
    drivers = {
        next((_labels_of(node)[key] for key in _DRIVER_LABELS if key in _labels_of(node)), "")
        for node in found
    } - {""}
    if len(drivers) > 1:
        detail = (
            f"several: {', '.join(sorted(drivers))}. A snapshot with a GPU is restored only "
            f"on nodes with the same driver"
        )
        yield Finding(what="GPU driver versions", state=NOTE, detail=detail)
    elif drivers:
        yield Finding(what="GPU driver versions", state=OK, detail=drivers.pop())


def _taints(found: Sequence[Object], settings: ClusterSettings) -> Iterator[Finding]:
    for node in found:
        taints = (node.get("spec") or {}).get("taints") or ()
        foreign = [
            t
            for t in taints
            if t.get("key") != settings.gpu_resource
            and t.get("effect") in ("NoSchedule", "NoExecute")
        ]
        foreign = [t for t in foreign if not str(t.get("key")).startswith("node.kubernetes.io/")]
        if foreign:
            shown = [f"{t['key']}:{t['effect']}" for t in foreign]
            commands = tuple(f"kubectl taint node {_name(node)} {taint}-" for taint in shown)
            detail = (
                f"{_name(node)}: tainted {', '.join(shown)}; functions tolerate "
                f"{settings.gpu_resource} only"
            )
            yield Finding(what="taints", state=NOTE, detail=detail, commands=commands)


def _runtimes(facts: Facts, settings: ClusterSettings, *, has_gpus: bool) -> Iterator[Finding]:
    if not facts.is_known("runtime_classes"):
        yield Finding(
            what="runtime classes",
            state=NOTE,
            detail=f"not checked: {facts.troubles['runtime_classes']}",
        )
        return
    wanted = [("cluster.gpu_runtime_class", settings.gpu_runtime_class)] if has_gpus else []
    wanted.append(("cluster.runtime_class", settings.runtime_class))
    for setting, name in wanted:
        if name is None:
            continue
        if name in facts.runtime_classes:
            yield Finding(what=f"runtime class {name}", state=OK, detail=f"set by {setting}")
            continue
        body = {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": name},
            "handler": name,
        }
        detail = f"{setting} names it, but it does not exist: its pods cannot be created"
        way_out = (
            f"Create it if the nodes' container runtime has a handler {name}; otherwise set "
            f"{setting.split('.')[1]}: null."
        )
        yield Finding(
            what=f"runtime class {name}",
            state=BROKEN,
            detail=detail,
            way_out=way_out,
            commands=(f"echo {shlex.quote(json.dumps(body))} | kubectl apply -f -",),
        )


def _gpus(node: Object, settings: ClusterSettings) -> int:
    text = str(
        ((node.get("status") or {}).get("allocatable") or {}).get(settings.gpu_resource, "0")
    )
    return int(text) if text.isdigit() else 0


def _has_gpu_label(node: Object, settings: ClusterSettings) -> bool:
    labels = _labels_of(node)
    return settings.gpu_label in labels or labels.get(_PRESENT) == "true"


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _labels_of(node: Object) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _name(node: Object) -> str:
    return str(node["metadata"]["name"])


def _named(nodes: Sequence[Object]) -> str:
    names = [_name(node) for node in nodes]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

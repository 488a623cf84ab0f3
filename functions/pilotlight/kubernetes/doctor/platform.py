"""Checks the platform's own objects in a cluster: namespaces, node agents, rights."""

from __future__ import annotations

from collections.abc import Iterator

from pilotlight.kubernetes import names
from pilotlight.kubernetes.doctor.facts import AGENT_SELECTOR, AUTOSCALER_LEASE, Facts
from pilotlight.kubernetes.doctor.findings import BROKEN, NOTE, OK, Finding
from pilotlight.kubernetes.doctor.gpus import gpu_nodes
from pilotlight.kubernetes.rbac import RbacRule, Role, rules_of_account, tenant_role, warm_role
from pilotlight.kubernetes.settings import UNLABELLED, ClusterSettings
from pilotlight.kubernetes.watch_events import Object

_COMPONENT = "app.kubernetes.io/component"


def check(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about the platform's own objects."""
    yield from _namespaces(facts, settings)
    yield from _parts(facts, settings)
    yield from _autoscaler(facts, settings)
    yield from _agents(facts, settings)
    yield from _rights(facts, settings)
    yield from _warm_pods(facts, settings)
    if settings.runtime_image is None:
        way_out = (
            "Set cluster.runtime_image of platform.yaml to the runtime image, by digest "
            "(docs/how-to/kubernetes.md)."
        )
        detail = (
            "cluster.runtime_image is null: functions without their own image cannot be deployed"
        )
        yield Finding(what="runtime image", state=NOTE, detail=detail, way_out=way_out)


def _namespaces(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    if not facts.is_known("namespace"):
        yield Finding(
            what="namespace", state=NOTE, detail=f"not checked: {facts.troubles['namespace']}"
        )
    elif facts.namespace is None:
        command = f"kubectl create namespace {settings.namespace}"
        yield Finding(
            what="namespace",
            state=BROKEN,
            detail=f"{settings.namespace} does not exist",
            commands=(command,),
        )
    else:
        yield Finding(what="namespace", state=OK, detail=settings.namespace)
    if not facts.is_known("tenants"):
        return
    ending = [
        str(one["metadata"]["name"])
        for one in facts.tenants
        if (one.get("status") or {}).get("phase") == "Terminating"
    ]
    if ending:
        commands = tuple(
            f"kubectl get namespace {name} -o jsonpath='{{.status.conditions}}'" for name in ending
        )
        detail = (
            f"being deleted: {', '.join(ending)}. Deploys to them fail until they are recreated"
        )
        yield Finding(what="tenants' namespaces", state=NOTE, detail=detail, commands=commands)
    elif facts.tenants:
        yield Finding(what="tenants' namespaces", state=OK, detail=str(len(facts.tenants)))
    yield from _owners(facts)


def _owners(facts: Facts) -> Iterator[Finding]:
    """Findings about tenants' namespaces of another platform, which keep the controller from
    changing anything. The adopted ones have no other label for long."""
    owners: dict[str, list[str]] = {}
    for one in facts.tenants:
        if (one.get("status") or {}).get("phase") == "Terminating":
            continue
        labels = one["metadata"].get("labels") or {}
        platform = str(labels.get(names.PLATFORM) or UNLABELLED)
        owners.setdefault(platform, []).append(str(one["metadata"]["name"]))
    leader = facts.lease["metadata"].get("annotations") or {} if facts.lease is not None else {}
    ours = leader.get(names.PLATFORM)
    if ours is None and len(owners) == 1 and UNLABELLED not in owners:
        (ours,) = owners  # no controller leads yet
    foreign = {platform: owners[platform] for platform in sorted(owners) if platform != ours}
    if not foreign:
        return
    said = "; ".join(f"{', '.join(found)} of {platform}" for platform, found in foreign.items())
    yield Finding(
        what="tenants' namespaces",
        state=BROKEN,
        detail=f"of another platform than the controller's ({ours or 'none leads'}): {said}. The "
        f"controller changes nothing in the cluster until they are gone or adopted",
        way_out="If its database was replaced by mistake, connect the right one. An adopted "
        "platform's functions that this one does not have are deleted.",
        commands=tuple(f"pilotlight cluster adopt {platform}" for platform in foreign),
    )


def _parts(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about the controller and the activators."""
    if not facts.is_known("parts"):
        yield Finding(what="platform", state=NOTE, detail=f"not checked: {facts.troubles['parts']}")
        return
    for component in ("controller", "activator"):
        found = [
            one
            for one in facts.parts
            if (one["metadata"].get("labels") or {}).get(_COMPONENT) == component
        ]
        wanted = sum(int((one.get("spec") or {}).get("replicas", 1)) for one in found)
        ready = sum(int((one.get("status") or {}).get("readyReplicas") or 0) for one in found)
        if not found:
            detail = f"not installed in {settings.namespace}"
            yield Finding(
                what=component,
                state=BROKEN,
                detail=detail,
                way_out="Install the chart (deploy/kubernetes/chart).",
            )
        elif ready < wanted:
            commands = tuple(
                f"kubectl describe {one['kind'].lower()}/{one['metadata']['name']} -n "
                f"{settings.namespace}"
                for one in found
            )
            yield Finding(
                what=component,
                state=NOTE if ready else BROKEN,
                detail=f"{ready} of {wanted} are ready",
                commands=commands,
            )
        else:
            yield Finding(what=component, state=OK, detail=f"{ready} ready")


def _autoscaler(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Which activator scales functions; nothing where Knative's autoscaler does."""
    what = "autoscaler"
    if settings.uses_kpa:
        return
    if not facts.is_known("autoscaler_lease"):
        detail = f"not checked: {facts.troubles['autoscaler_lease']}"
        yield Finding(what=what, state=NOTE, detail=detail)
        return
    lease = (facts.autoscaler_lease or {}).get("spec") or {}
    if holder := lease.get("holderIdentity"):
        detail = f"pilotlight.dev, led by {holder}, renewed {lease.get('renewTime')}"
        yield Finding(what=what, state=OK, detail=detail)
        return
    yield Finding(
        what=what,
        state=BROKEN,
        detail=f"no activator holds the Lease {AUTOSCALER_LEASE}: the number of pods does not "
        f"change",
        way_out="Where activators run, their logs say why none leads (autoscaler not available).",
    )


def _agents(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    what = "node agents"
    for name in ("agents", "agent_pods", "nodes"):
        if not facts.is_known(name):
            yield Finding(what=what, state=NOTE, detail=f"not checked: {facts.troubles[name]}")
            return
    if not facts.agents:
        detail = (
            f"no DaemonSet with labels {AGENT_SELECTOR} in {settings.namespace}: pods get neither "
            f"code nor weights"
        )
        yield Finding(
            what=what,
            state=BROKEN,
            detail=detail,
            way_out="Install the chart (deploy/kubernetes/chart).",
        )
        return
    running = {
        str((pod.get("spec") or {}).get("nodeName") or "")
        for pod in facts.agent_pods
        if _is_ready(pod)
    }
    wanted = [node for node in facts.nodes if not _is_closed(node)]
    without = [
        str(node["metadata"]["name"]) for node in wanted if node["metadata"]["name"] not in running
    ]
    if not without:
        yield Finding(what=what, state=OK, detail=f"on {len(running)} nodes")
        return
    has_gpu = {str(node["metadata"]["name"]) for node in gpu_nodes(facts, settings)}
    state = BROKEN if has_gpu & set(without) or not running else NOTE
    detail = (
        f"none is ready on "
        f"{', '.join(without[:5])}{' and more' if len(without) > 5 else ''}: pods on these "
        f"nodes cannot start"
    )
    commands = (f"kubectl get pods -n {settings.namespace} -l {AGENT_SELECTOR} -o wide",)
    yield Finding(
        what=what,
        state=state,
        detail=detail,
        way_out="If taints keep the pods away, set the tolerations in the chart's values.",
        commands=commands,
    )


def _rights(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    what = f"rights of {facts.role}"
    if not facts.is_known("lacking"):
        yield Finding(what=what, state=NOTE, detail=f"not checked: {facts.troubles['lacking']}")
        return
    if not facts.lacking:
        asks_tenants = any(
            right.scope == "tenant" for right in rules_of_account(facts.role, settings)
        )
        detail = (
            "complete, except that those in tenants' namespaces were not checked: there is none"
            if asks_tenants and not facts.tenants
            else "complete"
        )
        yield Finding(what=what, state=OK, detail=detail)
    for index, (right, verbs) in enumerate(facts.lacking.items()):
        resource = (
            f"{right.resource}.{right.kind.group}"
            if right.kind.group and not right.subresource
            else right.resource
        )
        detail = f"may not {', '.join(verbs)} {resource}: {right.why}"
        state = NOTE if facts.role == "operator" else BROKEN
        way_out = (
            "The chart creates the ClusterRole, the controller the RoleBinding."
            if right.scope in ("tenant", "warm")
            else ""
        )
        commands = _grant(facts.role, right, verbs, settings, index=index)
        yield Finding(what=what, state=state, detail=detail, way_out=way_out, commands=commands)


def _warm_pods(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about each shape of `cluster.warm_pods`."""
    what, namespace = "warm pods", names.warm_namespace(settings)
    if not settings.warm_pods:
        return
    if not facts.is_known("warm_pods"):
        yield Finding(what=what, state=NOTE, detail=f"not checked: {facts.troubles['warm_pods']}")
        return
    if facts.warm_pods is None:
        detail = f"namespace {namespace} does not exist yet: the leading controller makes it"
        yield Finding(what=what, state=NOTE, detail=detail)
        return
    products = {
        (node["metadata"].get("labels") or {}).get(settings.gpu_label)
        for node in gpu_nodes(facts, settings)
    }
    for shape in settings.warm_pods:
        found = facts.warm_pods.get(shape.name, {})
        wanted = int((found.get("spec") or {}).get("replicas", 0))
        ready = int((found.get("status") or {}).get("readyReplicas") or 0)
        product = settings.gpu_products.get(shape.gpu, shape.gpu) if shape.gpu else None
        if product is not None and facts.is_known("nodes") and product not in products:
            yield Finding(
                what=what,
                state=BROKEN,
                detail=f"{shape.name}: no node has GPUs with {settings.gpu_label}={product}",
                way_out="Correct gpu of the shape, or cluster.gpu_products.",
            )
        elif not found or ready < wanted:
            yield Finding(
                what=what,
                state=NOTE,
                detail=f"{shape.name}: {ready} of {wanted} are ready",
                way_out="Claimed pods are being replaced, or the cluster has no room for more: "
                "lower min_pods.",
                commands=(
                    f"kubectl describe pods -n {namespace} -l {names.WARM_SHAPE}={shape.name}",
                ),
            )
        else:
            yield Finding(what=what, state=OK, detail=f"{shape.name}: {ready} ready")


def _account(role: Role, settings: ClusterSettings) -> str | None:
    """The service account of a role; None for an operator."""
    return {"controller": settings.controller_account, "operator": None}.get(
        role, settings.activator_account
    )


def _grant(
    role: Role, right: RbacRule, verbs: tuple[str, ...], settings: ClusterSettings, *, index: int
) -> tuple[str, str]:
    """Commands that grant verbs in the right's scope; for a tenant's namespace, commands that show
    the objects that should grant them."""
    name = f"pilotlight-{role}-{right.kind.plural}-{index}"
    account = _account(role, settings)
    if right.scope in ("tenant", "warm") and account is not None:
        bound = f"kubectl get rolebindings -A -l {names.MANAGED_BY}={names.manager_of(settings)}"
        granted = tenant_role(settings, account) if right.scope == "tenant" else warm_role(settings)
        return f"kubectl get clusterrole {granted} -o yaml", bound
    to = f"--serviceaccount={settings.namespace}:{account}" if account else "--user=YOU"
    group = f".{right.kind.group}" if right.kind.group else ""
    resource = f"{right.kind.plural}{group}" + (
        f"/{right.subresource}" if right.subresource else ""
    )
    what = f"--verb={','.join(verbs)} --resource={resource}" + "".join(
        f" --resource-name={one}" for one in right.names
    )
    if right.scope in ("all", "tenant"):
        return (
            f"kubectl create clusterrole {name} {what}",
            f"kubectl create clusterrolebinding {name} --clusterrole={name} {to}",
        )
    where = {
        "platform": settings.namespace,
        "knative": settings.knative_namespace,
        "warm": names.warm_namespace(settings),
    }[right.scope]
    return (
        f"kubectl create role {name} -n {where} {what}",
        f"kubectl create rolebinding {name} -n {where} --role={name} {to}",
    )


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _is_closed(node: Object) -> bool:
    """Whether a node is part of the control plane, which runs no function pods."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return any(str(taint.get("key", "")).startswith("node-role.kubernetes.io/") for taint in taints)

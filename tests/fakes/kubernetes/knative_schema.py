"""Schemas of Knative's kinds, in a compact form: the fields that its CustomResourceDefinitions
keep, everything else is pruned.

The lists of a Service's pod and container fields are those of
config/core/300-resources/service.yaml. The internal kinds are kept open below `spec` and `status`,
as are the statuses."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.schema import Schema, definitions

Json = dict[str, Any]
OPEN: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "integer"}
FLAG: Json = {"type": "boolean"}
TEXTS: Json = {"type": "array", "items": TEXT}
LABELS: Json = {"type": "object", "additionalProperties": TEXT}
AMOUNTS: Json = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields}


def _list(items: Json, *keys: str) -> Json:
    keyed: Json = (
        {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)} if keys else {}
    )
    return {"type": "array", "items": items, **keyed}


def _open_list() -> Json:
    return _list(OPEN)


_HTTP_HEADERS = _list({**_object(name=TEXT, value=TEXT), "required": ["name", "value"]})
_PROBE = _object(
    exec=_object(command=TEXTS),
    failureThreshold=NUMBER,
    grpc=_object(port=NUMBER, service=TEXT),
    httpGet=_object(
        host=TEXT,
        httpHeaders=_HTTP_HEADERS,
        path=TEXT,
        port={"x-kubernetes-int-or-string": True},
        scheme=TEXT,
    ),
    initialDelaySeconds=NUMBER,
    periodSeconds=NUMBER,
    successThreshold=NUMBER,
    tcpSocket=_object(host=TEXT, port={"x-kubernetes-int-or-string": True}),
    timeoutSeconds=NUMBER,
)
_REFERENCE = _object(name=TEXT, optional=FLAG)
_KEY = {**_object(key=TEXT, name=TEXT, optional=FLAG), "required": ["key"]}
_ENV = {
    **_object(
        name=TEXT,
        value=TEXT,
        valueFrom=_object(
            configMapKeyRef=_KEY, secretKeyRef=_KEY, fieldRef=OPEN, resourceFieldRef=OPEN
        ),
    ),
    "required": ["name"],
}
_CONTAINER_SECURITY = _object(
    allowPrivilegeEscalation=FLAG,
    capabilities=_object(add=TEXTS, drop=TEXTS),
    privileged=FLAG,
    readOnlyRootFilesystem=FLAG,
    runAsGroup=NUMBER,
    runAsNonRoot=FLAG,
    runAsUser=NUMBER,
    seccompProfile={**_object(localhostProfile=TEXT, type=TEXT), "required": ["type"]},
)
_MOUNT = {
    **_object(mountPath=TEXT, mountPropagation=TEXT, name=TEXT, readOnly=FLAG, subPath=TEXT),
    "required": ["mountPath", "name"],
}
_CONTAINER = _object(
    args=TEXTS,
    command=TEXTS,
    env=_list(_ENV),
    envFrom=_list(_object(configMapRef=_REFERENCE, prefix=TEXT, secretRef=_REFERENCE)),
    image=TEXT,
    imagePullPolicy=TEXT,
    livenessProbe=_PROBE,
    name=TEXT,
    ports=_list(
        {**_object(containerPort=NUMBER, name=TEXT, protocol={**TEXT, "default": "TCP"})},
        "containerPort",
        "protocol",
    ),
    readinessProbe=_PROBE,
    resources=_object(limits=AMOUNTS, requests=AMOUNTS),
    securityContext=_CONTAINER_SECURITY,
    startupProbe=_PROBE,
    terminationMessagePath=TEXT,
    terminationMessagePolicy=TEXT,
    volumeMounts=_list(_MOUNT),
    workingDir=TEXT,
)
_FILES = _list({**_object(key=TEXT, mode=NUMBER, path=TEXT), "required": ["key", "path"]})
_VOLUME = {
    **_object(
        configMap=_object(defaultMode=NUMBER, items=_FILES, name=TEXT, optional=FLAG),
        csi=OPEN,
        emptyDir=OPEN,
        ephemeral=OPEN,
        hostPath=OPEN,
        image=OPEN,
        name=TEXT,
        persistentVolumeClaim=OPEN,
        projected=_object(defaultMode=NUMBER, sources=_open_list()),
        secret=_object(defaultMode=NUMBER, items=_FILES, optional=FLAG, secretName=TEXT),
    ),
    "required": ["name"],
}
_POD_SPEC = {
    **_object(
        affinity=OPEN,
        automountServiceAccountToken=FLAG,
        containerConcurrency=NUMBER,
        containers=_list(_CONTAINER),
        dnsConfig=OPEN,
        dnsPolicy=TEXT,
        enableServiceLinks=FLAG,
        hostAliases=_open_list(),
        hostIPC=FLAG,
        hostNetwork=FLAG,
        hostPID=FLAG,
        idleTimeoutSeconds=NUMBER,
        imagePullSecrets=_list(_object(name=TEXT)),
        initContainers=_open_list(),
        nodeSelector={**OPEN, "x-kubernetes-map-type": "atomic"},
        priorityClassName=TEXT,
        responseStartTimeoutSeconds=NUMBER,
        runtimeClassName=TEXT,
        schedulerName=TEXT,
        securityContext=OPEN,
        serviceAccountName=TEXT,
        shareProcessNamespace=FLAG,
        timeoutSeconds=NUMBER,
        tolerations=_open_list(),
        topologySpreadConstraints=_open_list(),
        volumes=_list(_VOLUME),
    ),
    "required": ["containers"],
}
_TEMPLATE = _object(
    metadata={
        **_object(annotations=LABELS, finalizers=TEXTS, labels=LABELS, name=TEXT, namespace=TEXT),
        "x-kubernetes-preserve-unknown-fields": True,
    },
    spec=_POD_SPEC,
)
_TRAFFIC = _list(
    _object(
        configurationName=TEXT,
        latestRevision=FLAG,
        percent=NUMBER,
        revisionName=TEXT,
        tag=TEXT,
        url=TEXT,
    )
)


def _top(spec: Json, status: Json = OPEN) -> Schema:
    meta = definitions()["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]
    return Schema(
        _object(apiVersion=TEXT, kind=TEXT, metadata=meta, spec=spec, status=status), definitions()
    )


SCHEMAS: dict[str, Schema] = {
    "Service": _top(_object(template=_TEMPLATE, traffic=_TRAFFIC)),
    "Configuration": _top(_object(template=_TEMPLATE)),
    "Revision": _top(_POD_SPEC),
    "Route": _top(_object(traffic=_TRAFFIC)),
    "PodAutoscaler": _top(OPEN),
    "Metric": _top(OPEN),
    "ServerlessService": _top(OPEN),
    "Ingress": _top(OPEN),
}

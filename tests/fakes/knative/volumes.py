"""A pod's volumes as directories of this machine, and its environment."""

from __future__ import annotations

import base64
import math
import os
from pathlib import Path
from typing import Any

from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import CONFIG_MAP, SECRET
from pilotlight.launcher import work_dir
from tests.fakes.kubernetes.quotas import amount

Json = dict[str, Any]
SIMULATED_WORKER = "TESTS_SIMULATED_WORKER"
"""Variable with the path of a program that containers run in the place of the worker's."""
_WORKER = Path(work_dir.__file__).parents[1] / "worker" / "boot.py"


class Missing(Exception):
    """Raised when a volume or variable refers to what is not there; the kubelet says it and tries
    again."""


async def mounts(cluster: Cluster, pod: Json, container: Json, directory: Path) -> list[Json]:
    """`{source, target, read_only}` of each mount. Raises Missing."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    security = {
        **(pod["spec"].get("securityContext") or {}),
        **(container.get("securityContext") or {}),
    }
    found = []
    if file := os.environ.get(SIMULATED_WORKER):
        found.append({"source": file, "target": str(_WORKER), "read_only": True})
    for mount in container.get("volumeMounts") or ():
        source = await _source(cluster, pod, volumes[mount["name"]], directory)
        if "emptyDir" in volumes[mount["name"]]:
            os.chown(source, security.get("runAsUser", 0), security.get("runAsGroup", 0))
        found.append(
            {
                "source": str(source),
                "target": mount["mountPath"],
                "read_only": bool(mount.get("readOnly")),
            }
        )
    return found


async def _source(cluster: Cluster, pod: Json, volume: Json, directory: Path) -> Path:
    if "hostPath" in volume:
        path = Path(str(volume["hostPath"]["path"]))
        if volume["hostPath"].get("type") == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True, mode=0o755)
        if not path.exists():
            raise Missing(f"hostPath type check failed: {path} is not a directory")
        return path
    place = directory / "volumes" / str(volume["name"])
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    if "configMap" in volume:
        await _files(
            cluster, pod, place, volume["configMap"]["name"], volume["configMap"], of_secret=False
        )
    elif "secret" in volume:
        await _files(
            cluster, pod, place, volume["secret"]["secretName"], volume["secret"], of_secret=True
        )
    elif "emptyDir" not in volume:
        raise Missing(f"volume {volume['name']}: this kubelet does not know its kind")
    return place


async def _files(
    cluster: Cluster, pod: Json, place: Path, name: str, terms: Json, *, of_secret: bool
) -> None:
    data = await _data(
        cluster, pod, name, of_secret=of_secret, optional=bool(terms.get("optional"))
    )
    wanted = (
        {item["key"]: item["path"] for item in terms["items"]}
        if terms.get("items")
        else {key: key for key in data}
    )
    for key, path in wanted.items():
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data[key])
        target.chmod(terms.get("defaultMode", 0o644))


async def _data(
    cluster: Cluster, pod: Json, name: str, *, of_secret: bool, optional: bool
) -> dict[str, bytes]:
    kind, what = (SECRET, "secret") if of_secret else (CONFIG_MAP, "configmap")
    found = await cluster.get(kind, name, pod["metadata"]["namespace"])
    if found is None:
        if optional:
            return {}
        raise Missing(f'{what} "{name}" not found')
    if of_secret:
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    return {key: value.encode() for key, value in (found.get("data") or {}).items()}


async def environment(cluster: Cluster, pod: Json, container: Json, *, ip: str) -> dict[str, str]:
    """The container's variables. Raises Missing."""
    metadata = pod["metadata"]
    found = {"HOSTNAME": metadata["name"]}
    for source in container.get("envFrom") or ():
        for field, of_secret in (("secretRef", True), ("configMapRef", False)):
            if field in source:
                terms = source[field]
                data = await _data(
                    cluster,
                    pod,
                    terms["name"],
                    of_secret=of_secret,
                    optional=bool(terms.get("optional")),
                )
                found |= {
                    source.get("prefix", "") + key: value.decode() for key, value in data.items()
                }
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
    }
    fields |= {"status.podIP": ip, "spec.nodeName": pod["spec"].get("nodeName", "")}
    fields |= {"status.hostIP": "127.0.0.1"}
    fields["spec.serviceAccountName"] = pod["spec"].get("serviceAccountName", "")
    for kind in ("labels", "annotations"):
        fields |= {f"metadata.{kind}['{k}']": v for k, v in (metadata.get(kind) or {}).items()}
    for one in container.get("env") or ():
        where = one.get("valueFrom") or {}
        if "fieldRef" in where:
            found[one["name"]] = fields.get(where["fieldRef"]["fieldPath"], "")
        elif "resourceFieldRef" in where:
            found[one["name"]] = _resource(container, where["resourceFieldRef"])
        elif "secretKeyRef" in where or "configMapKeyRef" in where:
            terms = where.get("secretKeyRef") or where["configMapKeyRef"]
            data = await _data(
                cluster,
                pod,
                terms["name"],
                of_secret="secretKeyRef" in where,
                optional=bool(terms.get("optional")),
            )
            found[one["name"]] = data[terms["key"]].decode()
        else:
            found[one["name"]] = one.get("value", "")
    return found


def _resource(container: Json, terms: Json) -> str:
    """A container's request or limit in units of `divisor`, rounded up (Kubernetes: "Downward
    API")."""
    kind, _, name = str(terms["resource"]).partition(".")
    value = ((container.get("resources") or {}).get(kind) or {}).get(name, "0")
    return str(math.ceil(amount(value) / (amount(terms.get("divisor") or "1") or 1.0)))

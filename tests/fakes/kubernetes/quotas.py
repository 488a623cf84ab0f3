"""LimitRange and ResourceQuota, as far as pods go: defaults for containers, and 403 where a
namespace has used up what it may.

Amounts are compared as numbers. (Kubernetes: "Resource Quotas", "Limit Ranges".)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fakes.kubernetes.problems import Refused, details_of
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import Review

Json = dict[str, Any]
_UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "m": 1e-3,
}
_PLAIN = ("cpu", "memory", "ephemeral-storage")
"""Quotas on these names are on requests."""


def amount(text: str | float) -> float:
    """A Kubernetes quantity as a number."""
    text = str(text)
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * _UNITS.get(unit, 1)


class Quotas:
    """An admission hook of the API server."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, review: Review) -> None:
        """Raises Refused 403."""
        if review.resource.key != ("", "pods") or not review.body:
            return
        pod, namespace = review.body, review.body["metadata"]["namespace"]
        if review.before is not None and _is_equal(review.before, pod):
            return
        for _, stored in self._store.all(("", "limitranges"), namespace):
            for limit in stored.body["spec"].get("limits") or ():
                if limit["type"] == "Container":
                    _default(pod, limit)
        for _, stored in self._store.all(("", "resourcequotas"), namespace):
            self._check(pod, stored.body, namespace)

    def _check(self, pod: Json, quota: Json, namespace: str) -> None:
        hard = {
            name: value
            for name, value in (quota["spec"].get("hard") or {}).items()
            if _counts(name)
        }
        name, where = pod["metadata"]["name"], quota["metadata"]["name"]
        missing = sorted(
            what
            for what in hard
            if what != "pods" and _is_computed(what) and not all(_of_containers(pod, what))
        )
        if missing:
            raise _forbidden(name, f"failed quota: {where}: must specify {','.join(missing)}")
        others = [stored.body for _, stored in self._store.all(("", "pods"), namespace)]
        alive = [
            one
            for one in others
            if one.get("status", {}).get("phase") not in ("Failed", "Succeeded")
            and one["metadata"]["name"] != name  # itself, before it is resized
        ]
        over = []
        for what, most in hard.items():
            wanted, used = _total(pod, what), sum(_total(one, what) for one in alive)
            if wanted > 0 and used + wanted > amount(most):
                over.append((what, wanted, used, most))
        if over:
            said = (",".join(f"{one[0]}={one[index]:g}" for one in over) for index in (1, 2))
            limited = ",".join(f"{one[0]}={one[3]}" for one in over)
            requested, used_text = said
            raise _forbidden(
                name,
                f"exceeded quota: {where}, requested: {requested}, used: {used_text}, limited: "
                f"{limited}",
            )


def _forbidden(name: str, text: str) -> Refused:
    return Refused(403, f'pods "{name}" is forbidden: {text}', details=details_of("", "pods", name))


def _counts(what: str) -> bool:
    return what in ("pods", *_PLAIN) or what.startswith(("requests.", "limits."))


def _is_computed(what: str) -> bool:
    """Of cpu and memory every container must say something; of extended resources none needs to."""
    return what.rpartition(".")[2] in _PLAIN and "/" not in what


def _is_equal(pod: Json, other: Json) -> bool:
    """Whether both take the same resources."""
    wanted, there = (
        [c.get("resources") for c in one["spec"]["containers"]] for one in (pod, other)
    )
    return wanted == there


def _of_containers(pod: Json, what: str) -> list[str | float | None]:
    kind, _, name = (
        what.partition(".") if what.startswith(("requests.", "limits.")) else ("requests", "", what)
    )
    return [
        ((container.get("resources") or {}).get(kind) or {}).get(name)
        for container in pod["spec"]["containers"]
    ]


def _total(pod: Json, what: str) -> float:
    if what == "pods":
        return 1.0
    return sum(amount(value) for value in _of_containers(pod, what) if value is not None)


def _default(pod: Json, limit: Mapping[str, Any]) -> None:
    for container in pod["spec"]["containers"]:
        resources = container.setdefault("resources", {})
        limits = {**(limit.get("default") or {}), **(resources.get("limits") or {})}
        requests = {
            **(limit.get("defaultRequest") or limit.get("default") or {}),
            **(resources.get("requests") or {}),
        }
        if limits:
            resources["limits"] = limits
        if requests:
            resources["requests"] = requests

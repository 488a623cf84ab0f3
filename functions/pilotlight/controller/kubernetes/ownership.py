"""Whose objects are in the cluster: those of this platform, or of another one that has the same
name and namespace (usually this one, before its database was replaced)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import UNLABELLED

FOREIGN = "ForeignObjects"
"""Reason of a function's status while nothing is reconciled."""
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOwnership:
    """What the leader found.

    Attributes:
        platform: our id.
        foreign: tenants' namespaces by the platform that they belong to (an id, or `unlabelled`);
            while there are any, the controller changes nothing in the cluster.
    """

    platform: str
    foreign: Mapping[str, tuple[str, ...]]

    @property
    def message(self) -> str:
        """What is wrong, and the ways out; "" if nothing is."""
        if not self.foreign:
            return ""
        said = "; ".join(
            f"{', '.join(namespaces[:_NAMED])}{' …' if len(namespaces) > _NAMED else ''} of "
            f"{platform}"
            for platform, namespaces in self.foreign.items()
        )
        return (
            f"the cluster has namespaces of another platform ({said}), and this one is "
            f"{self.platform}: nothing is changed. If the database was replaced by mistake, "
            f"connect the right one. To take them over, and delete the functions in them that this "
            f"platform does not have: {'; '.join(self.commands)}"
        )

    @property
    def commands(self) -> list[str]:
        """Commands that take the objects over."""
        return [f"pilotlight cluster adopt {platform}" for platform in self.foreign]


def owner_of(item: Mapping[str, Any]) -> str:
    """Return the id of the platform that applied an object, or `UNLABELLED`."""
    return str((item["metadata"].get("labels") or {}).get(names.PLATFORM) or UNLABELLED)


def foreign_namespaces(
    namespaces: Iterable[Mapping[str, Any]], *, owns: Callable[[str], bool]
) -> dict[str, tuple[str, ...]]:
    """Return the names of tenants' namespaces that are not ours, by platform, sorted."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for item in namespaces:
        if not owns(platform := owner_of(item)):
            found[platform].append(str(item["metadata"]["name"]))
    return {platform: tuple(sorted(found[platform])) for platform in sorted(found)}
